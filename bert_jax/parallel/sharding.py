"""Maps logical axes to mesh axes: only this file knows how a preset shards the model.

Modules name the logical axes of their arrays ('embed', 'heads', ...); a preset maps each
axis to the mesh.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import math
from typing import Any

from flax import linen as nn
import jax
from jax.sharding import Mesh

from bert_jax.errors import require, require_choice
from bert_jax.parallel.mesh import BATCH_AXES
from bert_jax.runtime import platforms

Rules = tuple[tuple[str, Any], ...]

# The axes of parameters that a preset shards over the data axis or the model axis.
# Activations have other names ('batch', 'seq', 'embed_act'): the 'embed' axis of a
# parameter may be sharded over 'data' while the width of an activation is whole.
_OVER_DATA = {'embed': 'data'}
_OVER_MODEL = {'vocab': 'model', 'heads': 'model', 'mlp': 'model'}
PRESETS = {'dp': {}, 'fsdp': _OVER_DATA, 'tp': _OVER_MODEL,
           'fsdp_tp': _OVER_DATA | _OVER_MODEL}
# The TPU compiler may gather parameters piece by piece, in a loop around small matrix
# products. For BERT-large with sharding=fsdp on v5e:4x4 this doubles the step time that
# the compiler estimates. Only products above this size (MiB) become such loops.
_TPU_OPTIONS = {'xla_jf_spmd_threshold_for_windowed_einsum_mib': '1000000'}
_LOGICAL_AXES = ('layers', 'vocab', 'embed', 'position', 'segment', 'norm', 'heads', 'kv',
                 'mlp', 'pooled', 'labels', 'seq', 'embed_act')


def rules(preset: str) -> Rules:
  """The Linen logical axis rules of a preset: dp, fsdp, tp or fsdp_tp.

  dp       replicates all parameters
  fsdp     shards parameters and moments over mesh.data along the width
  tp       shards heads, feed-forward and vocabulary over mesh.model
  fsdp_tp  does both

  With mesh.model=1, tp is dp and fsdp_tp is fsdp. mesh.replica shards only rows.
  """
  require_choice('sharding', preset, PRESETS)
  axes = {name: None for name in _LOGICAL_AXES} | PRESETS[preset]
  return (('batch', BATCH_AXES), *axes.items())


def shardings(abstract_boxed: Any, mesh: Mesh, preset: str) -> Any:
  """NamedShardings of a tree from `jax.eval_shape`, by the logical axes of its boxes."""
  specs = nn.get_partition_spec(abstract_boxed)
  return nn.logical_to_mesh_sharding(specs, mesh, rules(preset))


def check_divides(tree: Any, shardings: Any, preset: str):
  """Raises UserError if a mesh axis does not divide the dimension that it shards."""
  # JAX's own message has neither the name of the parameter nor the flag.
  leaves = zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(shardings))
  for (path, x), sharding in leaves:
    name = jax.tree_util.keystr(path, simple=True, separator='/').removeprefix('params/')
    for size, axes in zip(x.shape, sharding.spec):
      axes = (axes,) if isinstance(axes, str) else axes or ()
      parts_of = math.prod(sharding.mesh.shape[axis] for axis in axes)
      require(size % parts_of == 0,
              f'sharding={preset} splits {name} {tuple(x.shape)} into {parts_of} '
              f'({" x ".join(f"mesh.{axis}" for axis in axes)}), which does not divide '
              f'{size}: choose another mesh or sharding')


@contextlib.contextmanager
def in_context(mesh: Mesh, preset: str) -> Iterator[None]:
  """Sets the mesh and the rules of the preset for the code inside the context."""
  with jax.set_mesh(mesh), nn.logical_axis_rules(rules(preset)):
    yield


def with_mesh(function, mesh: Mesh, preset: str, **jit_options):
  """`jax.jit(function)` that traces and runs with the mesh and the preset's rules.

  Without them Linen's `with_logical_constraint` silently does nothing.
  """

  # The rules are needed only while tracing, the mesh also at each call.
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
  """The platform that the current trace compiles for."""
  mesh = jax.sharding.get_abstract_mesh()
  device = None if mesh.empty else mesh.abstract_device
  return device.platform if device else jax.default_backend()


def has_triton() -> bool:
  """True if the current trace compiles for NVIDIA GPUs that run Triton kernels."""
  return platform() in platforms.GPU and not platforms.triton_obstacle()


def num_shards(name: str) -> int:
  """The number of shards of a logical axis on the mesh in context; 1 without a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  axis = None if mesh.empty else nn.logical_to_mesh_axes((name,))[0]
  return mesh.shape[axis] if axis else 1


def on_each_chip(function: Callable[..., jax.Array],
                 inputs: Sequence[tuple[str | None, ...]],
                 output: tuple[str, ...] | list[tuple[str, ...]]):
  """Makes `function` run on each chip, on the chip's shards of arguments and result.

  XLA cannot partition a Pallas kernel itself. Without a mesh in context this returns
  `function`.

  Args:
    function: maps arrays to arrays; an argument or result may be None.
    inputs: the logical axes of each argument.
    output: the logical axes of the result, or a list of the axes of several results.
  """
  if jax.sharding.get_abstract_mesh().empty:
    return function
  axes = nn.logical_to_mesh_axes
  return jax.shard_map(
      function, in_specs=tuple(map(axes, inputs)), check_vma=False,
      out_specs=tuple(map(axes, output)) if isinstance(output, list) else axes(output))


def batch_divisor(mesh: Mesh) -> int:
  """The number of shards of a batch."""
  return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
