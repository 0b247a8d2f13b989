"""Predictions over JSON lines: one object in, one object out, in order."""

from collections.abc import Callable
from collections.abc import Iterator
import json
import sys
from typing import Any
from typing import TextIO

from etils import epath

from bert_jax.errors import UserError
from bert_jax.inference import bert as bert_lib
from bert_jax.inference.bert import Bert


def _fill_mask(bert: Bert, example: dict[str, Any]) -> dict[str, Any]:
  return {'masks': bert.fill_mask(example['text'])}


def _next_sentence(bert: Bert, example: dict[str, Any]) -> dict[str, Any]:
  return {'is_next': bert.next_sentence([(example['text'], example['text_pair'])])[0]}


def _score(bert: Bert, example: dict[str, Any]) -> dict[str, Any]:
  return bert.score(example['text'])


# Each task: the fields that an example must have, and the function of it.
TASKS: dict[str, tuple[tuple[str, ...], Callable[[Bert, dict[str, Any]], dict[str, Any]]]] = {
    'fill_mask': (('text',), _fill_mask),
    'next_sentence': (('text', 'text_pair'), _next_sentence),
    'score': (('text',), _score),
}


def read_examples(stream: TextIO, name: str, fields: tuple[str, ...]) -> Iterator[dict[str, Any]]:
  """The objects of JSON lines that have `fields`, all strings; blank lines are left out.

  Raises:
    UserError: naming the line that is not such an object.
  """
  number = 0
  try:
    for number, line in enumerate(stream, 1):
      if not line.strip():
        continue
      example = json.loads(line)
      for field in fields:
        if not isinstance(example, dict) or not isinstance(example.get(field), str):
          raise UserError(f'{name}, line {number}: needs a JSON object with the text '
                          f'{" and ".join(map(repr, fields))}')
      yield example
  except json.JSONDecodeError as e:
    raise UserError(f'{name}, line {number}: not JSON ({e.msg} at column {e.colno})') from e
  except UnicodeDecodeError as e:
    raise UserError(f'{name}, after line {number}: invalid UTF-8 ({e.reason})') from e


def predict(task: str, bert: Bert, source: TextIO, name: str, sink: TextIO):
  """Writes one line to `sink` for each example of `source`.

  Raises:
    UserError: a line that cannot be used (with its number), or no example at all.
  """
  fields, function = TASKS[task]
  count = 0
  for count, example in enumerate(read_examples(source, name, fields), 1):
    try:
      found = function(bert, example)
    except UserError as e:
      raise UserError(f'{name}, example {count}: {e}') from e
    sink.write(json.dumps(found, ensure_ascii=False) + '\n')
    sink.flush()
  if not count:
    raise UserError(f'{name} holds no example')


def run(task: str | None, model: str | None, source: str | None, output: str | None):
  """`predict` between files; None stands for standard input and output.

  The output appears under its name only when it is whole.
  """
  if task not in TASKS:
    raise UserError(f'--task={task!r} is unknown: use {", ".join(TASKS)}')
  if not model:
    raise UserError('give --model=DIR, a workdir that main has trained')
  bert = bert_lib.load(model)
  try:
    stream = epath.Path(source).open(encoding='utf-8') if source else sys.stdin
  except OSError as e:
    raise UserError(f'--input={source} cannot be read: {e.strerror or e}') from e
  if not output:
    return predict(task, bert, stream, source or 'standard input', sys.stdout)
  path = epath.Path(output)
  partial = path.parent / (path.name + '.partial')
  try:
    sink = partial.open('w', encoding='utf-8')
  except OSError as e:
    raise UserError(f'--output={output} cannot be written: {e.strerror or e}') from e
  try:
    with sink:
      predict(task, bert, stream, source or 'standard input', sink)
  except BaseException:
    partial.unlink()
    raise
  partial.replace(path)
