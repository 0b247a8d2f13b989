"""Memory traffic, counted by hand and in compiled programs."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from bert_jax.planning import traffic
from bert_jax.planning.traffic import Operation
from tests.planning import test_collectives

HLO = (pathlib.Path(__file__).parent / 'traffic.hlo').read_text()
_ARRAY = 8 * 128 * 4  # bytes


def test_traffic_of_a_tpu_program_by_hand():
  """24 iterations of a loop, slices of a stack, updates in place, the memory of the core."""
  indices = 24 * 4
  assert traffic.operations(HLO) == [
      # Reads one of 24 slices of the stack; the other goes to the memory of the core.
      Operation('backward', 'encode/layers', 'dynamic_update_slice', 1, 24 * 2 * _ARRAY + indices,
                0),
      Operation('forward', 'encode/layers/attention', 'convert_element_type', 1,
                24 * _ARRAY + indices, 2400),
      # Reads one part, writes four.
      Operation('', '', 'all-gather-start', 1, 5 * _ARRAY, 0),
      # The first addition stays in the memory of the core.
      Operation('update', 'optimizer', 'add', 1, 2 * _ARRAY, 0),
      Operation('', '', 'copy-start', 1, _ARRAY, 0)]


def test_calls_on_the_sparse_core_read_and_write_once():
  """Neither the start of a call nor the hand-over of its operands moves anything."""
  part, whole, table = 64 * 512 * 2, 512 * 512 * 2, 512 * 768 * 4
  assert traffic.operations(test_collectives.SPARSE_CORE) == [
      Operation('forward', 'layers', 'squeeze', 1, 6 * (part + whole), 0),
      Operation('', '', 'reduce-scatter', 1, 6 * (whole + part), 0),
      Operation('', '', 'copy', 1, 2 * table, 0),
      Operation('', '', 'all-gather', 1, table / 8 + table, 0)]


def compiled(function, *shapes) -> float:
  shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  return traffic.total(traffic.operations(jax.jit(function).lower(*shapes).compile().as_text()))


def test_a_product_reads_both_matrices_and_writes_one():
  assert compiled(jnp.matmul, (64, 32), (32, 16)) == 4 * (64 * 32 + 32 * 16 + 64 * 16)


def test_every_iteration_of_a_loop_counts():
  """A scan over the layers of a stack: twice the layers move twice the memory."""
  def layers(weights, x):
    return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, weights)[0]

  eight, sixteen = (compiled(layers, (n, 128, 128), (128, 128)) for n in (8, 16))
  assert sixteen == pytest.approx(2 * eight, rel=0.02)
  assert eight > 8 * 4 * 3 * 128 * 128  # reads the kernel and x, writes the product
