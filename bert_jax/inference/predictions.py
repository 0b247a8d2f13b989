"""Answers JSON lines with a model: one object in, one object out, in order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import io
import itertools
import sys
import tempfile
import time
from typing import Any, BinaryIO

from etils import epath
import numpy as np
from safetensors.numpy import save
import tqdm

from bert_jax.data.late_inputs import DOCUMENT, QUERY
from bert_jax.errors import Failed, UserError, require, require_choice, require_flag
from bert_jax.inference import json_lines, short_vectors
from bert_jax.inference.bert import Bert, load
from bert_jax.inference.json_lines import Example, Line
from bert_jax.model.pooling import TOKEN_VECTORS
from bert_jax.runtime import storage
from bert_jax.tasks import task_list

# All examples of a window are read before any is answered: texts of similar length run
# best together. The first window has one example, so that an answer comes at once. Each
# next window is twice as large, until one takes long.
_FIRST_WINDOW, _LARGEST_WINDOW = 1, 4096
_LONG_ENOUGH = 10.0  # seconds
_ARRAYS = ('.npy', '.safetensors')  # formats of embeddings


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of the tasks: arguments of `Bert.embed`, and the threshold of no answer."""

  pooling: str | None = None
  normalize: bool | None = None
  layers: tuple[int, ...] = (-1,)
  long: str | None = None  # for embed ('head' by default) and score
  max_len: int | None = None
  prompt: str | None = None
  dim: int | None = None
  null_threshold: float | None = None  # for question_answering


def _fill_mask(bert: Bert, examples: Sequence[Example], _: Options) -> list[Example]:
  return [{'masks': masks} for masks in bert.fill_mask([e['text'] for e in examples])]


def _next_sentence(bert: Bert, examples: Sequence[Example], _: Options) -> list[Example]:
  probabilities = bert.next_sentence([(e['text'], e['text_pair']) for e in examples])
  return [{'is_next': p} for p in probabilities]


def _score(bert: Bert, examples: Sequence[Example], options: Options) -> list[Example]:
  return bert.score([e['text'] for e in examples], options.long)


def _embed(bert: Bert, examples: Sequence[Example], options: Options) -> list[Example]:
  texts = [e['text'] for e in examples]
  embeddings = bert.embed(
      texts, options.pooling, normalize=options.normalize, layers=options.layers,
      long=options.long or 'head', max_len=options.max_len, prompt=options.prompt,
      dim=options.dim)
  if options.pooling != TOKEN_VECTORS:
    return [{'embedding': vector.tolist()} for vector in embeddings]
  answers = []
  texts = [text for text, in bert.dense.prepared([(text,) for text in texts], '')]
  for (ids, spans), vectors in zip(bert.tokenizer.encode_with_spans(texts), embeddings):
    # zip drops the tokens of a long text that the model did not read.
    of_tokens = zip(bert.tokenizer.tokens(ids), spans, vectors)
    answers.append({'tokens': [
        {'token': token, 'start': start, 'end': end, 'vector': vector.tolist()}
        for token, (start, end), vector in of_tokens]})
  return answers


@dataclasses.dataclass(frozen=True)
class LinePrediction:
  """A task for JSON lines. `tasks.task_kind.TaskKind` has the same attributes."""

  fields: tuple[str, ...]  # names of the required texts of an example
  answer: Callable[[Bert, Sequence[Example], Options], list[Example]]
  optional: tuple[str, ...] = ()  # names of optional fields
  # {another name: a field}
  aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)


TASKS: dict[str, Any] = {
    'fill_mask': LinePrediction(('text',), _fill_mask),
    'next_sentence': LinePrediction(('text', 'text_pair'), _next_sentence),
    'score': LinePrediction(('text',), _score),
    'embed': LinePrediction(('text',), _embed),
    **{name: task for name, task in task_list.ALL.items() if task.fields},
}


def _answers(task: LinePrediction, bert: Bert, lines: Sequence[Line],
             options: Options) -> list[Example]:
  """Returns an answer, or {'error'}, for each line."""
  if not lines:
    return []
  try:
    return task.answer(bert, [line.example for line in lines], options)
  except UserError as e:
    if len(lines) == 1:
      return [{'error': f'{lines[0].where}: {e}'}]
  # One bad line fails the whole batch: halve it until the line is alone.
  middle = len(lines) // 2
  return (_answers(task, bert, lines[:middle], options)
          + _answers(task, bert, lines[middle:], options))


def predict(task: LinePrediction, bert: Bert, source: BinaryIO, name: str,
            write: Callable[[Example], None], options: Options, strict: bool = False,
            done: json_lines.Done = json_lines.Done()) -> json_lines.Done:
  """Writes an answer for each JSON line of `source`, with a progress bar on a terminal.

  Args:
    task, bert, source, options: the job.
    name: the name of the source in messages.
    write: takes an object for each line: its further fields, then the answer or 'error'.
    strict: stop at the first line that cannot be answered.
    done: the examples that a killed job answered: they are skipped.

  Raises:
    UserError: no example, a bad line with `strict`, or broken weights, which answer NaN.
  """
  examples = json_lines.read(source, name, task.fields, task.optional, task.aliases)
  count = sum(1 for _ in itertools.islice(examples, done.examples))
  errors, size = done.errors, _FIRST_WINDOW
  with tqdm.tqdm(unit=' examples', unit_scale=True, disable=None, leave=False) as bar:
    while window := list(itertools.islice(examples, size)):
      began = time.monotonic()
      valid = [line for line in window if not line.error]
      answers = iter(_answers(task, bert, valid, options))
      for line in window:
        answer = {'error': line.error} if line.error else next(answers)
        if strict and 'error' in answer:
          raise UserError(answer['error'])
        try:
          write(json_lines.merge(line.rest, answer))
        except UnicodeError:  # a ValueError too
          raise
        except ValueError as e:
          raise UserError(f'{line.where}: the answer holds NaN or infinity: the weights of '
                          'this model are broken') from e
        errors += 'error' in answer
      count += len(window)
      # Larger windows are faster, but a kill loses the answers of a whole window.
      if time.monotonic() - began < _LONG_ENOUGH:
        size = min(2 * size, _LARGEST_WINDOW)
      bar.update(len(window))
  require(bool(count), f'{name} holds no example')
  return json_lines.Done(count, errors)


def _load(task: str, model: str, options: Options, precision: str,
          **checkpoint) -> Bert:
  """Loads the model; raises UserError if it does not support the task or the options."""
  require_flag('task', task, TASKS)
  require(bool(model),
          'give --model=DIR, a workdir that main has trained or a folder of convert')
  for_task = 'score' if options.long == 'chunks' else 'embed'
  require(not options.long or task in ('embed', 'score'),
          f'--long={options.long} is for --task={for_task}, not for {task}')
  bert = load(model, **checkpoint)
  require(options.max_len is None or options.max_len <= bert.config.max_positions,
          f'--max_len={options.max_len} is above the {bert.config.max_positions} '
          f'positions of {model}')
  # These calls only check. Later, a wrong option or model would count as an error of each
  # line.
  if task == 'late_interaction':
    require(options.prompt in (None, QUERY, DOCUMENT),
            f'--prompt={options.prompt} has no effect here: --prompt=query gives query '
            'vectors, --prompt=document gives document vectors')
  else:
    (bert.model.text_layout or bert.dense).prompt(options.prompt)
  if task == 'reranking':
    bert.cross.finished(np.zeros((0, 1), np.float32))  # checks the activation
  if task in task_list.ALL:
    task_list.ALL[task].head_of(bert)
  else:
    TASKS[task].answer(bert, [], options)
  if precision == 'binary':
    width = bert.embed([], options.pooling, layers=options.layers, dim=options.dim).shape[1]
    short_vectors.check(precision, width)
  return bert


@contextlib.contextmanager
def _array_writer(path: epath.Path,
                  precision: str) -> Iterator[Callable[[Sequence[float]], None]]:
  """Yields a function that appends a vector to .npy, or to .safetensors as `embeddings`.

  For int8, .safetensors also holds `ranges`, to quantize other vectors in the same
  way. The function raises ValueError for NaN or infinity. A temporary file collects the
  vectors, because both formats begin with the number of vectors.
  """
  rows = 0

  def add(vector):
    nonlocal rows
    row = np.asarray(vector, np.float32)
    if not np.isfinite(row).all():
      raise ValueError('NaN or infinity')
    body.write(row.tobytes())
    rows += 1

  partial = json_lines.partial(path, binary=True)
  with partial as (sink, _), tempfile.TemporaryFile() as body:
    yield add
    body.flush()
    array = np.memmap(body, np.float32, 'r').reshape(rows, -1)
    ranges = short_vectors.ranges_of(array) if precision == 'int8' else None
    short = short_vectors.quantize(array, precision, ranges)
    if path.name.endswith('.npy'):
      np.save(sink, short)
    else:
      kept = {} if ranges is None else {'ranges': ranges}
      sink.write(save({'embeddings': np.ascontiguousarray(short), **kept}))


def _job(task: str, bert: Bert, source: str | None, output: str,
         options: Options) -> dict[str, Any]:
  """Identifies a job that can resume; {} = it cannot."""
  # Standard input cannot be read again, and a remote file cannot be appended to.
  if not source or storage.is_remote(output):
    return {}
  return {'task': task, 'model': json_lines.identity(bert.model),
          'input': [source, *storage.size_and_time(epath.Path(source))],
          'options': dataclasses.asdict(options)}


def run(task: str | None, model: str | None, source: str | None, output: str | None,
        options: Options = Options(), strict: bool = False, precision: str = 'float32',
        **checkpoint):
  """Runs `predict` between files; None = standard input or output.

  The output appears under its name only when it is complete; a killed job resumes in
  OUTPUT.partial. An output that ends in .npy or .safetensors is an array of embeddings.
  It has no place for errors: the first bad line ends the job, and a killed job restarts.

  `model` is a folder or a name; `checkpoint` has further arguments of `bert.load`. A
  `strict` job ends at the first line that cannot be answered. `precision` is one of
  `short_vectors.PRECISIONS`, for an array.

  Raises:
    UserError: a mistake in the arguments or the source.
    Failed: some lines could not be answered; the output answers all others.
  """
  task, model, output = task or '', model or '', output or ''
  as_array = output.endswith(_ARRAYS)
  require(not as_array or (task == 'embed' and options.pooling != TOKEN_VECTORS),
          f'--output={output} holds one vector a text: only --task=embed makes them, '
          'with --pooling=cls, mean or max')
  require_choice('--precision', precision, short_vectors.PRECISIONS)
  require(precision == 'float32' or as_array,
          f'--precision={precision} has no effect here: it is for --output=FILE.npy or '
          '.safetensors')
  bert = _load(task, model, options, precision, **checkpoint)
  name, path = source or 'standard input', epath.Path(output)
  if source:
    storage.check('--input', source)
  try:
    opened = epath.Path(source).open('rb') if source else sys.stdin.buffer
  except OSError as e:
    raise UserError(f'--input={source} cannot be read: {e.strerror or e}') from e
  with opened as stream:
    answer_all = functools.partial(predict, TASKS[task], bert, stream, name,
                                   options=options)
    if as_array:
      with _array_writer(path, precision) as add:
        done = answer_all(write=lambda answer: add(answer['embedding']), strict=True)
    elif not output:
      if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding='utf-8')  # JSON is UTF-8 in every locale
      done = answer_all(write=functools.partial(json_lines.write, sys.stdout),
                        strict=strict)
    else:
      with json_lines.partial(path, _job(task, bert, source, output, options)) as (
          sink, before):
        if before.examples:
          print(f'bert_jax: {before.examples:,} examples were answered before: resuming '
                f'{output}', file=sys.stderr, flush=True)
        done = answer_all(write=functools.partial(json_lines.write, sink), strict=strict,
                          done=before)
  if done.errors:
    raise Failed(f'{done.errors:,} of {done.examples:,} examples could not be answered: '
                 f'"error" says why in each of their lines of {output or "the output"}')
