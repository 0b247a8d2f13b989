"""The path of attention for a config, a row length and a platform, and its reason."""

from collections.abc import Iterable

from bert_jax.errors import UserError
from bert_jax.model import kernels
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.kernels import LANES
from bert_jax.parallel import sharding

# Shortest row for splash and cuDNN: below, the plain path is as fast and its weights are small.
_SHORTEST = 512
# Longest row for the fused kernel: its [L, L] weights fit several times into a TPU core's memory.
_LONGEST = 512
_BEST = {'tpu': ('fused', 'splash'), 'gpu': ('cudnn',), 'cuda': ('cudnn',)}
_PLATFORMS = {'fused': ('tpu', 'cpu'), 'splash': ('tpu', 'cpu'), 'cudnn': ('gpu', 'cuda')}


def _obstacle(config: BertConfig, kernel: str, length: int, platform: str) -> str:
  """Returns the reason why a kernel cannot be used; '' if it can."""
  heads = config.num_heads // sharding.parts('heads')
  if config.has_relative_scores:
    return f'{config.architecture} adds scores of relative positions'
  if platform not in _PLATFORMS[kernel]:
    return f'{kernel} is not for {platform}'
  if config.biases_attention:
    return f'no kernel adds the biases of {config.architecture}'
  if kernel == 'fused' and length > _LONGEST:
    return f'{length} is above {_LONGEST}'
  if kernel in ('fused', 'splash') and length % LANES:
    return f'{length} is no multiple of {LANES}'
  if kernel == 'fused' and (not heads or LANES % config.head_size
                            or heads * config.head_size % LANES):
    return f'{heads} heads of {config.head_size} fill no blocks of {LANES}'
  if kernel != 'fused' and config.attention_dropout:
    return f'attention_dropout={config.attention_dropout} (0 allows {kernel})'
  if config.attention == 'auto' and kernel != 'fused' and length < _SHORTEST:
    return f'{kernel} gains nothing below {_SHORTEST}'
  if kernel == 'cudnn' and config.dtype == 'float32':
    return f'dtype={config.dtype} (bfloat16 allows {kernel})'
  return ''


def choose_path(config: BertConfig, length: int, platform: str = '') -> tuple[str, str]:
  """Chooses the path for rows of `length`.

  Args:
    config: its `attention` is auto or names a path.
    length: L.
    platform: the platform that it runs on; '' = the one of the current trace.

  Returns:
    (xla, fused, splash or cudnn; the reason).

  Raises:
    UserError: the kernel that `config.attention` names cannot be used.
  """
  platform, requested = platform or kernels.platform(), config.attention
  if requested == 'xla':
    return 'xla', 'asked for'
  if requested != 'auto':
    obstacle = _obstacle(config, requested, length, platform)
    if obstacle:
      raise UserError(f'model.attention={requested} cannot be had: {obstacle}')
    return requested, 'asked for'
  obstacle = f'there is no kernel for {platform}'
  for kernel in _BEST.get(platform, ()):
    obstacle = _obstacle(config, kernel, length, platform)
    if not obstacle:
      return kernel, 'it holds no weights'
  return 'xla', obstacle


def describe(config: BertConfig, lengths: Iterable[int], platform: str = '') -> str:
  """Returns the path and its reason for rows of each length, for people."""
  lengths_of = {}
  for length in dict.fromkeys(lengths):
    lengths_of.setdefault(choose_path(config, length, platform), []).append(str(length))
  return '; '.join(f'{path} for rows of {" and ".join(rows)}: {reason}'
                   for (path, reason), rows in lengths_of.items())
