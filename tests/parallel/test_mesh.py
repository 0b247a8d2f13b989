import jax
import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.parallel import topology


@pytest.mark.parametrize('asked, made', [
    ((1, -1, 1), (1, 8, 1)), ((1, -1, 2), (1, 4, 2)), ((2, 2, 2), (2, 2, 2)),
    ((-1, 2, 1), (4, 2, 1))])
def test_minus_one_is_the_rest(asked, made):
  mesh = mesh_lib.make_mesh(*asked)
  assert tuple(mesh.shape.values()) == made and mesh.axis_names == mesh_lib.AXES


@pytest.mark.parametrize('asked', [(1, 3, 1), (1, -1, 3), (1, -1, -1), (1, 0, 1), (1, -2, 1),
                                   (2, 8, 1)])
def test_sizes_that_do_not_fit(asked):
  with pytest.raises(UserError, match='mesh ' + 'x'.join(map(str, asked))):
    mesh_lib.make_mesh(*asked)


def test_rows_go_over_replica_and_data():
  mesh = mesh_lib.make_mesh(2, 2, 2)
  batch = mesh_lib.put_batch({'ids': np.arange(32).reshape(8, 4)}, mesh)['ids']
  assert batch.sharding.shard_shape(batch.shape) == (2, 4)
  np.testing.assert_array_equal(batch, np.arange(32).reshape(8, 4))
  assert mesh_lib.process_share(8, 0, 1) == slice(0, 8)
  assert mesh_lib.process_share(8, 3, 4) == slice(6, 8)


def test_peaks():
  class Device:
    def __init__(self, kind, core=0):
      self.device_kind, self.id, self.coords = kind, core, (0, 0, 0)

  assert topology.chip_of(jax.devices()[:1]) is None
  assert topology.chip_of([Device('TPU v5 lite')]).flops == 197e12
  assert topology.chip_of([Device('NVIDIA H200')]).flops == 989e12
  assert topology.chip_of([Device('NVIDIA H100 80GB HBM3')]).flops == 989e12
  # Two devices of one chip are half a chip each.
  cores = [Device('TPU7x', core) for core in (0, 1)]
  assert topology.num_chips(cores) == 1
  assert topology.chip_of(cores).flops == 2307e12 / 2
