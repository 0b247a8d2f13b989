"""The host half of fine-tuning: files of examples, their batches and their scores."""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import re
from typing import Any, ClassVar, NamedTuple

from etils import epath
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict, FrozenConfigDict
import numpy as np

from bert_jax import config_fields
from bert_jax.data import inputs as inputs_lib
from bert_jax.data.tokenizers.base import Tokenizer
from bert_jax.errors import require, require_choice
from bert_jax.labelled.packed_examples import Batch, Batches, Features, Located
from bert_jax.objectives import losses
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.parallel import sharding
from bert_jax.runtime import storage
from bert_jax.tasks.finetuning import FineTuning

_LABELS_SHOWN = 16  # in the summary of a run
# Fields of data that change the scores of data.eval and may change in a resumed run.
_JUDGING = ('eval_fields', 'eval_columns', 'n_best', 'max_answer_len', 'null_threshold')


class Split(NamedTuple):
  """The examples of one file."""

  name: str  # '' for the first file of data.eval; a suffix of the scores for others
  examples: Sequence[Any]
  batches: Batches

  @property
  def features(self) -> Features:
    return self.batches.features


class Output(NamedTuple):
  """The reduced logits of one batch, on the host."""

  located: Located
  logits: np.ndarray


def not_empty(examples: Iterable[Any], path: str) -> list[Any]:
  """Lists the examples of a file; raises UserError if there are none."""
  examples = list(examples)
  require(bool(examples), f'{path} holds no example')
  return examples


def grouped_inputs(groups: Sequence[Sequence[Sequence[str]]], tokenizer: Tokenizer,
                   max_len: int) -> tuple[list[inputs_lib.Input], np.ndarray]:
  """Returns (the inputs of all texts, [inputs] int64 the example of each input)."""
  texts = [text for group in groups for text in group]
  inputs, _ = inputs_lib.text_inputs(texts, tokenizer, max_len)
  return inputs, np.repeat(np.arange(len(groups)), [len(group) for group in groups])


def by_example(outputs: list[Output]) -> np.ndarray:
  """Joins logits [E, ...] of batches into [examples, ...] of a file."""
  return np.concatenate([x.logits[:len(x.located.examples)] for x in outputs])


def by_input(outputs: list[Output], count: int) -> list[np.ndarray]:
  """Splits logits [R, L, ...] of batches into [tokens, ...] of each of `count` inputs."""
  of_input = [None] * count
  for located, logits in outputs:
    text_ids = located.batch.tokens.text_ids
    for row, slot in zip(*np.nonzero(located.index >= 0)):
      of_input[located.index[row, slot]] = logits[row][text_ids[row] == slot + 1]
  return of_input


@dataclasses.dataclass(frozen=True)
class ExampleFiles(abc.ABC):
  """The files of examples of a task; each fine-tuning task has a subclass.

  The class has the config fields of the files, and reads the files. An instance also has
  the device half, which trains on the files or is evaluated on them.
  """

  task: FineTuning
  labels: tuple[str, ...] = ()  # names of the head's outputs

  # Changes to the config fields that all fine-tuning tasks share, by full name: a new
  # Field, another default, or None, which removes the field.
  config_fields: ClassVar[Mapping[str, Any]] = {}
  best_score: ClassVar[str]  # default of keep_best
  # The score that keep_best='auto' means; '' = best_score.
  auto_score: ClassVar[str] = ''
  score_names: ClassVar[tuple[str, ...]]  # the scores of every file
  # False = data.eval has examples of another kind than data.train, without a loss.
  has_held_out_loss: ClassVar[bool] = True
  # For all other scores, higher is better.
  lower_is_better: ClassVar[tuple[str, ...]] = ('loss',)
  shows_labels: ClassVar[bool] = True  # in the summary of a run
  problem: ClassVar[str] = ''  # the kind of labels; only for sequence classification
  null_threshold: ClassVar[float | None] = None  # None = every question has an answer

  # ---- the config and the files ----------------------------------------------------------

  @staticmethod
  def check(config: ConfigDict):
    """Raises UserError for a config value that the task does not support."""
    del config

  @staticmethod
  def check_training(config: ConfigDict, examples: list[Any]):
    """Raises UserError for training examples that teach the model nothing."""
    del config, examples

  @staticmethod
  @abc.abstractmethod
  def read(path: str, data: ConfigDict, split: str, notes: list[str]) -> Iterable[Any]:
    """Reads the examples of a file, as the config group `data` says.

    `split` is train, validation or test; examples of 'test' need no labels. The method
    adds lines for the summary of the run to `notes`.
    """

  @classmethod
  def test_examples(cls, data: ConfigDict) -> list[Any]:
    """Reads data.test; raises UserError for a mistake in the file, or an empty one."""
    return not_empty(cls.read(data.test, data, 'test', []), data.test)

  # ---- the examples and their scores -----------------------------------------------------

  @classmethod
  @abc.abstractmethod
  def make(cls, config: ConfigDict, examples: list[Any],
           notes: list[str]) -> 'ExampleFiles':
    """Makes an instance and its task from the examples of a file."""

  def with_facts(self, facts: Mapping[str, Any], notes: list[str]) -> 'ExampleFiles':
    """Returns a copy that evaluates a model, given the `facts` of its training files."""
    return self

  @property
  def facts(self) -> dict[str, Any]:
    """Facts about the training files that evaluations need; a workdir stores them."""
    return {'null_threshold': self.null_threshold}

  @abc.abstractmethod
  def features(self, examples: Sequence[Any], tokenizer: Tokenizer, config: ConfigDict, *,
               path: str, is_train: bool) -> Features:
    """Makes the inputs and targets of the examples of the file `path`."""

  @abc.abstractmethod
  def scores(self, split: Split, outputs: list[Output]) -> dict[str, float]:
    """Computes the scores of a file from the outputs of its batches."""


def scores_of(files: ExampleFiles, split: Split,
              measure: Callable[[Batch], tuple]) -> dict[str, float]:
  """Returns the mean loss, if the task has one, and the scores of a file.

  `measure` runs `FineTuning.measure` on a whole batch.
  """
  sums, outputs = np.zeros(2), []
  for located in split.batches.in_order():
    metrics, logits = jax.device_get(measure(located.batch))
    sums += metrics['loss']
    outputs.append(Output(located, logits))
  loss = losses.means({'loss': sums}) if files.has_held_out_loss else {}
  return {**loss, **files.scores(split, outputs)}


@dataclasses.dataclass(frozen=True)
class FineTuningData:
  """The host half: the examples of a run."""

  files: ExampleFiles
  train: Split
  evals: tuple[Split, ...]  # the evaluated files; () = no evaluation
  feed: mesh_lib.Feed  # the part of a batch that this process feeds
  notes: Sequence[str]  # lines for the summary of the run
  judges: str  # data.eval, and the fields that change its scores

  @property
  def task(self) -> FineTuning:
    return self.files.task

  def _share(self, batch: Batch) -> Batch:
    return jax.tree.map(lambda x: x[self.feed.rows(len(x))], batch)

  def rows(self, step: int) -> Batch:
    return self._share(self.train.batches.batch(step))

  @property
  def has_held_out(self) -> bool:
    return bool(self.evals)

  def evaluate(self, measure: Callable[[Batch], Any],
               step: int) -> dict[str, float | None]:
    """Returns the mean loss and the scores of every file."""
    results = {}
    for split in self.evals:
      suffix = f'_{split.name}' if split.name else ''
      scores = scores_of(self.files, split,
                         lambda batch: measure(self._share(batch)))
      results |= {name + suffix: value for name, value in scores.items()}
    return results

  @property
  def lower_is_better(self) -> tuple[str, ...]:
    return self.files.lower_is_better

  def judged_on(self, step: int) -> str:
    return self.judges

  def flops(self, step: int, tokens: float) -> float:
    return self.task.flops_per_token(self.train.batches.length) * tokens

  def describe(self) -> Iterator[tuple[str, str]]:
    batches, labels = self.train.batches, self.files.labels
    sizes = [f'{len(self.train.examples):,} to train on',
             *(f'{len(split.examples):,} to evaluate {split.name}'.rstrip()
               for split in self.evals)]
    yield 'examples', ', '.join(sizes)
    more = len(labels) - _LABELS_SHOWN
    if labels and self.files.shows_labels:
      yield 'labels', (', '.join(labels[:_LABELS_SHOWN])
                       + (f' and {more} more' if more > 0 else ''))
    yield f'rows of {batches.length}', (
        f'{" or ".join(map(str, batches.rows))} for {batches.most_examples} examples, '
        f'{batches.fill():.1%} real tokens')
    yield from (('note', note) for note in self.notes)


def _eval_files(data: ConfigDict) -> list[tuple[str, str]]:
  """Splits data.eval at its commas; returns (suffix of the scores, path) of each file."""
  paths = [path for path in data.eval.split(',') if path]
  names = [re.split(r'[.@]', epath.Path(path).name)[0] for path in paths]
  twice = next((name for name in names[1:] if names[1:].count(name) > 1), None)
  require(not twice,
          f'data.eval={data.eval}: the scores of two files would both end in {twice!r}: '
          'give them other names')
  return [(name if i else '', path) for i, (name, path) in enumerate(zip(names, paths))]


def string_fields(data: ConfigDict) -> list[str]:
  """Returns the string fields of the config group `data`, except for its files."""
  # `replaced` changes how one file is read; it must not choose another file.
  return [name for name in data
          if isinstance(data[name], str) and name not in ('train', 'eval', 'test')]


def _fields_of_eval(data: ConfigDict) -> list[str]:
  """Returns the string fields that say how to read data.eval, not how to encode it."""
  # Both files are encoded in the same way, so other fields have no effect. For embeddings,
  # data.eval_columns names the columns.
  return [name for name in string_fields(data) if name in ('format', 'problem')
          or (name.endswith('_column') and 'eval_columns' not in data)]


def replaced(data: ConfigDict, fields: Sequence[str], flag: str,
             known: Sequence[str]) -> FrozenConfigDict:
  """Returns the config group `data` with some string fields replaced, for a single file.

  Args:
    data: the config group.
    fields: such as 'text_column=sentence' or 'format=tsv'.
    flag: the name of the flag or config field that gives the fields, for messages.
    known: the fields that can be replaced.

  Raises:
    UserError: a field is not one of `known`, or has no '='.
  """
  values = {}
  for field in fields:
    name, equals, value = str(field).partition('=')
    require(bool(equals),
            f'{flag}={",".join(map(str, fields))} must be FIELD=VALUE,...: '
            'text_column=sentence')
    require_choice(f'the field in {flag}', name, known)
    values[name] = value
  return config_fields.changed(data, values)


def read(kind: type[ExampleFiles], config: ConfigDict, tokenizer: Tokenizer,
         mesh: Mesh) -> FineTuningData:
  """Reads the examples of a run, makes its task and plans its batches."""
  data, notes = config.data, []
  # Check all fields and paths first: reading and tokenizing the training file takes long.
  eval_data = replaced(data, data.eval_fields, 'data.eval_fields', _fields_of_eval(data))
  storage.check('data.train', data.train)
  for path in data.eval.split(','):
    storage.check('data.eval', path)
  examples = not_empty(kind.read(data.train, data, 'train', notes), data.train)
  kind.check_training(config, examples)
  files = kind.make(config, examples, notes)
  # The rows of each cached part divide evenly among the devices.
  row_multiple = sharding.batch_divisor(mesh) * data.get('cached_parts', 1)

  def planned(name, path, examples, is_train, **options):
    features = files.features(examples, tokenizer, config, path=path, is_train=is_train)
    batches = Batches(features, batch_size=config.batch_size, pad_id=tokenizer.pad_id,
                      row_multiple=row_multiple, **options)
    return Split(name, examples, batches)

  train = planned('', data.train, examples, True, seed=config.seed,
                  microbatches=config.optimizer.accumulation)
  evals = []
  for name, path in _eval_files(data):
    examples = not_empty(kind.read(path, eval_data, 'validation', notes), path)
    evals.append(planned(name, path, examples, False))
  defaults = {name: getattr(x, 'default', x) for name, x in kind.config_fields.items()}
  judges = [data.eval, *(f'data.{name}={data[name]}' for name in _JUDGING
                         if data.get(name) not in (None, (), defaults.get(f'data.{name}')))]
  return FineTuningData(files, train, tuple(evals), mesh_lib.feed(mesh), notes,
                        ', '.join(judges))
