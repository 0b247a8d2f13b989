"""Examples -> packed batches of a few fixed shapes, a pure function of (examples, seed, step).

Every step has `batch_size` examples, whatever their lengths: short ones share rows, isolated from
each other by the pair index, so that there is little padding. How many rows a step needs differs a
little; it is rounded up to one of a few numbers, each of which is compiled once.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import functools
import hashlib
from typing import NamedTuple

import numpy as np

from bert_jax.data import inputs as inputs_lib
from bert_jax.data import packing
from bert_jax.data.inputs import Input
from bert_jax.model.encoder import Batch as Inputs

_LENGTHS = 64  # rows are a multiple of it long: the rest of it is filled with short texts
_SLOTS = 16  # P: inputs in a row at most
_SHARES = (0.5, 0.9, 1.0)  # the steps of an epoch whose rows each of the numbers is enough for


@dataclasses.dataclass(frozen=True)
class Features:
  """Examples as the model reads them: each is one input, or several (chunks, choices).

  Attributes:
    inputs: of all examples, one after another.
    owners: [inputs] int64, the example of each, ascending.
    targets: [examples, ...] what is to be predicted of each, or None.
    token_targets: for each input [tokens, ...] int32, or None.
  """

  inputs: Sequence[Input]
  owners: np.ndarray
  targets: np.ndarray | None = None
  token_targets: Sequence[np.ndarray] | None = None

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
    found = hashlib.blake2b(digest_size=16)
    for x in self.inputs:
      found.update(np.array([len(x.ids), *x.ids, *x.type_ids], np.int64).tobytes())
    for x in (self.owners, self.targets, *(self.token_targets or [])):
      found.update(b'' if x is None else np.ascontiguousarray(x).tobytes())
    return found.hexdigest()


class Batch(NamedTuple):
  """E examples in R rows of L tokens, with P slots for inputs in each."""

  inputs: Inputs  # [R, L] each
  starts: np.ndarray  # [R, P] int32 where in its row each input begins; 0 where there is none
  members: np.ndarray  # [E, C] int32 row * P + slot of each input of an example; -1 = none
  row: np.ndarray  # [R] int32 the number of each row in the step
  targets: np.ndarray | None  # [E, ...]
  token_targets: np.ndarray | None  # [R, L, ...] int32; 0 on padding


class Located(NamedTuple):
  """A batch, and which examples and inputs are in it."""

  batch: Batch
  examples: np.ndarray  # [up to E]
  index: np.ndarray  # [R, P] number of the input in each slot; -1 = none


class Batches:
  """The batches of a set of examples."""

  def __init__(self, features: Features, *, batch_size: int, pad_id: int, seed: int = 0,
               row_multiple: int = 1, microbatches: int = 1):
    """Plans the shapes.

    Args:
      features: the examples, at least one.
      batch_size: E, examples in a step.
      pad_id: what padding is.
      seed: of the order, which is another in every epoch.
      row_multiple: what the rows of a microbatch are divisible by, for the mesh.
      microbatches: of a step, each packed for itself.
    """
    self.features, self.batch_size = features, batch_size
    self._pad_id, self._seed = pad_id, seed
    self._multiple, self._microbatches = row_multiple, microbatches
    sizes = features.sizes
    self.length = -(-int(sizes.max()) // _LENGTHS) * _LENGTHS  # L
    self._slots = int(min(_SLOTS, max(self.length // sizes.min(), 1)))  # P
    self._most = int(np.diff(features.first).max())  # C
    self.steps_per_epoch = -(-features.count // batch_size)
    self._order = (-1, np.array([], int))  # (epoch, its examples): steps ask for it again and again

  # ---- which examples ---------------------------------------------------------------------------

  def examples(self, step: int) -> np.ndarray:
    """The examples of a training step: each once an epoch, whose last step may have fewer."""
    epoch, within = divmod(step, self.steps_per_epoch)
    known, order = self._order
    if known != epoch:
      order = np.random.default_rng((self._seed, epoch)).permutation(self.features.count)
      self._order = (epoch, order)
    return order[within * self.batch_size:(within + 1) * self.batch_size]

  # ---- in how many rows -------------------------------------------------------------------------

  def _parts(self, examples: np.ndarray) -> list[np.ndarray]:
    """The inputs of each microbatch."""
    first = self.features.first
    return [np.concatenate([np.arange(first[i], first[i + 1]) for i in part] or [np.array([], int)])
            for part in (examples[m::self._microbatches] for m in range(self._microbatches))]

  def _pack(self, inputs: np.ndarray) -> tuple[np.ndarray, int]:
    return packing.pack(self.features.sizes[inputs], self.length, self._slots)

  def _needed(self, examples: np.ndarray) -> int:
    """Rows of the largest microbatch."""
    return max(self._pack(inputs)[1] for inputs in self._parts(examples))

  def _rounded(self, rows: int) -> int:
    return -(-rows // self._multiple) * self._multiple

  @functools.cached_property
  def _first_epoch(self) -> list[int]:
    """The rows that each step of it needs."""
    return [self._needed(self.examples(i)) for i in range(self.steps_per_epoch)]

  @functools.cached_property
  def rows(self) -> tuple[int, ...]:
    """The numbers of rows that training uses: enough for half, most and all steps of an epoch."""
    needed = np.sort(self._first_epoch)
    at = [needed[int(np.ceil(share * len(needed))) - 1] for share in _SHARES]
    return tuple(sorted({self._rounded(int(n)) for n in at}))

  def _rows_for(self, needed: int) -> int:
    enough = [rows for rows in self.rows if rows >= needed]
    # A later epoch may need more than the first: by quarters, so that it seldom happens again.
    last = self.rows[-1]
    quarter = self._rounded(max(last // 4, 1))
    return enough[0] if enough else last + -(-(needed - last) // quarter) * quarter

  # ---- batches ----------------------------------------------------------------------------------

  def _place(self, examples: np.ndarray, rows: int) -> Located:
    parts = [self._microbatch(inputs, rows, examples[m::self._microbatches])
             for m, inputs in enumerate(self._parts(examples))]
    if len(parts) == 1:
      batch, index = parts[0]
    else:  # strided, as the training step takes them apart
      def interleave(*arrays):
        return None if arrays[0] is None else np.stack(arrays, 1).reshape(-1, *arrays[0].shape[1:])
      batches, indices = zip(*parts)
      inputs = Inputs(*map(interleave, *(b.inputs for b in batches)))
      batch = Batch(inputs, *map(interleave, *(b[1:] for b in batches)))
      index = interleave(*indices)
    batch = batch._replace(row=np.arange(len(batch.row), dtype=np.int32))
    return Located(batch, examples, index)

  def _microbatch(self, inputs: np.ndarray, rows: int,
                  examples: np.ndarray) -> tuple[Batch, np.ndarray]:
    f, slots = self.features, self._slots
    row_of, _ = self._pack(inputs)
    placed = inputs_lib.place([f.inputs[i] for i in inputs], row_of, rows, self.length, slots,
                              self._pad_id)
    there = placed.index >= 0
    slot_of = np.zeros(len(inputs), np.int32)
    slot_of[placed.index[there]] = np.flatnonzero(there)
    members = np.full((self.batch_size // self._microbatches, self._most), -1, np.int32)
    counts = f.first[examples + 1] - f.first[examples]
    members[:len(examples)][np.arange(self._most) < counts[:, None]] = slot_of

    targets = token_targets = None
    if f.targets is not None:
      targets = np.zeros((len(members), *f.targets.shape[1:]), f.targets.dtype)
      targets[:len(examples)] = f.targets[examples]
    if f.token_targets is not None:
      like = f.token_targets[0]
      token_targets = np.zeros((rows, self.length, *like.shape[1:]), np.int32)
      for row, slot in zip(*np.nonzero(there)):
        values = f.token_targets[inputs[placed.index[row, slot]]]
        start = placed.starts[row, slot]
        token_targets[row, start:start + len(values)] = values
    batch = Batch(Inputs(*placed[:4]), placed.starts, members, np.arange(rows, dtype=np.int32),
                  targets, token_targets)
    index = np.full(there.shape, -1, np.int64)
    index[there] = inputs[placed.index[there]]
    return batch, index

  def batch(self, step: int) -> Batch:
    """The batch of a training step."""
    examples = self.examples(step)
    return self._place(examples, self._rows_for(self._needed(examples))).batch

  def in_order(self) -> Iterator[Located]:
    """All examples once, in order, in batches of one shape: for evaluations."""
    parts = np.split(np.arange(self.features.count),
                     range(self.batch_size, self.features.count, self.batch_size))
    rows = self._rounded(max(map(self._needed, parts)))
    for examples in parts:
      yield self._place(examples, rows)

  def fill(self) -> float:
    """The share of real tokens in the rows of an epoch."""
    rows = sum(map(self._rows_for, self._first_epoch))
    return float(self.features.sizes.sum()) / (rows * self._microbatches * self.length)
