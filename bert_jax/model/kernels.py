"""Attention kernels that never hold the [L, L] weights, and when they are the right choice.

Only the fused one can drop attention weights: beyond its lengths and off TPUs a recipe with
attention dropout takes the plain path.
"""

from collections.abc import Iterable
import functools

import jax
import jax.numpy as jnp

from bert_jax.errors import UserError
from bert_jax.model.bert_config import BertConfig
from bert_jax.parallel import sharding

SHORTEST = 512  # for splash and cuDNN: below, the plain path is as fast and holds little
LONGEST = 512  # whose [L, L] weights fit into a TPU core's memory several times
LANES = 128  # of a TPU's registers: lengths are multiples of it, and so is what heads fill
_BLOCK = 512  # of queries and of keys that splash holds at a time
_BEST = {'tpu': ('fused', 'splash'), 'gpu': ('cudnn',), 'cuda': ('cudnn',)}
_PLATFORMS = {'fused': ('tpu', 'cpu'), 'splash': ('tpu', 'cpu'), 'cudnn': ('gpu', 'cuda', 'rocm')}
_ROWS = ('batch', 'seq')
_FLAT = ('batch', 'seq', 'heads')
_OUT = ('batch', 'seq', 'heads', 'kv')


def platform() -> str:
  """What the program that is being traced is compiled for."""
  mesh = jax.sharding.get_abstract_mesh()
  device = None if mesh.empty else mesh.abstract_device
  return device.platform if device else jax.default_backend()


def _obstacle(config: BertConfig, kernel: str, length: int, where: str) -> str:
  """Why a kernel cannot do it; '' if it can."""
  heads = config.num_heads // sharding.parts('heads')
  if where not in _PLATFORMS[kernel]:
    return f'{kernel} is not for {where}'
  if kernel == 'fused' and length > LONGEST:
    return f'{length} is above {LONGEST}'
  if kernel in ('fused', 'splash') and length % LANES:
    return f'{length} is no multiple of {LANES}'
  if kernel == 'fused' and (not heads or LANES % config.head_size
                            or heads * config.head_size % LANES):
    return f'{heads} heads of {config.head_size} fill no blocks of {LANES}'
  if kernel != 'fused' and config.attention_dropout:
    return f'attention_dropout={config.attention_dropout} (0 allows {kernel})'
  if config.attention == 'auto' and kernel != 'fused' and length < SHORTEST:
    return f'{kernel} gains nothing below {SHORTEST}'
  if kernel == 'cudnn' and config.dtype == 'float32':
    return f'dtype={config.dtype} (bfloat16 allows {kernel})'
  return ''


def chosen(config: BertConfig, length: int, where: str = '') -> tuple[str, str]:
  """Which path attention takes in rows of `length`, and why.

  Args:
    config: its `attention` is auto, or what is asked for.
    length: L.
    where: the platform that it runs on; '' = what is being traced for.

  Returns:
    (xla, fused, splash or cudnn; the reason).

  Raises:
    UserError: the kernel that was asked for cannot do it.
  """
  where, asked = where or platform(), config.attention
  if asked == 'xla':
    return 'xla', 'asked for'
  if asked == 'auto' and where not in _BEST:
    return 'xla', f'there is no kernel for {where}'
  for kernel in _BEST[where] if asked == 'auto' else (asked,):
    obstacle = _obstacle(config, kernel, length, where)
    if not obstacle:
      return kernel, 'it holds no weights' if asked == 'auto' else 'asked for'
  if asked != 'auto':
    raise UserError(f'model.attention={asked} cannot be had: {obstacle}')
  return 'xla', obstacle


def describe(config: BertConfig, lengths: Iterable[int], where: str = '') -> str:
  """The path and the reason for rows of each length, for people."""
  found = {}
  for length in dict.fromkeys(lengths):
    found.setdefault(chosen(config, length, where), []).append(str(length))
  return '; '.join(f'{path} for rows of {" and ".join(rows)}: {why}'
                   for (path, why), rows in found.items())


def fused(qkv: jax.Array, pair_index: jax.Array, width: int, rate: float = 0.0,
          random: jax.Array | None = None) -> jax.Array:
  """The fused kernel, each chip on its own rows and heads.

  Args:
    qkv: [B, L, H * 3 * K], query, key and value of each head side by side.
    pair_index: as of `splash`.
    width: K.
    rate: share of the weights that is dropped.
    random: the key by which they are drawn; None = nothing is dropped.

  Returns:
    [B, L, H * K] in the dtype of `qkv`.
  """
  from bert_jax.model import fused_attention  # no other path needs Pallas

  words = jnp.zeros(2, jnp.uint32) if random is None else jax.random.key_data(random)
  rows = jnp.arange(qkv.shape[0], dtype=jnp.uint32)
  heads = jnp.arange(qkv.shape[2] // (3 * width), dtype=jnp.uint32)
  local = functools.partial(fused_attention.attend, width=width, interpret=platform() != 'tpu',
                            rate=rate if random is not None else 0.0)
  return sharding.on_each_chip(local, (_FLAT, _ROWS, (None,), ('batch',), ('heads',)), _FLAT)(
      qkv, pair_index, words, rows, heads)


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
  block = next(b for b in (_BLOCK, 384, 256, LANES) if length % b == 0)
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
  return sharding.on_each_chip(local, (_OUT, _OUT, _OUT, _ROWS), _OUT)(
      scaled, key, value, pair_index)


def cudnn(query: jax.Array, key: jax.Array, value: jax.Array, pair_index: jax.Array) -> jax.Array:
  """cuDNN's fused attention on NVIDIA GPUs; arguments and result as of `splash`."""
  mask = (pair_index[:, None, :, None] == pair_index[:, None, None, :])  # [B, 1, L, L]
  return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation='cudnn')
