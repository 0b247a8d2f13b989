"""Predictions for a whole file of a task's own format, in the form that its scorers read."""

from collections.abc import Iterator
import json
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from bert_jax.inference import bert as bert_lib
from bert_jax.inference.task_heads import Predictor
from bert_jax.labelled import choices
from bert_jax.labelled import conll
from bert_jax.labelled import glue
from bert_jax.labelled import squad
from bert_jax.labelled import texts
from bert_jax.labelled.choices import ChoiceExample
from bert_jax.labelled.texts import TextExample
from bert_jax.runtime.console import print_summary
from bert_jax.tasks.finetuning import not_empty
from bert_jax.tasks.token_classification import word_pieces


def _jsonl(answers: list[dict]) -> str:
  return ''.join(json.dumps(answer, ensure_ascii=False) + '\n' for answer in answers)


def _classes(predictor: Predictor, data: ConfigDict,
             examples: list[TextExample]) -> Iterator[tuple[str, str]]:
  asked = [e.text if e.text_pair is None else (e.text, e.text_pair) for e in examples]
  if data.format.startswith('glue'):
    task, logits = glue.find(data.format), predictor.class_logits(asked)
    predictions = logits.argmax(1) if task.labels else logits[:, 0]
    yield glue.submission_name(task, data.test), glue.submission(task, predictions.tolist())
  else:
    yield 'predictions.jsonl', _jsonl(predictor.classify(asked))


def _tags(predictor: Predictor, data: ConfigDict,
          sentences: list[conll.TaggedWords]) -> Iterator[tuple[str, str]]:
  del data
  pieces = word_pieces([s.words for s in sentences], predictor.bert.tokenizer)
  lines = []
  for sentence, probabilities in zip(sentences, predictor.word_tags(pieces)):
    lines += [f'{word} {predictor.model.labels[i]}'
              for word, i in zip(sentence.words, probabilities.argmax(-1))] + ['']
  yield 'predictions.conll', '\n'.join(lines) + '\n'


def _answers(predictor: Predictor, data: ConfigDict,
             questions: list[squad.Question]) -> Iterator[tuple[str, str]]:
  del data
  found = predictor.answer([(q.question, q.context) for q in questions],
                           predictor.model.facts['null_threshold'])
  yield 'predictions.json', json.dumps(
      {q.id: a['answer'] for q, a in zip(questions, found)}, ensure_ascii=False) + '\n'
  yield 'n_best.json', json.dumps(
      {q.id: a['n_best'] for q, a in zip(questions, found)}, ensure_ascii=False) + '\n'


def _choices(predictor: Predictor, data: ConfigDict,
             examples: list[ChoiceExample]) -> Iterator[tuple[str, str]]:
  del data
  yield 'predictions.jsonl', _jsonl(predictor.choose([(e.text, e.choices) for e in examples]))


_TASKS = {'sequence_classification': _classes, 'token_classification': _tags,
          'question_answering': _answers, 'multiple_choice': _choices}


def read(config: ConfigDict) -> list[Any]:
  """The examples of data.test, whose labels are not looked at.

  Raises:
    UserError: a mistake in the file, or an empty one.
  """
  data = config.data
  readers = {
      'sequence_classification': lambda: texts.read(data.test, data.format, texts.columns(data),
                                                    'test', labelled=False),
      'token_classification': lambda: conll.read(data.test, data, labelled=False),
      'question_answering': lambda: squad.read(data.test),
      'multiple_choice': lambda: choices.read(data.test, data, labelled=False)}
  return not_empty(readers[config.task](), data.test)


def predict(config: ConfigDict, workdir: str):
  """Writes predictions for data.test into WORKDIR/predictions, with the run's best checkpoint.

  GLUE's tasks get their submission file, SQuAD its predictions.json, CoNLL files a word and a tag
  on each line, all else JSON lines.
  """
  predictor = Predictor(bert_lib.load(workdir), config.task)
  folder = epath.Path(workdir) / 'predictions'
  folder.mkdir(parents=True, exist_ok=True)
  for name, content in _TASKS[config.task](predictor, config.data, read(config)):
    (folder / name).write_text(content)
    print_summary([('predicted', str(folder / name))])
