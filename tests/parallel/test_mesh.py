import re

import jax
import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.parallel import chip_figures, topology
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.runtime import host


@pytest.mark.parametrize('sizes, expected', [
    ((1, -1, 1), (1, 8, 1)), ((1, -1, 2), (1, 4, 2)), ((2, 2, 2), (2, 2, 2)),
    ((-1, 2, 1), (4, 2, 1))])
def test_minus_one_takes_the_remaining_devices(sizes, expected):
  mesh = mesh_lib.make_mesh(*sizes)
  assert tuple(mesh.shape.values()) == expected and mesh.axis_names == mesh_lib.AXES


@pytest.mark.parametrize('sizes', [(1, 3, 1), (1, -1, 3), (1, -1, -1), (1, 0, 1), (1, -2, 1),
                                   (2, 8, 1)])
def test_mesh_sizes_that_do_not_fit_are_refused(sizes):
  with pytest.raises(UserError, match='mesh ' + 'x'.join(map(str, sizes))):
    mesh_lib.make_mesh(*sizes)


def test_rows_are_split_over_replica_and_data():
  mesh = mesh_lib.make_mesh(2, 2, 2)
  batch = mesh_lib.put_batch({'ids': np.arange(32).reshape(8, 4)}, mesh)['ids']
  assert batch.sharding.shard_shape(batch.shape) == (2, 4)
  np.testing.assert_array_equal(batch, np.arange(32).reshape(8, 4))
  assert mesh_lib.Feed().rows(4).tolist() == [0, 1, 2, 3]
  assert mesh_lib.Feed((3,), 4).rows(8).tolist() == [6, 7]
  assert mesh_lib.Feed((0, 3), 4).rows(8).tolist() == [0, 1, 6, 7]


@pytest.mark.parametrize('name, devices, chips, memory', [
    ('v4:2x2x1', 4, 4, 32), ('v4:2x2x4', 16, 16, 32), ('v5e:2x2', 4, 4, 16),
    ('v5p:2x2x1', 4, 4, 95), ('v6e:2x2', 4, 4, 32), ('tpu7x:2x2x1', 8, 4, 96)])
def test_a_slice_has_the_real_devices_chips_and_memory(name, devices, chips, memory):
  """The two cores of a chip are one device on v4 and v5p, two on tpu7x; `memory` is in GiB."""
  pytest.importorskip('libtpu')
  mesh = mesh_lib.make_mesh(1, devices // 2, 2, devices=topology.get(name))
  flat = list(mesh.devices.flat)
  assert chip_figures.num_chips(flat) == chips and len(set(flat)) == devices
  assert chip_figures.chip_of(flat).memory == memory * 2**30
  # The compiler keeps up to 1.5 GiB for itself.
  too_large = jax.ShapeDtypeStruct((devices, 2**36), 'float32',
                                   sharding=mesh_lib.batch_sharding(mesh))
  with pytest.raises(jax.errors.JaxRuntimeError) as refused:
    jax.jit(lambda x: x + 1).lower(too_large).compile()
  available = float(re.search(r'available HBM \(([\d.]+)G\)', str(refused.value))[1])
  assert memory - 1.5 <= available < memory + 1


def test_the_model_axis_joins_neighboring_chips():
  pytest.importorskip('libtpu')
  chips = topology.get('v6e:4x4')
  mesh = mesh_lib.make_mesh(1, 8, 2, devices=chips)
  for pair in mesh.devices.reshape(8, 2):  # neighbors
    (a, b), (c, d) = (chip.coords[:2] for chip in pair)
    assert abs(a - c) + abs(b - d) == 1


def test_only_the_replica_axis_spans_slices():
  pytest.importorskip('libtpu')
  chips = topology.get('v5e:2x2', slices=2)
  mesh = mesh_lib.make_mesh(4, -1, 1, devices=chips)
  assert [[chip.slice_index for chip in replica.flat] for replica in mesh.devices] == [
      [0, 0], [0, 0], [1, 1], [1, 1]]
  with pytest.raises(UserError, match='over 2 slices: make mesh.replica a multiple of 2'):
    mesh_lib.make_mesh(devices=chips)


class Card:
  """A GPU of one of two hosts; XLA numbers the hosts as slices."""

  platform, device_kind = 'gpu', 'NVIDIA H100 80GB HBM3'

  def __init__(self, number):
    self.id, self.process_index, self.slice_index = number, number // 8, number // 8


def test_the_data_axis_spans_hosts_of_gpus(monkeypatch):
  monkeypatch.setattr(mesh_lib, 'Mesh', lambda devices, *_, **__: devices)
  devices = mesh_lib.make_mesh(1, -1, 1, devices=[Card(i) for i in range(16)])
  assert [card.id for card in devices.flat] == list(range(16)) and devices.shape == (1, 16, 1)


class Device:
  def __init__(self, process):
    self.process_index = process


class FakeMesh:
  """The process of each device, as [data][model]."""

  def __init__(self, processes):
    self.devices = np.array([[[Device(p) for p in row] for row in processes]])
    self.shape = dict(zip(mesh_lib.AXES, self.devices.shape))


@pytest.mark.parametrize('processes, me, expected', [
    ([[0], [0], [1], [1]], 1, mesh_lib.Feed((2, 3), 4, True)),
    ([[0], [1], [1], [0]], 0, mesh_lib.Feed((0, 3), 4, True)),  # as on a ring of two hosts
    ([[0, 1], [2, 3]], 0, mesh_lib.Feed((0,), 2, True)),
    ([[0, 1], [2, 3]], 3, mesh_lib.Feed((1,), 2, False)),  # the same rows as process 2
    ([[0, 1, 2, 3]], 2, mesh_lib.Feed((0,), 1, False)),
    ([[0, 0], [1, 1]], 1, mesh_lib.Feed((1,), 2, True)),
])
def test_a_process_feeds_the_rows_of_its_devices(monkeypatch, processes, me, expected):
  monkeypatch.setattr(jax, 'process_index', lambda: me)
  assert mesh_lib.feed(FakeMesh(processes)) == expected


def test_each_device_gets_its_own_rows():
  """Even in a mesh that takes its devices in another order."""
  devices = [jax.devices()[i] for i in (2, 0, 3, 1)]
  mesh = jax.sharding.Mesh(np.array(devices).reshape(1, 4, 1), mesh_lib.AXES)
  batch = np.arange(8 * 3).reshape(8, 3)
  placed = mesh_lib.put_batch(batch, mesh)
  np.testing.assert_array_equal(placed, batch)
  for shard in placed.addressable_shards:
    place = devices.index(shard.device)
    np.testing.assert_array_equal(shard.data, batch[2 * place:2 * place + 2])


def test_cpu_devices_share_the_memory_of_their_container(monkeypatch):
  monkeypatch.setattr(host, 'memory', lambda: 2**30)
  assert chip_figures.memory_limit(jax.devices()[0]) == 2**30 / jax.device_count()


def test_peak_flops_and_bandwidth_of_each_chip():
  class Device:
    def __init__(self, kind, core=0):
      self.device_kind, self.id, self.coords = kind, core, (0, 0, 0)

  assert chip_figures.chip_of(jax.devices()[:1]) is None
  assert chip_figures.chip_of([Device('TPU v5 lite')]).flops == 197e12
  for kind, flops, bandwidth in (
      ('H100 80GB HBM3', 989e12, 3350e9), ('H100 PCIe', 756e12, 2000e9),
      ('H100 NVL', 835e12, 3900e9), ('H200', 989e12, 4800e9), ('H200 NVL', 835e12, 4800e9),
      ('A100-SXM4-80GB', 312e12, 2039e9), ('A100 80GB PCIe', 312e12, 2039e9),
      ('A100-SXM4-40GB', 312e12, 1555e9)):
    chip = chip_figures.chip_of([Device(f'NVIDIA {kind}')])
    assert (chip.flops, chip.bandwidth) == (flops, bandwidth), kind
  assert chip_figures.chip_of([Device('NVIDIA H100 80GB HBM3 MIG 1g.10gb')]) is None
  # Two devices of one chip are half a chip each.
  cores = [Device('TPU7x', core) for core in (0, 1)]
  assert chip_figures.num_chips(cores) == 1
  assert chip_figures.chip_of(cores).flops == 2307e12 / 2
