"""Packed batches hold each example once per epoch, in few shapes."""

import hypothesis
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from bert_jax.data.inputs import Input
from bert_jax.labelled.packed_examples import Batches, Features


def make(count, seed=0, longest=40, most=3):
  """Examples of one to `most` inputs, whose ids tell them apart."""
  rng = np.random.default_rng(seed)
  inputs, owners = [], []
  for i in range(count):
    for _ in range(rng.integers(1, most + 1)):
      n = int(rng.integers(3, longest))
      inputs.append(Input([1000 + len(inputs)] * n, [0] * (n - 1) + [1]))
      owners.append(i)
  return Features(inputs, np.array(owners), np.arange(count, dtype=np.int32),
                  [np.full(len(x.ids), i, np.int32) for i, x in enumerate(inputs)])


def check(batch, examples, features, microbatches=1):
  """Every input of every example is where `members` says, with its targets."""
  rows = len(batch.starts) // microbatches
  for m in range(microbatches):
    part = jax.tree.map(lambda x, m=m: x[m::microbatches], batch)
    assert len(part.starts) == rows
    mine = examples[m::microbatches]
    for e in range(len(part.members)):
      numbers = (np.arange(features.first[mine[e]], features.first[mine[e] + 1])
                 if e < len(mine) else [])
      assert (part.members[e] >= 0).sum() == len(numbers)
      if e < len(mine):
        assert part.targets[e] == features.targets[mine[e]]
      for member, number in zip(part.members[e], numbers):
        row, slot = divmod(int(member), part.starts.shape[1])
        start, expected = part.starts[row, slot], features.inputs[number]
        at = slice(start, start + len(expected.ids))
        assert part.tokens.ids[row, at].tolist() == list(expected.ids)
        assert part.tokens.type_ids[row, at].tolist() == list(expected.type_ids)
        assert part.tokens.positions[row, at].tolist() == list(range(len(expected.ids)))
        assert (part.tokens.text_ids[row, at] == slot + 1).all()
        assert (part.token_targets[row, at] == number).all()
    used = sum(len(features.inputs[n].ids) for i in mine
               for n in range(features.first[i], features.first[i + 1]))
    assert (part.tokens.text_ids > 0).sum() == used
  assert batch.row.tolist() == list(range(len(batch.row)))


def test_the_largest_step_has_the_most_rows_of_the_first_epoch():
  batches = Batches(make(40), batch_size=4, pad_id=0)
  rows = [len(batches.batch(step).row) for step in range(batches.steps_per_epoch)]
  assert len(set(rows)) > 1 and rows[batches.largest_step] == max(rows)


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(st.integers(1, 40), st.integers(0, 9), st.sampled_from([4, 8]),
                  st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]))
def test_every_example_once_an_epoch(count, seed, batch_size, microbatches, multiple):
  features = make(count, seed)
  batches = Batches(features, batch_size=batch_size, pad_id=0, seed=seed,
                    row_multiple=multiple, microbatches=microbatches)
  for epoch in (0, 1):
    seen = []
    for step in range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch):
      examples = batches.examples(step)
      batch = batches.batch(step)
      check(batch, examples, features, microbatches)
      assert len(batch.members) == batch_size
      assert len(batch.row) % (multiple * microbatches) == 0
      seen += examples.tolist()
    assert sorted(seen) == list(range(count))
  orders = [np.concatenate([batches.examples(s + e * batches.steps_per_epoch)
                            for s in range(batches.steps_per_epoch)]) for e in (0, 1)]
  assert count < 8 or (orders[0] != orders[1]).any()  # every epoch has another order


def test_few_shapes_and_little_padding():
  features = make(2000, most=1)
  batches = Batches(features, batch_size=32, pad_id=0)
  shapes = {batches.batch(step).tokens.ids.shape for step in range(3 * batches.steps_per_epoch)}
  assert len(batches.rows) <= 3 and len(shapes) <= 4
  assert batches.length == 64
  assert batches.fill() > 0.8


def test_a_step_is_a_function_of_the_seed_and_its_number():
  features = make(50)
  a, b = (Batches(features, batch_size=8, pad_id=0, seed=3) for _ in range(2))
  for step in (11, 2, 30):  # in any order
    for x, y in zip(a.batch(step).tokens, b.batch(step).tokens):
      np.testing.assert_array_equal(x, y)
  other = Batches(features, batch_size=8, pad_id=0, seed=4)
  assert (a.examples(0) != other.examples(0)).any()


def test_evaluations_have_one_shape_and_keep_the_order():
  features = make(37)
  batches = Batches(features, batch_size=8, pad_id=0, row_multiple=2)
  located = list(batches.in_order())
  assert np.concatenate([x.examples for x in located]).tolist() == list(range(37))
  assert len({x.batch.tokens.ids.shape for x in located}) == 1
  inputs = np.sort(np.concatenate([x.index[x.index >= 0] for x in located]))
  assert inputs.tolist() == list(range(len(features.inputs)))
  for x in located:
    check(x.batch, x.examples, features)


@pytest.mark.parametrize('change', ['ids', 'types', 'owners', 'targets', 'tokens'])
def test_the_digest_sees_every_change(change):
  a, b = make(9), make(9)
  assert a.digest() == b.digest()
  if change == 'ids':
    b.inputs[4].ids[0] += 1
  elif change == 'types':
    b.inputs[4].type_ids[0] ^= 1
  else:
    {'owners': b.owners, 'targets': b.targets, 'tokens': b.token_targets[3]}[change][-1] += 1
  assert a.digest() != b.digest()
