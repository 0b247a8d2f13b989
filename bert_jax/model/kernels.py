"""Attention kernels of JAX's own libraries, which never hold the [L, L] weights."""

import jax
import jax.numpy as jnp

from bert_jax.parallel import sharding

# Score of a token that must not be seen. Finite: a softmax over padding alone gives no NaN.
MASKED = -1e9
LANES = 128  # width of a TPU's registers: the TPU kernels need row lengths that are multiples of it
_SPLASH_BLOCKS = (512, 384, 256, LANES)  # queries, and keys, that splash holds at a time
_ROWS = ('batch', 'seq')
_HEADS = ('batch', 'seq', 'heads', 'kv')


def platform() -> str:
  """Returns the platform for which the current trace is compiled."""
  mesh = jax.sharding.get_abstract_mesh()
  device = None if mesh.empty else mesh.abstract_device
  return device.platform if device else jax.default_backend()


def splash(query: jax.Array, key: jax.Array, value: jax.Array,
           segment_ids: jax.Array) -> jax.Array:
  """Pallas splash attention, each chip on its own rows and heads.

  Off a TPU it is interpreted: slow, for tests.

  Args:
    query, key, value: [B, L, H, K].
    segment_ids: [B, L] int32. A token attends to the tokens with its own number; padding attends to
      padding, and nothing reads the output there.

  Returns:
    [B, L, H, K] in the dtype of `query`.
  """
  from jax.experimental.pallas.ops.tpu import splash_attention as library  # Pallas imports slowly

  length, interpret = query.shape[1], platform() != 'tpu'
  block = next(size for size in _SPLASH_BLOCKS if length % size == 0)
  blocks = library.BlockSizes(
      block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block,
      use_fused_bwd_kernel=True)

  def local(query, key, value, segment_ids):
    heads = query.shape[2]
    mask = library.MultiHeadMask([library.FullMask((length, length))] * heads)
    kernel = library.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=blocks,
                                     interpret=interpret)

    def row(query, key, value, segments):
      query, key, value = (jnp.moveaxis(x, 1, 0) for x in (query, key, value))  # [H, L, K]
      out = kernel(query, key, value, library.SegmentIds(segments, segments))
      return jnp.moveaxis(out, 0, 1)  # [L, H, K]

    return jax.vmap(row)(query, key, value, segment_ids)

  scaled = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
  return sharding.on_each_chip(local, (_HEADS, _HEADS, _HEADS, _ROWS), _HEADS)(
      scaled, key, value, segment_ids)


def cudnn(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array) -> jax.Array:
  """cuDNN's fused attention on NVIDIA GPUs; arguments and result as of `splash`."""
  mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]  # [B, 1, L, L]
  return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation='cudnn')
