"""Packs examples into batches of a few fixed shapes.

A batch is a pure function of (examples, seed, step). Every step but the last of an epoch
has `batch_size` examples, whatever their lengths. Short examples share rows, which leaves
little padding, and their text ids isolate them from each other. The number of rows is
rounded up to one of a few sizes, and the step is compiled once for each size.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import hashlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.data import packing
from bert_jax.data.inputs import Input, place_in_rows
from bert_jax.data.tokens import Tokens

_LENGTH_MULTIPLE = 64  # L is a multiple of this
_MOST_SLOTS = 16  # the most inputs in a row (P)
# For each share, JAX compiles one number of rows, enough for that share of the steps.
_SHARES = (0.5, 0.9, 1.0)


@dataclasses.dataclass(frozen=True)
class Features:
  """Tokenized examples; an example has one input, or several (chunks, choices)."""

  inputs: Sequence[Input]  # the inputs of all examples, one after another
  owners: np.ndarray  # [inputs] int64, the example of each input, ascending
  targets: np.ndarray | None = None  # [examples, ...], the gold value of each example
  # Per input [tokens, ...] int32, the gold values of its tokens.
  token_targets: Sequence[np.ndarray] | None = None

  @property
  def count(self) -> int:
    """The number of examples."""
    return int(self.owners[-1]) + 1 if len(self.owners) else 0

  @functools.cached_property
  def first(self) -> np.ndarray:
    """The first input of each example, and the number of inputs: [examples + 1] int64."""
    return np.searchsorted(self.owners, np.arange(self.count + 1))

  @functools.cached_property
  def sizes(self) -> np.ndarray:
    """The number of tokens of each input: [inputs] int64."""
    return np.array([len(x.ids) for x in self.inputs], np.int64)

  def digest(self) -> str:
    """Returns a short hash of all fields."""
    digest = hashlib.blake2b(digest_size=16)
    # Includes the lengths: otherwise a token could move to the next input unnoticed.
    for x in self.inputs:
      digest.update(np.array([len(x.ids), *x.ids, *x.type_ids], np.int64).tobytes())
    for x in (self.owners, self.targets, *(self.token_targets or [])):
      digest.update(b'' if x is None else np.ascontiguousarray(x).tobytes())
    return digest.hexdigest()


class Batch(NamedTuple):
  """E examples in R rows of L tokens, with P slots for inputs in each."""

  tokens: Tokens  # arrays [R, L]
  starts: np.ndarray  # [R, P] int32, the position where each input begins; 0 = no input
  # [E, C] int32, row * P + slot of each input of an example, where `row` counts in its
  # microbatch; -1 = no input.
  members: np.ndarray
  row: np.ndarray  # [R] int32, the number of each row in the step
  targets: np.ndarray | None  # [E, ...], see `Features`
  token_targets: np.ndarray | None  # [R, L, ...] int32; 0 on padding

  @property
  def is_real(self) -> jax.Array:
    """[E] float32, 1 for an example, 0 for padding."""
    return (self.members[:, 0] >= 0).astype(jnp.float32)

  def by_example(self, values: jax.Array) -> jax.Array:
    """Gathers values of a microbatch's inputs by example: [R, P, ...] -> [E, C, ...].

    The result is arbitrary where `members` is -1.
    """
    return values.reshape(-1, *values.shape[2:])[jnp.maximum(self.members, 0)]


class Located(NamedTuple):
  """A batch, and the examples and inputs in it."""

  batch: Batch
  examples: np.ndarray  # [at most E] int64, the indices of the examples
  index: np.ndarray  # [R, P] int64, the index of the input in each slot; -1 = no input


class _Packed(NamedTuple):
  """A microbatch, and the rows that `packing.pack` gave its inputs."""

  examples: np.ndarray
  inputs: np.ndarray  # [n], the indices of the inputs
  row_of: np.ndarray  # [n], the row of each input


def _rounded_up(n: int, multiple: int) -> int:
  return -(-n // multiple) * multiple


def _interleaved(*microbatches: np.ndarray) -> np.ndarray:
  """Interleaves the rows of microbatches.

  Microbatch m of n gets the rows m, m + n, m + 2n, ..., because the training step splits
  a batch like this.
  """
  return np.stack(microbatches, 1).reshape(-1, *microbatches[0].shape[1:])


class Batches:
  """The batches of a set of examples."""

  def __init__(self, features: Features, *, batch_size: int, pad_id: int, seed: int = 0,
               row_multiple: int = 1, microbatches: int = 1):
    """Plans the shapes.

    Args:
      features: the examples, at least one.
      batch_size: E, the number of examples in a step.
      pad_id: the id of [PAD].
      seed: determines the order, which changes every epoch.
      row_multiple: divides the number of rows of a microbatch, for the mesh.
      microbatches: the number of microbatches in a step; each is packed separately.
    """
    self.features, self.batch_size = features, batch_size
    self._pad_id, self._seed = pad_id, seed
    self._multiple, self._microbatches = row_multiple, microbatches
    self._hides = any(x.hidden for x in features.inputs)
    sizes = features.sizes
    # The static dimensions, from all examples: no step can need more.
    self.length = _rounded_up(int(sizes.max()), _LENGTH_MULTIPLE)  # L
    self._slots = int(min(_MOST_SLOTS, max(self.length // sizes.min(), 1)))  # P
    self._most_inputs = int(np.diff(features.first).max())  # C
    self.steps_per_epoch = -(-features.count // batch_size)
    self._epoch, self._order = -1, None  # the epoch used last, and its order

  @property
  def most_examples(self) -> int:
    """The number of examples in a full step; less than E if there are fewer examples."""
    return min(self.batch_size, self.features.count)

  def examples(self, step: int) -> np.ndarray:
    """Returns the indices of the examples of a training step: [E] int64.

    An epoch has each example once. Its last step may have fewer than E examples.
    """
    epoch, within = divmod(step, self.steps_per_epoch)
    # A pure function of the step, not a running state: a resumed run continues exactly.
    if epoch != self._epoch:
      rng = np.random.default_rng((self._seed, epoch))
      self._epoch, self._order = epoch, rng.permutation(self.features.count)
    return self._order[within * self.batch_size:(within + 1) * self.batch_size]

  def _packed(self, examples: np.ndarray) -> tuple[list[_Packed], int]:
    """Packs examples: (microbatches, the rows that the largest microbatch needs)."""
    first, microbatches, needed = self.features.first, [], 0
    for m in range(self._microbatches):
      own = examples[m::self._microbatches]
      # The empty array is for a microbatch without examples, in a short step.
      inputs = np.concatenate([
          np.array([], int), *(np.arange(first[i], first[i + 1]) for i in own)])
      row_of, rows = packing.pack(self.features.sizes[inputs], self.length, self._slots)
      microbatches.append(_Packed(own, inputs, row_of))
      needed = max(needed, rows)
    return microbatches, needed

  @functools.cached_property
  def _first_epoch(self) -> list[int]:
    """The number of rows that a microbatch of each step of the first epoch needs."""
    return [self._packed(self.examples(step))[1] for step in range(self.steps_per_epoch)]

  @property
  def largest_step(self) -> int:
    """The step of the first epoch with the most rows."""
    return int(np.argmax(self._first_epoch))

  @functools.cached_property
  def rows(self) -> tuple[int, ...]:
    """The numbers of rows that suffice for _SHARES of the steps of the first epoch."""
    needed = np.sort(self._first_epoch)
    at = [needed[int(np.ceil(share * len(needed))) - 1] for share in _SHARES]
    return tuple(sorted({_rounded_up(int(n), self._multiple) for n in at}))

  def _rows_for(self, needed: int) -> int:
    enough = [rows for rows in self.rows if rows >= needed]
    # A step of a later epoch may need more rows than any step of the first. Their number
    # grows by quarters, because each new number costs a compilation.
    last = self.rows[-1]
    quarter = _rounded_up(max(last // 4, 1), self._multiple)
    return enough[0] if enough else last + _rounded_up(needed - last, quarter)

  def _place(self, examples: np.ndarray, microbatches: list[_Packed],
             rows: int) -> Located:
    batch, index = jax.tree.map(
        _interleaved, *(self._microbatch(packed, rows) for packed in microbatches))
    batch = batch._replace(row=np.arange(len(batch.row), dtype=np.int32))
    return Located(batch, examples, index)

  def _microbatch(self, packed: _Packed, rows: int) -> tuple[Batch, np.ndarray]:
    """Returns the batch, and the index of the input in each slot [R, P]; -1 = none."""
    f = self.features
    placed = place_in_rows(
        f.inputs, packed.inputs, packed.row_of, rows=rows, length=self.length,
        slots=self._slots, pad_id=self._pad_id, hides=self._hides)
    # The model pools by slot, and `members` maps an example to its slots. Examples have
    # different numbers of inputs, so unused members keep -1.
    is_filled = placed.index >= 0
    slot_of = dict(zip(placed.index[is_filled].tolist(),
                       np.flatnonzero(is_filled).tolist()))
    members = np.full((self.batch_size // self._microbatches, self._most_inputs), -1,
                      np.int32)
    counts = f.first[packed.examples + 1] - f.first[packed.examples]
    has_input = np.arange(self._most_inputs) < counts[:, None]
    members[:len(counts)][has_input] = [slot_of[i] for i in packed.inputs.tolist()]

    targets = token_targets = None
    # E is static: zeros pad a short microbatch and get no weight in the loss.
    if f.targets is not None:
      targets = np.zeros((len(members), *f.targets.shape[1:]), f.targets.dtype)
      targets[:len(counts)] = f.targets[packed.examples]
    if f.token_targets is not None:
      token_targets = np.zeros((rows, self.length, *f.token_targets[0].shape[1:]),
                               np.int32)
      for row, slot in zip(*np.nonzero(is_filled)):
        values, start = f.token_targets[placed.index[row, slot]], placed.starts[row, slot]
        token_targets[row, start:start + len(values)] = values
    batch = Batch(tokens=placed.tokens, starts=placed.starts, members=members,
                  row=np.zeros(rows, np.int32),  # `_place` numbers them
                  targets=targets, token_targets=token_targets)
    return batch, placed.index

  def batch(self, step: int) -> Batch:
    """Returns the batch of a training step."""
    examples = self.examples(step)
    microbatches, needed = self._packed(examples)
    return self._place(examples, microbatches, self._rows_for(needed)).batch

  def in_order(self) -> Iterator[Located]:
    """Yields all examples once, in order, in batches of one shape: for evaluations."""
    examples = np.arange(self.features.count)
    batches = np.split(examples, range(self.batch_size, len(examples), self.batch_size))
    packed = [self._packed(batch) for batch in batches]
    # One shape for all batches, so that the evaluation compiles once.
    rows = _rounded_up(max(needed for _, needed in packed), self._multiple)
    for batch, (microbatches, _) in zip(batches, packed):
      yield self._place(batch, microbatches, rows)

  def fill(self) -> float:
    """Returns the share of real tokens in the rows of an epoch."""
    rows = sum(map(self._rows_for, self._first_epoch))
    return float(self.features.sizes.sum()) / (rows * self._microbatches * self.length)
