"""The attention kernels, and the choice among them. No kernel stores the [L, L] weights.

A new kernel is one file and one line in ALL. Its file has `obstacle`, which says why a
model cannot use it, and `attend`, which computes attention
(`bert_jax.model.attention.Attend`). Splash and cuDNN come with JAX, and their wrappers
are short enough to be in this file.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bert_jax.data.tokens import Tokens
from bert_jax.errors import require, require_choice
from bert_jax.model.attention import Attend, Dropout, Heads
from bert_jax.model.bert_config import BertConfig
from bert_jax.parallel import sharding
from bert_jax.runtime import platforms

_SPLASH_BLOCKS = (512, 384, 256, 128)  # queries, and keys, in a block of splash
_ROWS = ('batch', 'seq')
_HEADS = ('batch', 'seq', 'heads', 'kv')


class Kernel(NamedTuple):
  """A kernel, and when a model can and should use it."""

  obstacle: Callable[[BertConfig, int, int], str]  # (config, L, H of a chip) -> '' or why
  attend: Callable[..., jax.Array]  # see `Attend.kernel`
  platforms: tuple[str, ...]  # where `auto` may take it
  drops: bool = False  # computes attention dropout
  has_windows: bool = False  # computes local attention
  has_causal: bool = False  # computes causal rows
  slow_on: tuple[str, ...] = ()  # where Pallas interprets it: slow, for tests
  # The shortest row for `auto`. In shorter rows XLA is as fast and its weights are small.
  shortest: int = 0


def _fused_obstacle(config: BertConfig, length: int, heads: int) -> str:
  from bert_jax.model import fused_attention  # imports Pallas, which is slow

  return fused_attention.obstacle(config, length, heads)


def _fused(heads: Heads, text_ids: jax.Array, dropout: Dropout) -> jax.Array:
  from bert_jax.model import fused_attention  # imports Pallas, which is slow

  key = dropout.key() if dropout.rate else None
  return fused_attention.attend(
      heads.side_by_side(), text_ids, heads.query.shape[-1], dropout.rate, key)


def _splash_obstacle(config: BertConfig, length: int, heads: int) -> str:
  smallest = _SPLASH_BLOCKS[-1]
  return (f'rows of {length} tokens are not a multiple of {smallest}'
          if length % smallest else '')


def splash(heads: Heads, text_ids: jax.Array, dropout: Dropout) -> jax.Array:
  """Pallas splash attention, each chip on its rows and heads.

  Off TPU, Pallas interprets the kernel, which is slow: for tests only.

  Args:
    heads: query, key and value.
    text_ids: [B, L] int32. A token attends to the tokens with the same id. Padding
      attends to padding, and nothing reads its output.
    dropout: of rate 0.

  Returns:
    [B, L, H, K] in the dtype of the query.
  """
  from jax.experimental.pallas.ops.tpu import splash_attention as library  # slow import

  query, key, value, *_ = heads
  length, interpret = query.shape[1], sharding.platform() != 'tpu'
  block = next(size for size in _SPLASH_BLOCKS if length % size == 0)
  # The fused backward kernel computes the weights once for all three gradients.
  blocks = library.BlockSizes(block_q=block, block_kv=block, block_q_dkv=block,
                              block_kv_dkv=block, use_fused_bwd_kernel=True)

  def local(query, key, value, text_ids):
    # On a model axis, each chip has only a part of the heads.
    mask = library.MultiHeadMask([library.FullMask((length, length))] * query.shape[2])
    kernel = library.make_splash_mha(mask, head_shards=1, q_seq_shards=1,
                                     block_sizes=blocks, interpret=interpret)

    def row(query, key, value, text_ids):
      query, key, value = (jnp.moveaxis(x, 1, 0) for x in (query, key, value))  # [H, L, K]
      out = kernel(query, key, value, library.SegmentIds(text_ids, text_ids))
      return jnp.moveaxis(out, 0, 1)  # [L, H, K]

    return jax.vmap(row)(query, key, value, text_ids)

  # The kernel does not scale the scores.
  scaled = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
  return sharding.on_each_chip(local, (_HEADS, _HEADS, _HEADS, _ROWS), _HEADS)(
      scaled, key, value, text_ids)


def _cudnn_obstacle(config: BertConfig, length: int, heads: int) -> str:
  if config.dtype == 'float32':
    return 'dtype=float32 (bfloat16 allows cudnn)'
  capability = platforms.compute_capability()
  if platforms.is_amd() or capability < platforms.OF_BFLOAT16:
    return 'cudnn needs an NVIDIA GPU that multiplies bfloat16'
  # JAX raises NotImplementedError for these sizes.
  widest = 256 if capability >= 9 else 128
  if config.head_size % 8 or config.head_size > widest:
    return f'heads of {config.head_size} are not a multiple of 8, at most {widest}'
  return f'rows of {length} tokens are odd' if length % 2 else ''


def cudnn(heads: Heads, text_ids: jax.Array, dropout: Dropout) -> jax.Array:
  """cuDNN's fused attention on NVIDIA GPUs; for arguments and result see `splash`."""
  mask = text_ids[:, None, :, None] == text_ids[:, None, None, :]  # [B, 1, L, L]
  return jax.nn.dot_product_attention(
      heads.query, heads.key, heads.value, mask=mask, implementation='cudnn')


def _triton_obstacle(config: BertConfig, length: int, heads: int) -> str:
  if obstacle := platforms.triton_obstacle():
    return obstacle
  from bert_jax.model import gpu_attention  # imports Pallas, which is slow

  return gpu_attention.obstacle(config, length, heads)


def _triton(*arguments: Any, **options: Any) -> jax.Array:
  from bert_jax.model import gpu_attention  # imports Pallas, which is slow

  return gpu_attention.attend(*arguments, **options)


# The best first: `auto` takes the first one that a model can use.
ALL = {'fused': Kernel(_fused_obstacle, _fused, ('tpu',), drops=True, slow_on=('cpu',)),
       'splash': Kernel(_splash_obstacle, splash, ('tpu',), slow_on=('cpu',),
                        shortest=512),
       'cudnn': Kernel(_cudnn_obstacle, cudnn, platforms.GPU, shortest=512),
       'triton': Kernel(_triton_obstacle, _triton, platforms.GPU, drops=True,
                        has_windows=True, has_causal=True, slow_on=('cpu',))}
CHOICES = ('auto', 'xla', *ALL)  # of `model.attention`
# Kinds of rows that few or no kernels compute.
CAUSAL = 'causal rows (masking.causal_rows)'
HIDDEN = 'tokens that no other token sees (data.query_expansion)'


def _obstacle(config: BertConfig, name: str, length: int, platform: str,
              special: str) -> str:
  """Returns the reason why a kernel cannot be used; '' if it can."""
  kernel = ALL[name]
  if config.kernel_obstacle:
    return config.kernel_obstacle
  if special and not (kernel.has_causal and special == CAUSAL):
    return f'{name} does not compute {special}'
  if platform not in (*kernel.platforms, *kernel.slow_on):
    return f'{name} is not for {platform}'
  if config.attention == 'auto' and length < kernel.shortest:
    return f'{name} is only faster in rows of {kernel.shortest} tokens or more'
  parts = sharding.num_shards('heads')
  # `mesh.check_fits` sees only the main model: an ELECTRA generator has fewer heads.
  if config.num_heads % parts:
    return f'{config.num_heads} heads do not divide among {parts} devices (mesh.model)'
  heads = config.num_heads // parts
  obstacle = kernel.obstacle(config, length, heads)
  # This check comes last, so that its remedy, no dropout, is enough to get the kernel.
  if not obstacle and config.attention_dropout and not kernel.drops:
    return f'attention_dropout={config.attention_dropout} (0 allows {name})'
  return obstacle


def choose_path(config: BertConfig, length: int, platform: str = '',
                special: str = '') -> tuple[str, str]:
  """Chooses how rows of `length` attend.

  Args:
    config: its `attention` is auto or names a path.
    length: L.
    platform: the platform of the devices; '' = the platform of the current trace.
    special: CAUSAL or HIDDEN, the kind of the rows; '' = neither.

  Returns:
    (xla or the name of a kernel; the reason).

  Raises:
    UserError: the kernel that `config.attention` names cannot be used.
  """
  platform, requested = platform or sharding.platform(), config.attention
  require_choice('model.attention', requested, CHOICES)
  if requested == 'xla':
    return 'xla', 'asked for'
  if requested != 'auto':
    obstacle = _obstacle(config, requested, length, platform, special)
    require(not obstacle, f'model.attention={requested} is not available: {obstacle}')
    return requested, 'asked for'
  obstacle = f'no kernel supports {platform}'
  names = [name for name, kernel in ALL.items() if platform in kernel.platforms]
  if config.has_windows:  # first the kernels that compute the local layers too
    names.sort(key=lambda name: not ALL[name].has_windows)
  for name in names:
    obstacle = _obstacle(config, name, length, platform, special)
    if not obstacle:
      return name, 'it does not store the attention weights'
  return 'xla', obstacle


def choose(config: BertConfig, tokens: Tokens) -> Attend:
  """Returns the `Attend` that `choose_path` chooses for these rows; raises UserError."""
  special = CAUSAL if tokens.causal is not None else ''
  special = HIDDEN if tokens.hidden is not None else special
  name, _ = choose_path(config, tokens.ids.shape[1], special=special)
  if name not in ALL:
    return Attend()
  return Attend(ALL[name].attend, kernel_has_windows=ALL[name].has_windows)


def describe(config: BertConfig, lengths: Iterable[int], platform: str = '',
             special: str = '') -> str:
  """Describes in one line, for logs, how rows of each length attend and why."""
  lengths_of = {}
  for length in dict.fromkeys(lengths):
    path = choose_path(config, length, platform, special)
    lengths_of.setdefault(path, []).append(str(length))
  return '; '.join(f'{path} for rows of {" and ".join(rows)}: {reason}'
                   for (path, reason), rows in lengths_of.items())
