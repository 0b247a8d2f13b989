"""Reads and writes JSON lines: a bad line does not stop a job, a killed job resumes."""

import codecs
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
from typing import Any, BinaryIO, NamedTuple, TextIO

from etils import epath
import jax
import numpy as np
import tqdm

from bert_jax.data.tokenizers import base as tokenizer_base
from bert_jax.errors import UserError
from bert_jax.interop.pretrained import FACTS_OF_DATA, Pretrained
from bert_jax.runtime import storage

Example = dict[str, Any]


class Line(NamedTuple):
  """A line with an example, or with an error."""

  where: str  # 'in.jsonl, line 7', for messages
  example: Example  # the fields of the task
  rest: Example  # further fields, copied to the output
  error: str  # '' = the line is valid


def _parse(line: bytes, where: str, fields: Sequence[str], optional: Sequence[str],
           aliases: Mapping[str, str]) -> Line:
  example, rest, error = {}, {}, ''
  try:
    example = storage.parse_json(line.decode())
    if isinstance(example, dict):
      rest = {name: value for name, value in example.items()
              if name not in (*fields, *optional)}
      # The output repeats these fields, and JSON has no NaN.
      json.dumps(rest, allow_nan=False)
      for alias, field in aliases.items():
        if alias in example:
          example.setdefault(field, example[alias])
    if not isinstance(example, dict) or not all(isinstance(example.get(x), str)
                                                for x in fields):
      error = f'needs a JSON object with the text {" and ".join(map(repr, fields))}'
  except UnicodeDecodeError as e:
    error = f'invalid UTF-8 ({e.reason})'
  except (ValueError, RecursionError) as e:
    rest, error = {}, f'not JSON ({e})'
  return Line(where, example, rest, error and f'{where}: {error}')


def read(stream: BinaryIO, name: str, fields: Sequence[str],
         optional: Sequence[str] = (),
         aliases: Mapping[str, str] = {}) -> Iterator[Line]:
  """Reads the lines of the file `name`; skips blank lines.

  An example must have the texts `fields`. It may have the `optional` fields of its task.
  An alias stands for its field if the line lacks the field.
  """
  for number, line in enumerate(stream, 1):
    # Editors on Windows write a byte order mark.
    if number == 1:
      if line.startswith(b'\x1f\x8b'):
        raise UserError(f'{name} is gzipped: unpack it first')
      line = line.removeprefix(codecs.BOM_UTF8)
    if line.strip():
      yield _parse(line, f'{name}, line {number}', fields, optional, aliases)


def merge(rest: Example, answer: Example) -> Example:
  """Puts the further fields before the answer; renames clashes to input_NAME."""
  merged = {}
  # 'error' marks a failed line: no further field may have this name.
  for name, value in rest.items():
    while name in answer or name in merged or name == 'error':
      name = f'input_{name}'
    merged[name] = value
  return {**merged, **answer}


def write(sink: TextIO, answer: Example):
  """Writes an answer; raises ValueError for NaN, which JSON lacks."""
  sink.write(json.dumps(answer, ensure_ascii=False, allow_nan=False) + '\n')
  sink.flush()


def digest(content: Any) -> str:
  """Returns the digest of JSON content, to recognize a job."""
  return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def identity(model: Pretrained) -> str:
  """Returns a digest of everything that determines a model's answers, except its path."""
  hashed = hashlib.blake2b(digest_size=16)
  facts = {name: model.facts.get(name)
           for name in ('max_len', 'null_threshold', *FACTS_OF_DATA)}
  description = {'config': dataclasses.asdict(model.config), 'task': model.task,
                 'labels': model.labels, 'problem': model.problem, 'facts': facts,
                 'tokenizer': tokenizer_base.digest(model.tokenizer)}
  hashed.update(json.dumps(description, sort_keys=True).encode())
  if model.text_layout:
    for name, content in sorted(model.text_layout.files(model.config.hidden_size).items()):
      hashed.update(name.encode() + content)
  # The values, not the path: the same weights may lie in another folder.
  for x in jax.tree.leaves(model.params):
    hashed.update(np.ascontiguousarray(x).data)
  return hashed.hexdigest()


class Done(NamedTuple):
  """The counts of a job so far."""

  examples: int = 0
  errors: int = 0


def _keep_whole_lines(path: epath.Path) -> Done:
  """Truncates an incomplete last line; counts the others."""
  examples = errors = size = 0
  with path.open('rb') as file:
    for line in file:
      try:
        answer = json.loads(line)
      except ValueError:
        break
      if not line.endswith(b'\n'):
        break
      examples, size = examples + 1, size + len(line)
      errors += 'error' in answer
  os.truncate(path, size)
  return Done(examples, errors)


def read_job(job_file: epath.Path) -> dict[str, Any]:
  """Returns the description of a killed job; {} if a kill interrupted its writing."""
  try:
    return storage.read_json_if_any(job_file)
  except UserError:
    return {}


@contextlib.contextmanager
def partial(path: epath.Path, job: dict[str, Any] | None = None,
            binary: bool = False) -> Iterator[tuple[Any, Done]]:
  """Opens OUTPUT.partial, which becomes OUTPUT at the end; a UserError removes it.

  After a kill the same job resumes: OUTPUT.partial.json identifies the job.

  Args:
    path: OUTPUT; a link stays a link, and its target is written.
    job: all that the answers depend on; {} or None = a killed job restarts.
    binary: opens the file for bytes.

  Yields:
    (the opened file, the counts of the answers that it already has).
  """
  whole = storage.through_link(path)
  growing, job_file = (
      whole.parent / f'{whole.name}.{end}' for end in ('partial', 'partial.json'))
  done = Done()
  storage.make_parent('--output', path)
  try:
    if job and growing.exists() and read_job(job_file) == json.loads(json.dumps(job)):
      done = _keep_whole_lines(growing)
    if not done.examples:  # nothing to resume
      job_file.unlink(missing_ok=True)
    mode = 'a' if done.examples else 'w'
    sink = growing.open('wb') if binary else growing.open(mode, encoding='utf-8')
    if job and not done.examples:
      job_file.write_text(json.dumps(job))
  except OSError as e:
    raise UserError(f'--output={path} cannot be written: {e.strerror or e}') from e
  try:
    with sink:
      yield sink, done
  except BaseException as e:
    # An interrupted job keeps its file to resume; after a mistake nothing may remain.
    if isinstance(e, UserError) or not job:
      growing.unlink()
      job_file.unlink(missing_ok=True)
    raise
  growing.replace(whole)
  job_file.unlink(missing_ok=True)


def write_all(path: epath.Path, job: dict[str, Any], items: Iterable[Any], count: int,
              at_once: int, answers: Callable[[list[Any]], list[Example]],
              **bar: str) -> tuple[list[Example], int]:
  """Writes an answer to each item, with a progress bar; a killed job resumes.

  Args:
    path, job: see `partial`.
    items: `count` items.
    at_once: number of items in a window; a kill loses the answers to at most one window.
    answers: takes the items of a window; returns an answer to each.
    bar: the description and the unit of the progress bar.

  Returns:
    (the answers to all items, the number of new ones).
  """
  with partial(path, job) as (sink, before), tqdm.tqdm(
      total=count, initial=before.examples, disable=None, **bar) as progress:
    remaining = itertools.islice(items, before.examples, None)
    while window := list(itertools.islice(remaining, at_once)):
      for answer in answers(window):
        write(sink, answer)
      progress.update(len(window))
  # As bytes: in a str, splitlines also splits at U+2028, which JSON may contain.
  lines = [json.loads(line) for line in path.read_bytes().splitlines()]
  return lines, count - before.examples
