"""What the four fine-tuning tasks share: packed batches, dropout, evaluation over whole files."""

import abc
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import re
from typing import Any
from typing import NamedTuple

from etils import epath
from flax import linen as nn
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from bert_jax.errors import UserError
from bert_jax.labelled.packed_examples import Batch
from bert_jax.labelled.packed_examples import Batches
from bert_jax.labelled.packed_examples import Features
from bert_jax.labelled.packed_examples import Located
from bert_jax.model import dropout_bits
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.encoder import Batch as Inputs
from bert_jax.objectives import losses
from bert_jax.objectives.losses import Metrics
from bert_jax.parallel.mesh import Feed

_SHOWN = 16  # labels in the summary of a run


class Split(NamedTuple):
  """Examples of one file."""

  name: str  # '' for the first file of data.eval; a suffix of the scores for others
  examples: Sequence[Any]
  batches: Batches


@dataclasses.dataclass(frozen=True)
class Splits:
  """How the examples of a run become batches.

  Attributes:
    batch_size: examples in a step.
    pad_id: what padding is.
    seed: of the order.
    row_multiple: what the rows of a microbatch are divisible by, for the mesh.
    microbatches: of a training step.
    feed: the part of a batch that this process feeds.
  """

  batch_size: int
  pad_id: int
  seed: int
  row_multiple: int
  microbatches: int
  feed: Feed

  def train(self, examples: Sequence[Any], features: Features) -> Split:
    """The examples that are trained on."""
    return Split('', examples, Batches(
        features, batch_size=self.batch_size, pad_id=self.pad_id, seed=self.seed,
        row_multiple=self.row_multiple, microbatches=self.microbatches))

  def evaluation(self, name: str, examples: Sequence[Any], features: Features) -> Split:
    """The examples of a file that is evaluated."""
    return Split(name, examples, Batches(features, batch_size=self.batch_size, pad_id=self.pad_id,
                                         row_multiple=self.row_multiple))


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
  found = list(examples)
  if not found:
    raise UserError(f'{path} holds no example')
  return found


class Output(NamedTuple):
  """What the model says of one batch, on the host."""

  located: Located
  logits: np.ndarray


@dataclasses.dataclass(frozen=True)
class FineTuning(abc.ABC):
  """A task with a head on the encoder, trained on files of examples.

  Attributes:
    model: with the head.
    labels: names of what the head gives.
    train: the training examples.
    evals: the files that are evaluated; none = no evaluation.
    notes: what was found in the data.
    feed: the part of a batch that this process feeds.
  """

  model: nn.Module
  labels: tuple[str, ...]
  train: Split
  evals: tuple[Split, ...]
  notes: tuple[str, ...]
  feed: Feed = Feed()

  @property
  @abc.abstractmethod
  def score_names(self) -> tuple[str, ...]:
    """What `scores` gives of every file."""

  def with_config(self, config: BertConfig) -> 'FineTuning':
    """The same with a model of other sizes."""
    return dataclasses.replace(self, model=self.model.clone(config=config))

  @property
  def frozen(self) -> dict:
    """Nothing."""
    return {}

  @property
  def loss_weights(self) -> dict[str, float]:
    """One loss."""
    return {'loss': 1.0}

  def init(self, key: jax.Array) -> Any:
    """Parameters, boxed with their logical axes."""
    tokens = jnp.zeros((1, 8), jnp.int32)
    return self.model.init(key, Inputs(*[tokens] * 4), *self.call_arguments(tokens[:, :1]))

  def call_arguments(self, cls_positions: jax.Array) -> tuple[jax.Array, ...]:
    """What the model is called with besides the inputs."""
    del cls_positions
    return ()

  @abc.abstractmethod
  def logits(self, apply: Callable[..., jax.Array], batch: Batch) -> jax.Array:
    """What the head says of a batch; `apply` runs the model, with dropout or without."""

  @abc.abstractmethod
  def metrics(self, logits: jax.Array, batch: Batch) -> Metrics:
    """'loss' and what else is known of a batch from these logits."""

  @abc.abstractmethod
  def scores(self, split: Split, outputs: list[Output]) -> dict[str, float]:
    """The task's own scores of a whole file."""

  def reduced(self, logits: jax.Array) -> jax.Array:
    """What an evaluation fetches of the logits."""
    return logits

  def _forward(self, params: Any, batch: Batch, key: jax.Array | None) -> jax.Array:
    # Every microbatch of a step gets the same key: its first row tells them apart.
    rngs = {}
    if key is not None:
      rngs['dropout'] = dropout_bits.key_of(jax.random.fold_in(key, jnp.min(batch.row)))

    def apply(*args, **kwargs):
      return self.model.apply(params, *args, deterministic=key is None, rngs=rngs, **kwargs)

    return self.logits(apply, batch)

  def loss(self, params: Any, frozen: Any, batch: Batch, key: jax.Array | None) -> Metrics:
    """The metrics of the task and the batch's real tokens."""
    del frozen
    tokens = jnp.sum(batch.inputs.pair_index > 0).astype(jnp.float32)
    return {**self.metrics(self._forward(params, batch, key), batch),
            'tokens': (tokens, jnp.float32(1))}

  def measure(self, params: Any, frozen: Any, batch: Batch) -> tuple[Metrics, jax.Array]:
    """(metrics, what an evaluation needs of the logits), without dropout."""
    del frozen
    logits = self._forward(params, batch, None)
    return self.metrics(logits, batch), self.reduced(logits)

  def _share(self, batch: Batch) -> Batch:
    return jax.tree.map(
        lambda x: x[self.feed.rows(len(x))], batch)

  def rows(self, step: int) -> Batch:
    """This process's share of a step's batch."""
    return self._share(self.train.batches.batch(step))

  @property
  def has_held_out(self) -> bool:
    """Whether there are files to evaluate."""
    return bool(self.evals)

  def evaluate(self, evaluate_batch: Callable[[Batch], Any],
               step: int) -> dict[str, float | None]:
    """The mean loss and the scores of every file."""
    del step
    found = {}
    for split in self.evals:
      sums, outputs = np.zeros(2), []
      for located in split.batches.in_order():
        metrics, logits = jax.device_get(evaluate_batch(self._share(located.batch)))
        sums += metrics['loss']
        outputs.append(Output(located, logits))
      scores = {**losses.means({'loss': sums}), **self.scores(split, outputs)}
      found |= {f'{name}_{split.name}' if split.name else name: value
                for name, value in scores.items()}
    return found

  def flops_per_token(self, length: int) -> float:
    """Model FLOPs of the encoder."""
    return self.model.config.flops_per_token(length, 0)

  def flops(self, step: int, tokens: float) -> float:
    """Model FLOPs of training on so many real tokens."""
    del step
    return self.flops_per_token(self.train.batches.length) * tokens

  def describe(self) -> Iterator[tuple[str, str]]:
    """(what, value) lines for the summary before a run."""
    batches = self.train.batches
    sizes = [f'{len(self.train.examples):,} to train on']
    sizes += [f'{len(split.examples):,} to evaluate{" " * bool(split.name)}{split.name}'
              for split in self.evals]
    yield 'examples', ', '.join(sizes)
    more = len(self.labels) - _SHOWN
    if self.labels:
      yield 'labels', ', '.join(self.labels[:_SHOWN]) + (f' and {more} more' if more > 0 else '')
    yield 'rows of ' + str(batches.length), (
        f'{" or ".join(map(str, batches.rows))} for {batches.batch_size} examples, '
        f'{batches.fill():.1%} real tokens')
    for note in self.notes:
      yield 'note', note


def by_example(outputs: list[Output]) -> np.ndarray:
  """The logits of each example of a file, [examples, ...], from those of its batches [E, ...]."""
  return np.concatenate([output.logits[:len(output.located.examples)] for output in outputs])


def by_input(outputs: list[Output], count: int) -> list[np.ndarray]:
  """For each of `count` inputs its tokens' part of the logits, [tokens, ...], from [R, L, ...]."""
  found = [None] * count
  for located, logits in outputs:
    pair_index = located.batch.inputs.pair_index
    for row, slot in zip(*np.nonzero(located.index >= 0)):
      found[located.index[row, slot]] = logits[row][pair_index[row] == slot + 1]
  return found
