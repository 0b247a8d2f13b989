"""Logical axis names to mesh axes: the only file that knows how a preset splits the model.

The modules name the meaning of an axis ('embed', 'heads', ...); a preset maps it to the mesh.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import math
from typing import Any

from flax import linen as nn
import jax
from jax.sharding import Mesh

from bert_jax import errors
from bert_jax.errors import UserError
from bert_jax.parallel.mesh import BATCH_AXES

Rules = tuple[tuple[str, Any], ...]

# Axes of parameters that a preset splits over the data axis / the model axis. Activations have
# names of their own ('batch', 'seq', 'embed_act'), because 'embed' of a parameter may be split over
# 'data' while the width of an activation is whole.
_OVER_DATA = {'embed': 'data'}
_OVER_MODEL = {'vocab': 'model', 'heads': 'model', 'mlp': 'model'}
PRESETS = {'dp': {}, 'fsdp': _OVER_DATA, 'tp': _OVER_MODEL,
           'fsdp_tp': _OVER_DATA | _OVER_MODEL}
# The TPU compiler may gather parameters piece by piece, in a loop around small products. For
# BERT-large, sharding=fsdp, on v5e:4x4 it expects twice the time for it. Only products above this
# size (MiB) become such loops.
_TPU_OPTIONS = {'xla_jf_spmd_threshold_for_windowed_einsum_mib': '1000000'}
_LOGICAL_AXES = ('layers', 'vocab', 'embed', 'position', 'segment', 'norm', 'heads', 'kv',
                 'mlp', 'pooled', 'labels', 'seq', 'embed_act')


def rules(preset: str) -> Rules:
  """The Linen logical axis rules of a preset: dp, fsdp, tp or fsdp_tp.

  dp       every parameter whole on every device
  fsdp     parameters and moments split over mesh.data along the width
  tp       heads, feed-forward and vocabulary split over mesh.model
  fsdp_tp  both

  With mesh.model=1, tp is dp and fsdp_tp is fsdp. mesh.replica only ever splits rows.
  """
  errors.require_choice('sharding', preset, PRESETS)
  axes = {name: None for name in _LOGICAL_AXES} | PRESETS[preset]
  return (('batch', BATCH_AXES), *axes.items())


def shardings(abstract_boxed: Any, mesh: Mesh, preset: str) -> Any:
  """NamedShardings of a tree from `jax.eval_shape`, by the logical axes of its boxes."""
  specs = nn.get_partition_spec(abstract_boxed)
  return nn.logical_to_mesh_sharding(specs, mesh, rules(preset))


def check_divides(tree: Any, shardings: Any, preset: str):
  """Raises UserError if a mesh axis does not divide the dimension that it would split."""
  leaves = zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(shardings))
  for (path, x), sharding in leaves:
    for size, axes in zip(x.shape, sharding.spec):
      axes = (axes,) if isinstance(axes, str) else axes or ()
      parts_of = math.prod(sharding.mesh.shape[axis] for axis in axes)
      if size % parts_of:
        raise UserError(
            f'sharding={preset} splits {path[-1].key} {tuple(x.shape)} into {parts_of} '
            f'({" x ".join(f"mesh.{axis}" for axis in axes)}), which does not divide {size}: '
            'choose another mesh or sharding')


@contextlib.contextmanager
def in_context(mesh: Mesh, preset: str) -> Iterator[None]:
  """Sets the mesh and the preset's rules for the code inside."""
  with jax.set_mesh(mesh), nn.logical_axis_rules(rules(preset)):
    yield


def with_mesh(function, mesh: Mesh, preset: str, **jit_options):
  """`jax.jit(function)`, traced and run with the mesh and the preset's rules in context.

  Without them Linen's `with_logical_constraint` silently does nothing.
  """

  def traced(*args):
    with nn.logical_axis_rules(rules(preset)):
      return function(*args)

  options = _TPU_OPTIONS if mesh.devices.flat[0].platform == 'tpu' else None
  jitted = jax.jit(traced, compiler_options=options, **jit_options)

  def call(*args):
    with jax.set_mesh(mesh):
      return jitted(*args)

  def lower(*args):
    with jax.set_mesh(mesh):
      return jitted.lower(*args)

  call.lower = lower
  return call


def platform() -> str:
  """Returns the platform for which the current trace is compiled."""
  mesh = jax.sharding.get_abstract_mesh()
  device = None if mesh.empty else mesh.abstract_device
  return device.platform if device else jax.default_backend()


def parts(name: str) -> int:
  """The number of parts into which the mesh in context splits a logical axis; 1 without a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  axis = None if mesh.empty else nn.logical_to_mesh_axes((name,))[0]
  return mesh.shape[axis] if axis else 1


def on_each_chip(function: Callable[..., jax.Array], inputs: Sequence[tuple[str | None, ...]],
                 output: tuple[str, ...]):
  """Runs `function` on each chip, on its own part of the arguments and of the result.

  The compiler cannot split a kernel itself. Without a mesh in context, returns `function`.

  Args:
    function: of arrays, to one array.
    inputs: the logical axes of each argument.
    output: the logical axes of the result.
  """
  if jax.sharding.get_abstract_mesh().empty:
    return function
  return jax.shard_map(function, in_specs=tuple(map(nn.logical_to_mesh_axes, inputs)),
                       out_specs=nn.logical_to_mesh_axes(output), check_vma=False)


def batch_divisor(mesh: Mesh) -> int:
  """The number of parts into which the mesh splits the rows of a batch."""
  return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
