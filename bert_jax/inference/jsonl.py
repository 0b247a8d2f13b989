"""Predictions over JSON lines: one object in, one object out, in order."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import itertools
import json
import sys
from typing import Any
from typing import NamedTuple
from typing import TextIO

from etils import epath
import tqdm

from bert_jax.data import storage
from bert_jax.errors import UserError
from bert_jax.inference import bert as bert_lib
from bert_jax.inference import vectors
from bert_jax.inference.bert import Bert
from bert_jax.inference.task_heads import Predictor
from bert_jax.interop.pretrained import HEAD_TASKS

# Examples that are read before any is answered: few at first, so that the first answers come at
# once, then twice as many each time, because texts of like length run best together.
_FIRST, _MOST = 1, 4096

Example = dict[str, Any]
Model = Bert | Predictor  # what a task's function is given


@dataclasses.dataclass(frozen=True)
class Options:
  """How texts become vectors: the arguments of `Bert.embed`; and when there is no answer."""

  pooling: str = 'mean'
  normalize: bool = False
  layers: tuple[int, ...] = (-1,)
  long: str = 'head'
  max_len: int | None = None
  null_threshold: float | None = None  # of question_answering

  def embedding(self) -> dict[str, Any]:
    """The arguments of `Bert.embed`."""
    return {name: value for name, value in dataclasses.asdict(self).items()
            if name != 'null_threshold'}


def _fill_mask(bert: Bert, examples: Sequence[Example], options: Options) -> list[Example]:
  del options
  return [{'masks': masks} for masks in bert.fill_mask([e['text'] for e in examples])]


def _next_sentence(bert: Bert, examples: Sequence[Example], options: Options) -> list[Example]:
  del options
  pairs = [(e['text'], e['text_pair']) for e in examples]
  return [{'is_next': probability} for probability in bert.next_sentence(pairs)]


def _score(bert: Bert, examples: Sequence[Example], options: Options) -> list[Example]:
  del options
  return [bert.score(e['text']) for e in examples]


def _embed(bert: Bert, examples: Sequence[Example], options: Options) -> list[Example]:
  texts = [e['text'] for e in examples]
  found = bert.embed(texts, **options.embedding())
  if options.pooling != 'none':
    return [{'embedding': vector.tolist()} for vector in found]
  encoded = bert.tokenizer.encode_with_offsets(texts)
  return [{'tokens': [
      {'token': token, 'start': start, 'end': end, 'vector': vector.tolist()}
      for token, (start, end), vector in zip(bert.tokenizer.tokens(ids), offsets, of_text)]}
      for (ids, offsets), of_text in zip(encoded, found)]


def _classify(predictor: Predictor, examples: Sequence[Example],
              options: Options) -> list[Example]:
  del options
  if not all(isinstance(e.get('text_pair', ''), str) for e in examples):
    raise UserError("'text_pair' has to be a text")
  return predictor.classify([(e['text'], e['text_pair']) if 'text_pair' in e else e['text']
                             for e in examples])


def _tag(predictor: Predictor, examples: Sequence[Example], options: Options) -> list[Example]:
  del options
  return predictor.tag([e['text'] for e in examples])


def _answer_questions(predictor: Predictor, examples: Sequence[Example],
                      options: Options) -> list[Example]:
  return predictor.answer([(e['question'], e['context']) for e in examples],
                          options.null_threshold)


def _choose(predictor: Predictor, examples: Sequence[Example], options: Options) -> list[Example]:
  del options
  for e in examples:
    choices = e.get('choices')
    if not isinstance(choices, list) or len(choices) < 2 or not all(
        isinstance(choice, str) for choice in choices):
      raise UserError("'choices' has to be a list of at least two texts")
  return predictor.choose([(e['text'], e['choices']) for e in examples])


class Task(NamedTuple):
  """One kind of prediction."""

  fields: tuple[str, ...]  # texts that an example must have
  function: Callable[[Any, Sequence[Example], Options], list[Example]]  # of a Model


TASKS = {
    'fill_mask': Task(('text',), _fill_mask),
    'next_sentence': Task(('text', 'text_pair'), _next_sentence),
    'score': Task(('text',), _score),
    'embed': Task(('text',), _embed),
    'sequence_classification': Task(('text',), _classify),
    'token_classification': Task(('text',), _tag),
    'question_answering': Task(('question', 'context'), _answer_questions),
    'multiple_choice': Task(('text',), _choose),
}


def read_examples(stream: TextIO, name: str, fields: tuple[str, ...]) -> Iterator[Example]:
  """The objects of JSON lines that have `fields`, all strings; blank lines are left out.

  Raises:
    UserError: naming the line that is not such an object.
  """
  number = 0
  try:
    for number, line in enumerate(stream, 1):
      if not line.strip():
        continue
      example = storage.parse_json(line)
      for field in fields:
        if not isinstance(example, dict) or not isinstance(example.get(field), str):
          raise UserError(f'{name}, line {number}: needs a JSON object with the text '
                          f'{" and ".join(map(repr, fields))}')
      yield example
  except UnicodeDecodeError as e:
    raise UserError(f'{name}, after line {number}: invalid UTF-8 ({e.reason})') from e
  except ValueError as e:
    raise UserError(f'{name}, line {number}: not JSON ({e})') from e


def _answer(task: Task, model: Model, examples: Sequence[Example], options: Options, name: str,
            before: int) -> list[Example]:
  try:
    return task.function(model, examples, options)
  except UserError as e:
    if len(examples) == 1:
      raise UserError(f'{name}, example {before + 1}: {e}') from e
  # One of them is at fault: it is found alone.
  return [_answer(task, model, [example], options, name, before + i)[0]
          for i, example in enumerate(examples)]


def predict(task: Task, model: Model, source: TextIO, name: str, write: Callable[[Example], None],
            options: Options):
  """Writes an answer for each example of `source`, with a progress bar where a person looks on.

  Raises:
    UserError: a line that cannot be used (with its number), or no example at all.
  """
  examples = read_examples(source, name, task.fields)
  count, size = 0, _FIRST
  with tqdm.tqdm(unit=' examples', unit_scale=True, disable=None, leave=False) as bar:
    while window := list(itertools.islice(examples, size)):
      for answer in _answer(task, model, window, options, name, count):
        write(answer)
      count, size = count + len(window), min(2 * size, _MOST)
      bar.update(len(window))
  if not count:
    raise UserError(f'{name} holds no example')


def _write_line(sink: TextIO) -> Callable[[Example], None]:
  def write(answer):
    sink.write(json.dumps(answer, ensure_ascii=False) + '\n')
    sink.flush()

  return write


def run(task: str | None, model: str | None, source: str | None, output: str | None,
        options: Options = Options()):
  """`predict` between files; None stands for standard input and output.

  The output appears under its name only when it is whole. Embeddings are written as an array where
  it ends in .npy or .safetensors.
  """
  if task not in TASKS:
    wrong = f'--task={task} is unknown: use' if task else 'give --task, one of'
    raise UserError(f'{wrong} {", ".join(TASKS)}')
  if not model:
    raise UserError('give --model=DIR, a workdir that main has trained or a folder of convert')
  as_array = bool(output) and output.endswith(vectors.SUFFIXES)
  if as_array and (task != 'embed' or options.pooling == 'none'):
    raise UserError(f'--output={output} holds one vector a text: only --task=embed makes them, '
                    'with --pooling=cls, mean or max')
  bert = bert_lib.load(model)
  if options.max_len is not None and options.max_len > bert.config.max_positions:
    raise UserError(f'--max_len={options.max_len} is above the {bert.config.max_positions} '
                    f'positions of {model}')
  if task in HEAD_TASKS:
    bert = Predictor(bert, task)
  try:
    stream = epath.Path(source).open(encoding='utf-8') if source else sys.stdin
  except OSError as e:
    raise UserError(f'--input={source} cannot be read: {e.strerror or e}') from e
  name = source or 'standard input'
  if not output:
    return predict(TASKS[task], bert, stream, name, _write_line(sys.stdout), options)
  path = epath.Path(output)
  partial = path.parent / (path.name + '.partial')
  try:
    sink = partial.open('wb') if as_array else partial.open('w', encoding='utf-8')
  except OSError as e:
    raise UserError(f'--output={output} cannot be written: {e.strerror or e}') from e
  try:
    with sink:
      if as_array:
        with vectors.Writer(sink, output) as writer:
          predict(TASKS[task], bert, stream, name, lambda a: writer.add(a['embedding']), options)
      else:
        predict(TASKS[task], bert, stream, name, _write_line(sink), options)
  except BaseException:
    partial.unlink()
    raise
  partial.replace(path)
