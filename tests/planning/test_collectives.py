"""Collectives as the compilers write them, and their growth with the data axis."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from bert_jax.parallel import mesh as mesh_lib
from bert_jax.planning import collectives
from bert_jax.planning.collectives import Collective
from tests import conftest

# Instructions of real programs for a mesh of 1 x 4 x 2 devices.
HLO = (pathlib.Path(__file__).parent / 'collectives.hlo').read_text()
# Calls that run beside the program on the SparseCore of a tpu7x, as libtpu 0.0.42 and 0.0.50 write
# them, for 8 devices: in a loop of 6 iterations, and with a call inside a call.
SPARSE_CORE = (pathlib.Path(__file__).parent / 'sparse_core.hlo').read_text()


def test_every_form_of_a_collective_is_read():
  actual = collectives.read(HLO, conftest.sub_mesh(4, 2))
  assert actual == [
      Collective('all-gather', ('data',), 4, 1, 8 * 4 * 4),
      Collective('all-gather', ('model',), 2, 2, 64 * 8 * 2 + 64 * 8 * 2),
      Collective('all-reduce', ('data',), 4, 1, 16 * 4 + 4 * 8 * 2),
      Collective('all-reduce', ('data', 'model'), 8, 1, 4),
      Collective('collective-permute', ('data', 'model'), 8, 1, 40),
      Collective('reduce-scatter', ('data',), 4, 2, 1024 * 8 * 4 + 16 * 8 * 4 * 4)]


def test_exchanges_on_the_sparse_core_are_read():
  assert collectives.read(SPARSE_CORE, conftest.sub_mesh(8, 1)) == [
      Collective('all-gather', ('data',), 8, 6 + 1, 6 * 512 * 512 * 2 + 512 * 768 * 4),
      Collective('reduce-scatter', ('data',), 8, 6, 6 * 512 * 512 * 2)]


def test_bytes_sent_along_a_ring():
  for kind, devices, sent in (('all-reduce', 4, 1500), ('all-gather', 4, 750),
                              ('reduce-scatter', 4, 750), ('all-reduce', 1, 0)):
    assert Collective(kind, ('data',), devices, count=1, bytes=1000).sent == sent


def test_every_iteration_of_a_loop_counts():
  mesh = conftest.sub_mesh(4, 1)
  whole, split = mesh_lib.replicated(mesh), mesh_lib.batch_sharding(mesh)
  kernels = jax.ShapeDtypeStruct((5, 64, 64), jnp.float32, sharding=whole)
  rows = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=split)

  def loss(kernels, x):
    return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel).mean(0) + x, None), x, kernels)[0]

  step = jax.jit(loss, out_shardings=split)
  (exchange,) = collectives.read(step.lower(kernels, rows).compile().as_text(), mesh)
  assert exchange == Collective('all-reduce', ('data',), 4, 5, 5 * 64 * 4)


@pytest.mark.parametrize('preset', ['dp', 'fsdp'])
def test_weak_scaling_predicts_the_traffic_of_a_larger_mesh(preset):
  """The traffic of a product on a larger mesh follows from its traffic on a smaller mesh."""
  def program(devices):
    mesh = conftest.sub_mesh(devices, 1)
    whole, split = mesh_lib.replicated(mesh), mesh_lib.batch_sharding(mesh)
    kernel = jax.ShapeDtypeStruct((64, 32), jnp.float32,
                                  sharding=split if preset == 'fsdp' else whole)
    rows = jax.ShapeDtypeStruct((4 * devices, 64), jnp.float32, sharding=split)
    grads = jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w))), out_shardings=whole)
    return collectives.read(grads.lower(kernel, rows).compile().as_text(), mesh), mesh

  scaled = collectives.weak_scaling(*program(2), (2, 4, 8))
  for devices in (4, 8):
    assert scaled[devices] == pytest.approx(sum(c.sent for c in program(devices)[0]), rel=1e-6)
  assert scaled[8] > scaled[4] > scaled[2] > 0
  assert collectives.weak_scaling([], conftest.sub_mesh(1, 4), (1, 4)) == {}
