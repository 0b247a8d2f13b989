"""Examples -> packed batches of a few fixed shapes, a pure function of (examples, seed, step).

Every step has `batch_size` examples, whatever their lengths: short ones share rows, isolated from
each other by the text ids, so that there is little padding. How many rows a step needs differs a
little; it is rounded up to one of a few numbers, each of which is compiled once.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import hashlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.data import inputs as inputs_lib
from bert_jax.data import packing
from bert_jax.data.inputs import Input
from bert_jax.data.tokens import Tokens

_LENGTH_MULTIPLE = 64  # divisor of the length of rows; short texts fill the rest of a row
_MOST_SLOTS = 16  # upper bound on the inputs in a row (P)
_SHARES = (0.5, 0.9, 1.0)  # each number of rows is enough for this share of an epoch's steps


@dataclasses.dataclass(frozen=True)
class Features:
  """Examples as the model reads them: each is one input, or several (chunks, choices)."""

  inputs: Sequence[Input]  # of all examples, one after another
  owners: np.ndarray  # [inputs] int64, the example of each, ascending
  targets: np.ndarray | None = None  # [examples, ...] the gold value of each
  token_targets: Sequence[np.ndarray] | None = None  # for each input [tokens, ...] int32

  @property
  def count(self) -> int:
    """The number of examples."""
    return int(self.owners[-1]) + 1 if len(self.owners) else 0

  @functools.cached_property
  def first(self) -> np.ndarray:
    """[examples + 1] the first input of each example, and the number of inputs."""
    return np.searchsorted(self.owners, np.arange(self.count + 1))

  @functools.cached_property
  def sizes(self) -> np.ndarray:
    """[inputs] tokens of each."""
    return np.array([len(x.ids) for x in self.inputs], np.int64)

  def digest(self) -> str:
    """A short hash of all of it."""
    digest = hashlib.blake2b(digest_size=16)
    for x in self.inputs:
      digest.update(np.array([len(x.ids), *x.ids, *x.type_ids], np.int64).tobytes())
    for x in (self.owners, self.targets, *(self.token_targets or [])):
      digest.update(b'' if x is None else np.ascontiguousarray(x).tobytes())
    return digest.hexdigest()


class Batch(NamedTuple):
  """E examples in R rows of L tokens, with P slots for inputs in each."""

  tokens: Tokens  # [R, L] each
  starts: np.ndarray  # [R, P] int32 where in its row each input begins; 0 where there is none
  # [E, C] int32 row * P + slot of each input of an example in its microbatch; -1 = none
  members: np.ndarray
  row: np.ndarray  # [R] int32 the number of each row in the step
  targets: np.ndarray | None  # [E, ...]
  token_targets: np.ndarray | None  # [R, L, ...] int32; 0 on padding

  def by_example(self, values: jax.Array) -> jax.Array:
    """Values of inputs [R, P, ...] of a microbatch by example: [E, C, ...].

    They are arbitrary where `members` has -1.
    """
    return values.reshape(-1, *values.shape[2:])[jnp.maximum(self.members, 0)]


class Located(NamedTuple):
  """A batch, and the examples and inputs in it."""

  batch: Batch
  examples: np.ndarray  # [up to E]
  index: np.ndarray  # [R, P] number of the input in each slot; -1 = none


class _Packed(NamedTuple):
  """A microbatch as `packing.pack` has packed it."""

  examples: np.ndarray
  inputs: np.ndarray  # [n] numbers of their inputs
  row_of: np.ndarray  # [n] the row of each


def _rounded_up(n: int, multiple: int) -> int:
  return -(-n // multiple) * multiple


def _interleaved(*microbatches: np.ndarray) -> np.ndarray:
  """The rows of microbatches, strided as the training step takes them apart."""
  return np.stack(microbatches, 1).reshape(-1, *microbatches[0].shape[1:])


class Batches:
  """The batches of a set of examples."""

  def __init__(self, features: Features, *, batch_size: int, pad_id: int, seed: int = 0,
               row_multiple: int = 1, microbatches: int = 1):
    """Plans the shapes.

    Args:
      features: the examples, at least one.
      batch_size: E, examples in a step.
      seed: of the order, which is another in every epoch.
      row_multiple: divisor of the rows of a microbatch, for the mesh.
      microbatches: of a step, each packed for itself.
    """
    self.features, self.batch_size = features, batch_size
    self._pad_id, self._seed = pad_id, seed
    self._multiple, self._microbatches = row_multiple, microbatches
    sizes = features.sizes
    self.length = _rounded_up(int(sizes.max()), _LENGTH_MULTIPLE)  # L
    self._slots = int(min(_MOST_SLOTS, max(self.length // sizes.min(), 1)))  # P
    self._most_inputs = int(np.diff(features.first).max())  # C
    self.steps_per_epoch = -(-features.count // batch_size)
    self._epoch, self._order = -1, None  # the newest one, and its order

  @property
  def most_examples(self) -> int:
    """The examples of a step that is full: of fewer than E an epoch has all in its one step."""
    return min(self.batch_size, self.features.count)

  def examples(self, step: int) -> np.ndarray:
    """The examples of a training step: each once an epoch, whose last step may have fewer."""
    epoch, within = divmod(step, self.steps_per_epoch)
    if epoch != self._epoch:
      rng = np.random.default_rng((self._seed, epoch))
      self._epoch, self._order = epoch, rng.permutation(self.features.count)
    return self._order[within * self.batch_size:(within + 1) * self.batch_size]

  def _packed(self, examples: np.ndarray) -> tuple[list[_Packed], int]:
    """The microbatches of some examples, and the rows that the largest one needs."""
    first, microbatches, needed = self.features.first, [], 0
    for m in range(self._microbatches):
      own = examples[m::self._microbatches]
      inputs = [np.arange(first[i], first[i + 1]) for i in own]
      inputs = np.concatenate(inputs or [np.array([], int)])
      row_of, rows = packing.pack(self.features.sizes[inputs], self.length, self._slots)
      microbatches.append(_Packed(own, inputs, row_of))
      needed = max(needed, rows)
    return microbatches, needed

  @functools.cached_property
  def _first_epoch(self) -> list[int]:
    """The rows that each step of the first epoch needs."""
    return [self._packed(self.examples(step))[1] for step in range(self.steps_per_epoch)]

  @functools.cached_property
  def rows(self) -> tuple[int, ...]:
    """Numbers of rows that are enough for half, most and all steps of the first epoch."""
    needed = np.sort(self._first_epoch)
    at = [needed[int(np.ceil(share * len(needed))) - 1] for share in _SHARES]
    return tuple(sorted({_rounded_up(int(n), self._multiple) for n in at}))

  def _rows_for(self, needed: int) -> int:
    enough = [rows for rows in self.rows if rows >= needed]
    # A later epoch may need more than the first: by quarters, so that it seldom happens again.
    last = self.rows[-1]
    quarter = _rounded_up(max(last // 4, 1), self._multiple)
    return enough[0] if enough else last + _rounded_up(needed - last, quarter)

  def _place(self, examples: np.ndarray, microbatches: list[_Packed], rows: int) -> Located:
    batch, index = jax.tree.map(
        _interleaved, *(self._microbatch(packed, rows) for packed in microbatches))
    batch = batch._replace(row=np.arange(len(batch.row), dtype=np.int32))
    return Located(batch, examples, index)

  def _microbatch(self, packed: _Packed, rows: int) -> tuple[Batch, np.ndarray]:
    """The batch, and the number of the input in each slot [R, P]; -1 = none."""
    f = self.features
    placed = inputs_lib.place(f.inputs, packed.inputs, packed.row_of, rows=rows, length=self.length,
                              slots=self._slots, pad_id=self._pad_id)
    is_filled = placed.index >= 0
    slot_of = dict(zip(placed.index[is_filled].tolist(), np.flatnonzero(is_filled).tolist()))
    members = np.full((self.batch_size // self._microbatches, self._most_inputs), -1, np.int32)
    counts = f.first[packed.examples + 1] - f.first[packed.examples]
    has_input = np.arange(self._most_inputs) < counts[:, None]
    members[:len(counts)][has_input] = [slot_of[i] for i in packed.inputs.tolist()]

    targets = token_targets = None
    if f.targets is not None:
      targets = np.zeros((len(members), *f.targets.shape[1:]), f.targets.dtype)
      targets[:len(counts)] = f.targets[packed.examples]
    if f.token_targets is not None:
      token_targets = np.zeros((rows, self.length, *f.token_targets[0].shape[1:]), np.int32)
      for row, slot in zip(*np.nonzero(is_filled)):
        values, start = f.token_targets[placed.index[row, slot]], placed.starts[row, slot]
        token_targets[row, start:start + len(values)] = values
    batch = Batch(tokens=placed.tokens, starts=placed.starts, members=members,
                  row=np.zeros(rows, np.int32),  # `_place` numbers them
                  targets=targets, token_targets=token_targets)
    return batch, placed.index

  def batch(self, step: int) -> Batch:
    """The batch of a training step."""
    examples = self.examples(step)
    microbatches, needed = self._packed(examples)
    return self._place(examples, microbatches, self._rows_for(needed)).batch

  def in_order(self) -> Iterator[Located]:
    """All examples once, in order, in batches of one shape: for evaluations."""
    examples = np.arange(self.features.count)
    batches = np.split(examples, range(self.batch_size, len(examples), self.batch_size))
    packed = [self._packed(batch) for batch in batches]
    rows = _rounded_up(max(needed for _, needed in packed), self._multiple)
    for batch, (microbatches, _) in zip(batches, packed):
      yield self._place(batch, microbatches, rows)

  def fill(self) -> float:
    """The share of real tokens in the rows of an epoch."""
    rows = sum(map(self._rows_for, self._first_epoch))
    return float(self.features.sizes.sum()) / (rows * self._microbatches * self.length)
