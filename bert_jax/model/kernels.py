"""Attention kernels that never hold the [L, L] weights, and when they are the right choice.

None of them can drop attention weights: a recipe with attention dropout takes the plain path.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from bert_jax.errors import UserError
from bert_jax.model.config import BertConfig
from bert_jax.parallel import sharding

# Below this the plain path is as fast, and what it holds is small.
SHORTEST = 512
_LANES = 128  # of a TPU: lengths are multiples of it
_BLOCK = 512  # of queries and of keys that a TPU kernel holds at a time
_PLATFORMS = {'splash': ('tpu', 'cpu'), 'cudnn': ('gpu', 'cuda', 'rocm')}


def platform() -> str:
  """What the program that is being traced is compiled for."""
  mesh = jax.sharding.get_abstract_mesh()
  device = None if mesh.empty else mesh.abstract_device
  return device.platform if device else jax.default_backend()


def chosen(config: BertConfig, length: int, where: str = '') -> tuple[str, str]:
  """Which path attention takes in rows of `length`, and why.

  Args:
    config: its `attention` is auto, or what is asked for.
    length: L.
    where: the platform that it runs on; '' = what is being traced for.

  Returns:
    (xla, splash or cudnn; the reason).

  Raises:
    UserError: the kernel that was asked for cannot do it.
  """
  where = where or platform()
  kernel = config.attention
  if kernel == 'xla':
    return 'xla', 'asked for'
  if kernel == 'auto':
    kernel = {'tpu': 'splash', 'gpu': 'cudnn', 'cuda': 'cudnn'}.get(where, '')
    if not kernel:
      return 'xla', f'there is no kernel for {where}'
    if length < SHORTEST:
      return 'xla', f'{kernel} gains nothing below {SHORTEST}'
  obstacle = ''
  if config.attention_dropout:
    obstacle = f'attention_dropout={config.attention_dropout} (0 allows {kernel})'
  elif where not in _PLATFORMS[kernel]:
    obstacle = f'{kernel} is not for {where}'
  elif kernel == 'splash' and length % _LANES:
    obstacle = f'{length} is no multiple of {_LANES}'
  elif kernel == 'cudnn' and config.dtype == 'float32':
    obstacle = f'dtype={config.dtype} (bfloat16 allows {kernel})'
  if not obstacle:
    return kernel, ('it holds no weights' if config.attention == 'auto' else 'asked for')
  if config.attention != 'auto':
    raise UserError(f'model.attention={config.attention} cannot be had: {obstacle}')
  return 'xla', obstacle


def describe(config: BertConfig, lengths: Iterable[int], where: str) -> str:
  """The path and the reason for rows of each length, for people."""
  found = {}
  for length in dict.fromkeys(lengths):
    found.setdefault(chosen(config, length, where), []).append(str(length))
  return '; '.join(f'{path} for rows of {" and ".join(rows)}: {why}'
                   for (path, why), rows in found.items())


def attend(config: BertConfig, query: jax.Array, key: jax.Array, value: jax.Array,
           pair_index: jax.Array) -> jax.Array:
  """Attention by the kernel that is chosen; arguments and result as of `splash`."""
  path, _ = chosen(config, query.shape[1])
  return {'splash': splash, 'cudnn': cudnn}[path](query, key, value, pair_index)


def splash(query: jax.Array, key: jax.Array, value: jax.Array,
           pair_index: jax.Array) -> jax.Array:
  """Pallas splash attention, each chip on its own rows and heads.

  Off a TPU it is interpreted: slow, for tests.

  Args:
    query, key, value: [B, L, H, K].
    pair_index: [B, L] int32; a token attends to those of its own number. Padding attends to
      padding, so that its output is no one's.

  Returns:
    [B, L, H, K] in the dtype of `query`.
  """
  from jax.experimental.pallas.ops.tpu import splash_attention as library

  length, interpret = query.shape[1], platform() != 'tpu'
  block = next(b for b in (_BLOCK, 384, 256, _LANES) if length % b == 0)
  blocks = library.BlockSizes(
      block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block,
      use_fused_bwd_kernel=True)

  def local(query, key, value, pair_index):
    heads = query.shape[2]
    mask = library.MultiHeadMask([library.FullMask((length, length))] * heads)
    kernel = library.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=blocks,
                                     interpret=interpret)

    def row(query, key, value, segments):
      query, key, value = (jnp.moveaxis(x, 1, 0) for x in (query, key, value))  # [H, L, K]
      out = kernel(query, key, value, library.SegmentIds(segments, segments))
      return jnp.moveaxis(out, 0, 1)

    return jax.vmap(row)(query, key, value, pair_index)

  scaled = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
  return sharding.over_rows_and_heads(local)(scaled, key, value, pair_index)


def cudnn(query: jax.Array, key: jax.Array, value: jax.Array, pair_index: jax.Array) -> jax.Array:
  """cuDNN's fused attention on NVIDIA GPUs; arguments and result as of `splash`."""
  mask = (pair_index[:, None, :, None] == pair_index[:, None, None, :])  # [B, 1, L, L]
  return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation='cudnn')
