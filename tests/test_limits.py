"""The limits that the benchmarks compare with."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import limits
from bert_jax.planning import traffic


def test_a_copy_reads_and_writes_each_word_in_place(monkeypatch):
  timed = []
  monkeypatch.setattr(limits, '_best_seconds', lambda function, x: timed.append((function, x)) or 2)
  assert limits.copy_bandwidth(1 << 20) == 1 << 20  # both ways, in 2 seconds
  (function, x), = timed
  assert x.nbytes == 1 << 20 and x.dtype == jnp.float32
  program = function.lower(x).compile()
  assert traffic.total(traffic.operations(program.as_text())) == 2 * x.nbytes
  assert program.memory_analysis().alias_size_in_bytes == x.nbytes


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_product_counts_each_multiplication_and_addition(monkeypatch, dtype):
  timed = []
  monkeypatch.setattr(limits, '_best_seconds', lambda function, x: timed.append((function, x)) or 2)
  assert limits.multiply_flops(64, dtype) == 64**3
  (function, x), = timed
  assert x.dtype == dtype
  # Repeated products of the matrix give the same values: they do not overflow or vanish.
  assert jnp.array_equal(function(function(x)), x)


def test_the_best_time_is_the_shortest_of_all_runs(monkeypatch):
  clock = iter([0, 5, 10, 12, 20, 23])
  monkeypatch.setattr(limits.time, 'perf_counter', lambda: next(clock))
  assert limits._best_seconds(jax.jit(lambda x: x + 1), jnp.zeros(2)) == 2
