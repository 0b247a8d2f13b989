"""Predictions over JSON lines: one object in, one object out, in order."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import sys
import time
from typing import Any
from typing import BinaryIO
from typing import NamedTuple

from etils import epath
import tqdm

from bert_jax.errors import Failed
from bert_jax.errors import UserError
from bert_jax.inference import bert as bert_lib
from bert_jax.inference import json_lines
from bert_jax.inference import vectors
from bert_jax.inference.bert import Bert
from bert_jax.inference.json_lines import Example
from bert_jax.inference.json_lines import Line
from bert_jax.inference.task_heads import Predictor
from bert_jax.interop.pretrained import HEAD_TASKS
from bert_jax.runtime import storage

# Examples that are read before any is answered: few at first, so that the first answers come at
# once, then twice as many each time, because texts of like length run best together. No more where
# they take many seconds already: a kill loses those that are not written.
_FIRST, _MOST, _LONG_ENOUGH = 1, 4096, 10.0

Model = Bert | Predictor  # what a task's function is given


@dataclasses.dataclass(frozen=True)
class Options:
  """How texts become vectors: the arguments of `Bert.embed`; and when there is no answer."""

  pooling: str = 'mean'
  normalize: bool = False
  layers: tuple[int, ...] = (-1,)
  long: str | None = None  # of embed ('head' by default) and of score
  max_len: int | None = None
  null_threshold: float | None = None  # of question_answering

  def embedding(self) -> dict[str, Any]:
    """The arguments of `Bert.embed`."""
    return {'pooling': self.pooling, 'normalize': self.normalize, 'layers': self.layers,
            'long': self.long or 'head', 'max_len': self.max_len}


def _fill_mask(bert: Bert, examples: Sequence[Example], options: Options) -> list[Example]:
  del options
  return [{'masks': masks} for masks in bert.fill_mask([e['text'] for e in examples])]


def _next_sentence(bert: Bert, examples: Sequence[Example], options: Options) -> list[Example]:
  del options
  pairs = [(e['text'], e['text_pair']) for e in examples]
  return [{'is_next': probability} for probability in bert.next_sentence(pairs)]


def _score(bert: Bert, examples: Sequence[Example], options: Options) -> list[Example]:
  return bert.score([e['text'] for e in examples], options.long)


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
  optional: tuple[str, ...] = ()  # what it reads besides


TASKS = {
    'fill_mask': Task(('text',), _fill_mask),
    'next_sentence': Task(('text', 'text_pair'), _next_sentence),
    'score': Task(('text',), _score),
    'embed': Task(('text',), _embed),
    'sequence_classification': Task(('text',), _classify, ('text_pair',)),
    'token_classification': Task(('text',), _tag),
    'question_answering': Task(('question', 'context'), _answer_questions),
    'multiple_choice': Task(('text',), _choose, ('choices',)),
}


def _answers(task: Task, model: Model, asked: Sequence[Line], options: Options) -> list[Example]:
  """An answer to each line, or {'error'}."""
  if not asked:
    return []
  try:
    return task.function(model, [line.example for line in asked], options)
  except UserError as e:
    if len(asked) == 1:
      return [{'error': f'{asked[0].where}: {e}'}]
  middle = len(asked) // 2  # one of them is at fault
  return (_answers(task, model, asked[:middle], options)
          + _answers(task, model, asked[middle:], options))


def predict(task: Task, model: Model, source: BinaryIO, name: str,
            write: Callable[[Example], None], options: Options, strict: bool = False,
            done: json_lines.Done = json_lines.Done()) -> json_lines.Done:
  """Writes an answer for each example of `source`, with a progress bar where a person looks on.

  Args:
    task: what is asked.
    model: who is asked.
    source: JSON lines.
    name: of the source, for messages.
    write: gets each answer, or {'error'}, behind the line's further fields.
    options: of the task.
    strict: end with the first line that cannot be answered.
    done: what was answered before, and is passed over.

  Raises:
    UserError: no example at all, a line where `strict` says so, or weights that answer NaN.
  """
  examples = json_lines.read(source, name, task.fields, task.optional)
  passed = sum(1 for _ in itertools.islice(examples, done.examples))
  count, errors, size = passed, done.errors, _FIRST
  with tqdm.tqdm(unit=' examples', unit_scale=True, disable=None, leave=False) as bar:
    while window := list(itertools.islice(examples, size)):
      began = time.monotonic()
      found = iter(_answers(task, model, [line for line in window if not line.error], options))
      for line in window:
        answer = {'error': line.error} if line.error else next(found)
        if strict and 'error' in answer:
          raise UserError(answer['error'])
        try:
          write(json_lines.merge(line.rest, answer))
        except ValueError as e:
          raise UserError(f'{line.where}: the answer holds NaN or infinity: the weights of this '
                          'model are broken') from e
        errors += 'error' in answer
      count += len(window)
      if time.monotonic() - began < _LONG_ENOUGH:
        size = min(2 * size, _MOST)
      bar.update(len(window))
  if not count:
    raise UserError(f'{name} holds no example')
  return json_lines.Done(count, errors)


def _open(source: str | None) -> BinaryIO:
  try:
    return epath.Path(source).open('rb') if source else sys.stdin.buffer
  except OSError as e:
    raise UserError(f'--input={source} cannot be read: {e.strerror or e}') from e


def _load(task: str | None, model: str | None, options: Options, **which) -> Model:
  """The model, for a task that it can do."""
  if task not in TASKS:
    wrong = f'--task={task} is unknown: use' if task else 'give --task, one of'
    raise UserError(f'{wrong} {", ".join(TASKS)}')
  if not model:
    raise UserError('give --model=DIR, a workdir that main has trained or a folder of convert')
  if options.long and task not in ('embed', 'score'):
    raise UserError(f'--long={options.long} is for --task=embed and score, not for {task}')
  bert = bert_lib.load(model, **which)
  if options.max_len is not None and options.max_len > bert.config.max_positions:
    raise UserError(f'--max_len={options.max_len} is above the {bert.config.max_positions} '
                    f'positions of {model}')
  if task in HEAD_TASKS:
    return Predictor(bert, task)
  TASKS[task].function(bert, [], options)  # a mistake in the options is no line's
  return bert


def _write_array(path: epath.Path, write: Callable[[Callable[[Example], None]], None]):
  """Has `write` hand over the embeddings of an array, which appears when it is whole."""
  partial = path.parent / (path.name + '.partial')
  try:
    sink = partial.open('wb')
  except OSError as e:
    raise UserError(f'--output={path} cannot be written: {e.strerror or e}') from e
  try:
    with sink, vectors.Writer(sink, path.name) as writer:
      write(lambda answer: writer.add(answer['embedding']))
  except BaseException:
    partial.unlink()
    raise
  partial.replace(path)


def run(task: str | None, model: str | None, source: str | None, output: str | None,
        options: Options = Options(), strict: bool = False, **which):
  """`predict` between files; None stands for standard input and output.

  The output appears under its name only when it is whole; a job that was killed goes on in
  OUTPUT.partial. Embeddings are written as an array where it ends in .npy or .safetensors: that has
  no place for an error, and begins anew.

  Args:
    task: one of TASKS.
    model: what `bert.load` takes.
    source: JSON lines.
    output: JSON lines or an array.
    options: of the task.
    strict: end with the first line that cannot be answered.
    **which: of a workdir's checkpoints, as for `bert.load`.

  Raises:
    UserError: a mistake in what was given.
    Failed: there are lines that could not be answered; all others are.
  """
  as_array = bool(output) and output.endswith(vectors.SUFFIXES)
  if as_array and (task != 'embed' or options.pooling == 'none'):
    raise UserError(f'--output={output} holds one vector a text: only --task=embed makes them, '
                    'with --pooling=cls, mean or max')
  bert = _load(task, model, options, **which)
  name, path = source or 'standard input', epath.Path(output or '')
  with _open(source) as stream:
    ask = functools.partial(predict, TASKS[task], bert, stream, name, options=options)
    if as_array:
      return _write_array(path, lambda add: ask(write=add, strict=True))
    if not output:
      done = ask(write=json_lines.write(sys.stdout), strict=strict)
    else:
      job = {}
      if source and not storage.is_remote(output):
        stat = epath.Path(source).stat()
        job = {'task': task, 'model': json_lines.identity(bert.model), 'input': [
            source, stat.length, stat.mtime], 'options': dataclasses.asdict(options)}
      with json_lines.partial(path, job) as (sink, before):
        if before.examples:
          print(f'bert_jax: {before.examples:,} examples were answered before: {output} goes on',
                file=sys.stderr, flush=True)
        done = ask(write=json_lines.write(sink), strict=strict, done=before)
  if done.errors:
    raise Failed(f'{done.errors:,} of {done.examples:,} examples could not be answered: "error" '
                 f'says why in each of their lines of {output or "the output"}')
