"""Extractive question answering: finds the span of a text that answers a question.

As for SQuAD in Devlin et al. 2019, sections 4.2 and 4.3.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import functools
import json
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from bert_jax.config_fields import HARMLESS, Field, at_least, one_of
from bert_jax.data.tokens import Tokens
from bert_jax.errors import UserError, require, require_choice
from bert_jax.labelled import packed_examples, squad
from bert_jax.model import architectures, bert_config, layers
from bert_jax.objectives import losses
from bert_jax.tasks import answers, finetuning, finetuning_data, metrics, task_kind

# The published values in tokens, for models whose files do not record these values.
WINDOW, STRIDE = 384, 128
_FORMATS = ('squad',)


class BertForQuestionAnswering(nn.Module):
  """Scores each token as start and end of the answer; as in BERT, without dropout."""

  config: bert_config.BertConfig
  num_labels: int = 2

  def setup(self):
    self.bert = architectures.make_encoder(self.config)
    self.qa_outputs = finetuning.output_layer(self.config, self.num_labels)

  def __call__(self, tokens: Tokens, starts: jax.Array | None = None, *,
               deterministic: bool = True) -> jax.Array:
    """[B, L] inputs -> logits [B, L, 2] float32: the start, the end."""
    hidden = self.bert.encode(tokens, deterministic=deterministic)
    return self.qa_outputs(self.bert.features(hidden))


def longer_than_windows(config: ConfigDict) -> str:
  """Says that a stride beyond the text of a window has no effect."""
  # [CLS] question [SEP] window [SEP], with a question of one token.
  most = config.max_len - 4
  return '' if config.data.doc_stride <= most else (
      f'a window of max_len={config.max_len} holds at most {most} tokens of the text: '
      f'give at most {most}')


def all_answered(config: ConfigDict, job: Any) -> str:
  """Says that the threshold has no effect where every question has an answer."""
  return '' if job.data.files.null_threshold is not None else (
      f'every question of data.train={config.data.train} has an answer')


@dataclasses.dataclass(frozen=True)
class Windows(packed_examples.Features):
  """The windows of questions, and their texts."""

  contexts: Sequence[answers.Context] = ()  # one for each question


def _target(context: answers.Context, window: answers.Window,
            question: squad.Question) -> np.ndarray:
  """Returns [tokens, 2] int32: 1 at the answer's start (column 0) and end (column 1)."""
  # A window without the whole answer learns "no answer": both targets are [CLS]. If the
  # answer is not at its answer_start, the window has no target and no loss.
  target = np.zeros((len(window.input.ids), 2), np.int32)
  if not question.in_place:
    return target
  start = end = 0
  if question.answers:
    begin = question.starts[0]
    span = answers.token_span(context.spans, begin, begin + len(question.answers[0]))
    if span and window.first <= span[0] and span[1] < window.first + window.count:
      start, end = (window.offset + token - window.first for token in span)
  target[start, 0] = target[end, 1] = 1
  return target


def features(questions: Sequence[squad.Question], contexts: Sequence[answers.Context], *,
             by_window: bool) -> Windows:
  """Makes the windows of questions, with one example per window or per question."""
  inputs, owners, targets = [], [], []
  for i, (question, context) in enumerate(zip(questions, contexts)):
    for window in context.windows:
      owners.append(len(inputs) if by_window else i)
      inputs.append(window.input)
      targets.append(_target(context, window, question))
  return Windows(inputs, np.array(owners, np.int64), token_targets=targets,
                 contexts=contexts)


Candidates = list[tuple[list[answers.Span], float]]  # (best spans, score of no answer)


def _candidates(contexts: Sequence[answers.Context], logits: Iterable[np.ndarray], *,
                n_best: int, max_answer_len: int) -> Candidates:
  """Returns the best spans of each text and its score of no answer."""
  logits = iter(logits)
  return [answers.best_spans(context, [next(logits) for _ in context.windows],
                             n_best=n_best, max_answer_len=max_answer_len)
          for context in contexts]


@dataclasses.dataclass(frozen=True)
class QuestionAnswering(finetuning.FineTuning):
  """Predicts the start and the end of the answer."""

  def metrics(self, logits: jax.Array, batch: packed_examples.Batch) -> losses.Metrics:
    """Returns 'loss' and 'accuracy' of logits [R, L, 2] over the windows.

    The loss is the mean over start and end. For the accuracy, both must be right.
    """
    # Windows share rows: each softmax runs over the tokens of one window.
    slots = jnp.arange(1, batch.starts.shape[1] + 1)
    member = batch.tokens.text_ids[:, None, :] == slots[:, None]  # [R, P, L]
    has_target = member & (batch.token_targets[:, None, :, 0] > 0)  # [R, P, L]
    is_real = has_target.any(-1).astype(jnp.float32)  # [R, P]
    of_windows, right = 0.0, True
    for i in (0, 1):
      scores = jnp.where(member, logits[:, None, :, i], layers.MASKED)  # [R, P, L]
      is_target = member & (batch.token_targets[:, None, :, i] > 0)  # [R, P, L]
      chosen = jnp.where(is_target, scores, 0).sum(-1)
      of_windows += 0.5 * (jax.nn.logsumexp(scores, axis=-1) - chosen)
      right &= chosen >= scores.max(-1)
    return {'loss': losses.weighted(of_windows, is_real),
            'accuracy': losses.weighted(right, is_real)}


@dataclasses.dataclass(frozen=True)
class QuestionFiles(finetuning_data.ExampleFiles):
  """Questions on texts, in the format of SQuAD."""

  labels: tuple[str, ...] = ('start', 'end')
  n_best: int = 20  # starts and ends tried in each window
  max_answer_len: int = 30  # tokens
  null_threshold: float | None = None

  best_score = 'f1'
  score_names = ('exact_match', 'f1')

  config_fields = {
      # squad: SQuAD v1.1 or v2.0; a question without an answer makes it v2.0.
      'data.format': Field('squad', one_of(_FORMATS), HARMLESS),
      'data.text_column': None,
      'data.text_pair_column': None,
      'data.label_column': None,
      # Tokens from the start of one window to the start of the next.
      'data.doc_stride': Field(128, at_least(1), HARMLESS, (longer_than_windows,)),
      # Starts and ends tried in each window.
      'data.n_best': Field(20, at_least(1), HARMLESS),
      'data.max_answer_len': Field(30, at_least(1), HARMLESS),  # tokens of an answer
      # v2.0: how far "no answer" must score above the best answer.
      'data.null_threshold': Field(0.0, on_resume=HARMLESS,
                                   unused_by_data=(all_answered,)),
      'max_len': 384,
      'train_epochs': 2.0,
  }

  @staticmethod
  def read(path, data, split, notes):
    require_choice('data.format', data.format, _FORMATS)  # data.eval may have its own
    questions = finetuning_data.not_empty(squad.read(path, labelled=split != 'test'), path)
    if split != 'train':
      return questions
    # A wrong position would train the model on a wrong span.
    in_place = [q for q in questions if q.in_place]
    if len(in_place) < len(questions):
      notes.append(f'{len(questions) - len(in_place):,} of {len(questions):,} questions of '
                   f'{path} are left out: their answer is not at its answer_start')
    return finetuning_data.not_empty(
        in_place, f'{path} (of questions whose answer is at its answer_start)')

  @staticmethod
  def check_training(config, examples):
    require(any(question.answers for question in examples),
            f'{config.data.train}: no question has an answer: there is nothing to learn')

  @classmethod
  def make(cls, config, questions, _):
    data = config.data
    unanswerable = any(not q.answers for q in questions)
    task = QuestionAnswering(
        BertForQuestionAnswering(architectures.make_config(config.model)))
    return cls(task, n_best=data.n_best, max_answer_len=data.max_answer_len,
               null_threshold=data.null_threshold if unanswerable else None)

  def with_facts(self, facts, notes):
    # A v2.0 model may return "no answer", even if every question here has an answer.
    threshold = facts.get('null_threshold')
    return self if threshold is None else dataclasses.replace(
        self, null_threshold=threshold)

  def features(self, examples, tokenizer, config, *, path, is_train):
    try:
      contexts = answers.read([(q.question, q.context) for q in examples], tokenizer,
                              config.max_len, config.data.doc_stride)
    except UserError as e:
      raise UserError(f'{path}: {e}') from e
    return features(examples, contexts, by_window=is_train)

  def candidates(self, split: finetuning_data.Split,
                 outputs: list[finetuning_data.Output]) -> Candidates:
    """Returns the best spans of each question of a file, and its score of no answer."""
    f = split.features
    logits = finetuning_data.by_input(outputs, len(f.inputs))
    return _candidates(f.contexts, logits, n_best=self.n_best,
                       max_answer_len=self.max_answer_len)

  def scores(self, split, outputs):
    """Returns exact match and F1; for v2.0 also at the best threshold."""
    questions, candidates = split.examples, self.candidates(split, outputs)
    unanswerable = self.null_threshold is not None
    answered = predicted(questions, candidates, self.null_threshold)
    scores = metrics.answers(questions, answered, unanswerable=unanswerable)
    if not unanswerable:
      return scores
    margins = [null - spans[0].score if spans else np.inf for spans, null in candidates]
    # An infinite threshold answers every question.
    answered = predicted(questions, candidates, np.inf)
    return scores | metrics.best_threshold(questions, answered, margins)


class QuestionKind(task_kind.TaskKind):
  """The span of a text that answers a question."""

  name = 'question_answering'
  files = QuestionFiles
  parameter_groups = ('qa_outputs',)
  head = BertForQuestionAnswering
  outputs = ('start_logits', 'end_logits')
  scores_tokens = True
  transformers = 'ForQuestionAnswering'
  fields = ('question', 'context')

  @staticmethod
  def answer(bert, examples, options):
    threshold = options.null_threshold
    if threshold is None:  # a run with unanswerable questions stores its own
      threshold = bert.model.facts.get('null_threshold')
    return answer(bert, [(e['question'], e['context']) for e in examples], threshold)

  @staticmethod
  def write_test(bert, _, questions):
    results = answer(bert, [(q.question, q.context) for q in questions],
                     bert.model.facts['null_threshold'])
    for name, field in (('predictions.json', 'answer'), ('n_best.json', 'n_best')):
      content = {q.id: result[field] for q, result in zip(questions, results)}
      yield name, json.dumps(content, ensure_ascii=False) + '\n'


def predicted(questions: Sequence[squad.Question], candidates: Candidates,
              null_threshold: float | None) -> dict[str, str]:
  """Chooses the answer to each question: {id: text}, '' = no answer."""
  return {q.id: answers.answer(q.context, spans, null, null_threshold)['answer']
          for q, (spans, null) in zip(questions, candidates)}


def answer(bert: task_kind.TrainedModel, questions: Sequence[tuple[str, str]],
           null_threshold: float | None = None) -> list[task_kind.Answer]:
  """Answers each (question, text) from its windows.

  For the form of an answer and for `null_threshold`, see `answers.answer`.

  Raises:
    UserError: the model is for another task, or a question leaves no room for its text.
  """
  facts, max_len = bert.model.facts, bert.trained_length
  # Other libraries' checkpoints do not record their windows.
  if 'doc_stride' not in facts:
    max_len = min(WINDOW, max_len)
  contexts = answers.read(questions, bert.tokenizer, max_len,
                          facts.get('doc_stride', STRIDE))
  logits = bert.per_token(
      [window.input for context in contexts for window in context.windows],
      functools.partial(task_kind.apply_head, QuestionKind.head_of(bert)))
  candidates = _candidates(
      contexts, logits,
      n_best=facts.get('n_best', QuestionFiles.n_best),
      max_answer_len=facts.get('max_answer_len', QuestionFiles.max_answer_len))
  return [answers.answer(text, spans, null, null_threshold)
          for (_, text), (spans, null) in zip(questions, candidates)]
