"""The host half of a fine-tuning task: packed examples, and evaluations of whole files."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import re
from typing import Any, NamedTuple

from etils import epath
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict
import numpy as np

from bert_jax.data.tokenizer import Tokenizer
from bert_jax.errors import UserError
from bert_jax.labelled.packed_examples import Batch, Batches, Features, Located
from bert_jax.objectives import losses
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.parallel import sharding
from bert_jax.tasks.finetuning import FineTuning

_LABELS_SHOWN = 16  # in the summary of a run


class Split(NamedTuple):
  """The examples of one file."""

  name: str  # '' for the first file of data.eval; a suffix of the scores for others
  examples: Sequence[Any]
  batches: Batches


class Output(NamedTuple):
  """The reduced logits of one batch, on the host."""

  located: Located
  logits: np.ndarray


Loader = Callable[[str], tuple[Sequence[Any], Features]]  # of a file


def eval_files(config: ConfigDict) -> list[tuple[str, str]]:
  """(suffix of the scores, path) of each file of data.eval, which are comma-separated."""
  paths = [path for path in config.data.eval.split(',') if path]
  names = [re.split(r'[.@]', epath.Path(path).name)[0] for path in paths]
  twice = next((name for name in names[1:] if names[1:].count(name) > 1), None)
  if twice:
    raise UserError(f'data.eval={config.data.eval}: the scores of two files would both end in '
                    f'{twice!r}: give them other names')
  return [(name if i else '', path) for i, (name, path) in enumerate(zip(names, paths))]


def not_empty(examples: Iterable[Any], path: str) -> list[Any]:
  """A list of the examples of a file; raises UserError if there are none."""
  examples = list(examples)
  if not examples:
    raise UserError(f'{path} holds no example')
  return examples


@dataclasses.dataclass(frozen=True)
class FineTuningData:
  """The examples of a run, and how a file's predictions are scored.

  Attributes:
    task: the device half.
    labels: names of the head's outputs.
    train: the training examples.
    evals: the files that are evaluated; () = no evaluation.
    feed: the part of a batch that this process feeds.
    score_names: the scores that every file has.
    scores: from the outputs of a file's batches to its scores.
    best_score: the score that keep_best='auto' stands for; '' = that of the task.
    notes: lines for the summary of the run.
    problem: of sequence classification, as run.json keeps it.
    null_threshold: of question answering; None = every question has an answer.
  """

  task: FineTuning
  labels: tuple[str, ...]
  train: Split
  evals: tuple[Split, ...]
  feed: mesh_lib.Feed
  score_names: tuple[str, ...]
  scores: Callable[[Split, list[Output]], dict[str, float]]
  best_score: str = ''
  notes: Sequence[str] = ()
  problem: str = ''
  null_threshold: float | None = None

  def _share(self, batch: Batch) -> Batch:
    return jax.tree.map(lambda x: x[self.feed.rows(len(x))], batch)

  def rows(self, step: int) -> Batch:
    """This process's share of a step's batch."""
    return self._share(self.train.batches.batch(step))

  @property
  def has_held_out(self) -> bool:
    return bool(self.evals)

  def evaluate(self, evaluate_batch: Callable[[Batch], Any],
               step: int) -> dict[str, float | None]:
    """The mean loss and the scores of every file."""
    del step
    results = {}
    for split in self.evals:
      sums, outputs = np.zeros(2), []
      for located in split.batches.in_order():
        metrics, logits = jax.device_get(evaluate_batch(self._share(located.batch)))
        sums += metrics['loss']
        outputs.append(Output(located, logits))
      suffix = f'_{split.name}' if split.name else ''
      scores = {**losses.means({'loss': sums}), **self.scores(split, outputs)}
      results |= {name + suffix: value for name, value in scores.items()}
    return results

  def flops(self, step: int, tokens: float) -> float:
    """Model FLOPs of training on `tokens` real tokens."""
    del step
    return self.task.flops_per_token(self.train.batches.length) * tokens

  def describe(self) -> Iterator[tuple[str, str]]:
    """(name, value) lines for the summary before a run."""
    batches = self.train.batches
    sizes = [f'{len(self.train.examples):,} to train on']
    sizes += [f'{len(split.examples):,} to evaluate{" " * bool(split.name)}{split.name}'
              for split in self.evals]
    yield 'examples', ', '.join(sizes)
    more = len(self.labels) - _LABELS_SHOWN
    if self.labels:
      yield 'labels', (', '.join(self.labels[:_LABELS_SHOWN])
                       + (f' and {more} more' if more > 0 else ''))
    yield f'rows of {batches.length}', (
        f'{" or ".join(map(str, batches.rows))} for {batches.batch_size} examples, '
        f'{batches.fill():.1%} real tokens')
    for note in self.notes:
      yield 'note', note


def create(task: FineTuning, config: ConfigDict, tokenizer: Tokenizer, mesh: Mesh, *,
           train: tuple[Sequence[Any], Features], load: Loader, **fields) -> FineTuningData:
  """Plans the batches of the training examples and of each file of data.eval.

  Args:
    task: the device half.
    config: of the run.
    tokenizer: of the model.
    mesh: of the run.
    train: the training examples and their features.
    load: gives the same of a file to evaluate.
    **fields: further attributes of the data.
  """
  examples, features = train
  shape = {'batch_size': config.batch_size, 'pad_id': tokenizer.pad_id,
           'row_multiple': sharding.batch_divisor(mesh)}
  batches = Batches(features, seed=config.seed, microbatches=config.optimizer.accumulation, **shape)
  evals = []
  for name, path in eval_files(config):
    held_out, features = load(path)
    evals.append(Split(name, held_out, Batches(features, **shape)))
  return FineTuningData(task=task, train=Split('', examples, batches), evals=tuple(evals),
                        feed=mesh_lib.feed(mesh), **fields)


def by_example(outputs: list[Output]) -> np.ndarray:
  """The logits of each example of a file, [examples, ...], from those of its batches [E, ...]."""
  return np.concatenate([output.logits[:len(output.located.examples)] for output in outputs])


def by_input(outputs: list[Output], count: int) -> list[np.ndarray]:
  """The logits of each of `count` inputs, [tokens, ...], from those of batches [R, L, ...]."""
  of_input = [None] * count
  for located, logits in outputs:
    pair_index = located.batch.inputs.pair_index
    for row, slot in zip(*np.nonzero(located.index >= 0)):
      of_input[located.index[row, slot]] = logits[row][pair_index[row] == slot + 1]
  return of_input
