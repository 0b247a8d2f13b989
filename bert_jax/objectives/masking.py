"""Masking for masked language modelling, on the device, inside the jitted step.

Per pair, max(1, round(rate * n)) of its n ordinary tokens are drawn without replacement; then each
drawn token independently becomes [MASK], a random ordinary token, or stays itself. Every row has a
key of its own, folded from (seed, step) and the row's global number, so the masks are the same on
every mesh and in every split into microbatches, and no chip draws another chip's.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bert_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class MaskingConfig:
  """The masking rule of BERT (Devlin et al. 2019, section 3.1)."""

  rate: float = 0.15  # share of the ordinary tokens that are predicted
  replace_mask: float = 0.8  # of those: share replaced by [MASK]
  replace_random: float = 0.1  # share replaced by a random ordinary token; the rest stay
  max_predictions: int = 0  # most predictions in a row (M); 0 = what the rate can ask for

  def __post_init__(self):
    if not 0 < self.rate < 1:
      raise UserError(f'masking.rate={self.rate} must lie in (0, 1)')
    if (min(self.replace_mask, self.replace_random) < 0
        or self.replace_mask + self.replace_random > 1 + 1e-9):
      raise UserError(f'masking.replace_mask={self.replace_mask} and masking.replace_random='
                      f'{self.replace_random} must be shares that sum to at most 1')
    if self.max_predictions < 0:
      raise UserError(f'masking.max_predictions={self.max_predictions} must not be negative')

  def predictions(self, max_len: int, pairs: int = 1) -> int:
    """M: the static number of predicted positions in a row of `max_len` with `pairs` pairs."""
    if self.max_predictions:
      return min(self.max_predictions, max_len)
    # A pair of n tokens asks for at most rate * n + 1/2, or for 1.
    return min(math.ceil(self.rate * max_len) + pairs // 2, max_len)


class Masked(NamedTuple):
  """Masked rows and what is to be predicted in them."""

  ids: jax.Array  # [B, L] int32, the corrupted input
  positions: jax.Array  # [B, M] int32, ascending; 0 where unused
  targets: jax.Array  # [B, M] int32, the original tokens
  weights: jax.Array  # [B, M] float32, 1 where there is something to predict, else 0


def is_special(ids: jax.Array, special_ids: tuple[int, ...]) -> jax.Array:
  """True where a token is one of the special ones (same shape as `ids`, bool)."""
  return jnp.isin(ids, jnp.asarray(special_ids))


def random_ordinary(key: jax.Array, shape: tuple[int, ...], vocab_size: int,
                    special_ids: tuple[int, ...]) -> jax.Array:
  """Token ids drawn uniformly from the vocabulary without its special tokens: [shape] int32."""
  ids = jax.random.randint(key, shape, 0, vocab_size - len(special_ids))
  for special in sorted(special_ids):  # skip over each special id, from the lowest up
    ids = ids + (ids >= special)
  return ids


def _select_row(key: jax.Array, eligible: jax.Array, pair_index: jax.Array, rate: float,
                pairs: int, most: int) -> tuple[jax.Array, jax.Array]:
  """Draws the positions to predict in one row: [L] bool and [L] int32 -> ([M] int32, [M] bool)."""
  length = eligible.shape[0]
  group = jnp.where(eligible, pair_index, pairs + 1)  # what is not eligible sorts to the end
  members = jnp.arange(1, pairs + 1)
  n = jnp.sum(group[None, :] == members[:, None], axis=1)  # [P] ordinary tokens of each pair
  wanted = jnp.where(n > 0, jnp.maximum(1, jnp.round(rate * n).astype(jnp.int32)), 0)
  allowed = most - (jnp.cumsum(wanted) - wanted)  # what the pairs before leave of M
  wanted = jnp.clip(wanted, 0, jnp.maximum(allowed, 0))

  # Sorting by (pair, random bits) puts each pair's tokens in random order, one pair after another:
  # the first `wanted` of each are its draw.
  bits = jax.random.bits(key, (length,))
  group, _, order = jax.lax.sort((group, bits, jnp.arange(length)), num_keys=2)
  first = jnp.cumsum(n) - n  # where each pair starts in this order
  padded = lambda x: jnp.concatenate([x, jnp.zeros(1, x.dtype)])  # for what is not eligible
  rank = jnp.arange(length) - padded(first)[group - 1]
  drawn = jnp.zeros(length, bool).at[order].set(rank < padded(wanted)[group - 1])

  positions = jnp.argsort(~drawn, stable=True)[:most]
  valid = drawn[positions]
  return jnp.where(valid, positions, 0), valid


def mask(key: jax.Array, ids: jax.Array, pair_index: jax.Array, row: jax.Array,
         config: MaskingConfig, *, vocab_size: int, special_ids: tuple[int, ...], mask_id: int,
         pairs: int = 1) -> Masked:
  """Masks a batch of rows.

  Args:
    key: of the step; each row folds in its own global number.
    ids: [B, L] int32 tokens.
    pair_index: [B, L] int32, 0 on padding, 1..P on the tokens of each pair.
    row: [B] int32, the number of each row in the global batch.
    config: the rule.
    vocab_size: V; random replacements are below it.
    special_ids: never masked, predicted, or put in as a random replacement.
    mask_id: of [MASK].
    pairs: P, the most pairs in a row.

  Returns:
    `Masked`, with M = `config.predictions(L, pairs)`.
  """
  most = config.predictions(ids.shape[1], pairs)

  def mask_row(ids, pair_index, row):
    draw_key, action_key, token_key = jax.random.split(jax.random.fold_in(key, row), 3)
    eligible = (pair_index > 0) & ~is_special(ids, special_ids)
    positions, valid = _select_row(draw_key, eligible, pair_index, config.rate, pairs, most)
    targets = ids[positions]
    action = jax.random.uniform(action_key, (most,))
    random = random_ordinary(token_key, (most,), vocab_size, special_ids)
    new = jnp.where(action < config.replace_mask, mask_id,
                    jnp.where(action < config.replace_mask + config.replace_random,
                              random, targets))
    # Unused slots write beyond the row, where the update is dropped.
    corrupted = ids.at[jnp.where(valid, positions, ids.shape[0])].set(new, mode='drop')
    return Masked(corrupted, positions, jnp.where(valid, targets, 0),
                  valid.astype(jnp.float32))

  return jax.vmap(mask_row)(ids, pair_index, row)
