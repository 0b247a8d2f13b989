"""Masking for masked language modeling, on the device, inside the jitted step.

From each pair of n ordinary (not special) tokens, max(1, round(rate * n)) are drawn
without replacement; whole words and n-grams are drawn from the whole row
(`masking_units`). Then each drawn token independently becomes [MASK], becomes a random
ordinary token, or stays. The key of a row is the key of the step with the global number
of the row folded in. Therefore the masks do not depend on the mesh or on the split into
microbatches, and no two chips draw the same masks.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.errors import require, require_choice
from bert_jax.objectives import masking_units

# Every position belongs to one unit. A unit ends where the next one starts.
UNITS = ('token', 'whole_word', 'span', 'ngram')

# A unit has at most _LONGEST_WORD tokens, and _FURTHER_WORD more for each further word of
# an n-gram. Longer units are cut. M has room for one such unit beyond the rate.
_LONGEST_WORD = 6
_FURTHER_WORD = 2


@dataclasses.dataclass(frozen=True)
class MaskingConfig:
  """The masking rules of BERT (Devlin et al. 2019, section 3.1) and its successors."""

  rate: float = 0.15  # share of the ordinary tokens that are predicted
  # The rate changes linearly over the run, from `rate` to `final_rate`; 0 = constant.
  # Evaluations always use the final rate.
  final_rate: float = 0.0
  unit: str = 'token'  # tokens that are masked together: token, whole_word, span, ngram
  span_p: float = 0.2  # a span has n words with probability ~ (1 - span_p)^n
  span_max: int = 10  # most words in a span
  ngram_max: int = 3  # most words in an n-gram; n words have probability ~ 1/n
  replace_mask: float = 0.8  # share of the predicted tokens that become [MASK]
  replace_random: float = 0.1  # share that become a random ordinary token; the rest stay
  # Draw random tokens by their frequency in the corpus, not uniformly.
  random_by_frequency: bool = False
  causal_rows: float = 0.0  # share of the rows of a step that predict the next token
  causal_steps: float = 1.0  # fraction of the steps, from the first on, with causal rows
  max_predictions: int = 0  # most predictions in a row (M); 0 = computed from the rate

  def __post_init__(self):
    require(0 < self.rate < 1, f'masking.rate={self.rate} must lie in (0, 1)')
    require(0 <= self.final_rate < 1,
            f'masking.final_rate={self.final_rate} must be 0, or lie in (0, 1)')
    require_choice('masking.unit', self.unit, UNITS)
    require(0 < self.span_p < 1 and min(self.span_max, self.ngram_max) >= 1,
            f'masking.span_p={self.span_p} must lie in (0, 1), masking.span_max='
            f'{self.span_max} and masking.ngram_max={self.ngram_max} be at least 1')
    # The tolerance admits shares such as 0.7 and 0.3, whose float sum is above 1.
    require(min(self.replace_mask, self.replace_random) >= 0
            and self.replace_mask + self.replace_random <= 1 + 1e-9,
            f'masking.replace_mask={self.replace_mask} and masking.replace_random='
            f'{self.replace_random} must be shares that sum to at most 1')
    require(0 <= self.causal_rows <= 1 and 0 < self.causal_steps <= 1,
            f'masking.causal_rows={self.causal_rows} must lie in [0, 1], and '
            f'masking.causal_steps={self.causal_steps} in (0, 1]')
    require(self.causal_rows < 1 or self.causal_steps < 1,
            f'masking.causal_rows={self.causal_rows} leaves no masked rows: '
            'make it or masking.causal_steps smaller than 1')
    require(self.max_predictions >= 0,
            f'masking.max_predictions={self.max_predictions} must not be negative')

  def predictions(self, max_len: int, pairs: int = 1) -> int:
    """Returns M, the most predictions in a row of `max_len` tokens and `pairs` pairs.

    M is static: it is a dimension of arrays in the compiled step.
    """
    if self.max_predictions:
      return min(self.max_predictions, max_len)
    rate = max(self.rate, self.final_rate)
    if self.is_whole:
      return min(math.ceil(rate * max_len) + self.longest_unit - 1, max_len)
    if pairs == 1:
      return math.ceil(rate * max_len)
    # A pair of n tokens has at least [CLS], [SEP] and one ordinary token, so n >= 3. It
    # needs 1 prediction, or at most rate * (n - 2) + 1/2. Its share of the row's
    # predictions is rate * n. `excess` is the most by which the need exceeds the share.
    excess = max(0.0, 1 - 3 * rate, 0.5 - 2 * rate)
    return min(math.ceil(rate * max_len + pairs * excess), max_len)

  @property
  def is_whole(self) -> bool:
    """True if units stay whole: words and n-grams. Spans may be cut off."""
    return self.unit in ('whole_word', 'ngram')

  @property
  def longest_unit(self) -> int:
    """The number of tokens in the longest unit that stays whole."""
    return _LONGEST_WORD + _FURTHER_WORD * (len(self.unit_lengths()) - 1)

  @property
  def eval_rate(self) -> float:
    """The rate of all evaluations, which is the rate of the last step."""
    return self.final_rate or self.rate

  def rate_at(self, step: int, train_steps: int) -> float:
    """Returns the rate at a step of the run."""
    if not self.final_rate:
      return self.rate
    return self.rate + (self.final_rate - self.rate) * step / max(train_steps - 1, 1)

  def unit_lengths(self) -> np.ndarray:
    """Returns the probabilities that a unit has 1, 2, ... words: [n] float64.

    The length of a span is geometric, cut off at `span_max` (Joshi et al. 2020,
    SpanBERT). The probability of an n-gram is proportional to 1/n (Lan et al. 2020,
    ALBERT).
    """
    weights = np.ones(1)
    if self.unit == 'span':
      weights = self.span_p * (1 - self.span_p)**np.arange(self.span_max)
    elif self.unit == 'ngram':
      weights = 1 / np.arange(1, self.ngram_max + 1)
    return weights / weights.sum()


class Vocabulary(NamedTuple):
  """The properties of a vocabulary that masking needs."""

  size: int  # V; random replacements are below it
  special_ids: tuple[int, ...]  # never masked, never predicted, never a replacement
  mask_id: int  # the id of [MASK]
  # [V] float32, from `cumulative_frequencies`, for random replacements. Uniform if None.
  frequencies: np.ndarray | None = None


class Masked(NamedTuple):
  """Masked rows and their targets."""

  ids: jax.Array  # [B, L] int32, the corrupted input
  positions: jax.Array  # [B, M] int32, ascending; 0 where unused
  targets: jax.Array  # [B, M] int32, the original tokens
  weights: jax.Array  # [B, M] float32, 1 on predictions, 0 on unused slots


def random_ordinary(key: jax.Array, shape: tuple[int, ...],
                    vocabulary: Vocabulary) -> jax.Array:
  """Draws ordinary tokens, uniformly or by frequency: int32 array of `shape`."""
  if vocabulary.frequencies is not None:
    drawn = jax.random.uniform(key, shape)
    cumulative = jnp.asarray(vocabulary.frequencies)
    return jnp.searchsorted(cumulative, drawn, side='right').astype(jnp.int32)
  ids = jax.random.randint(key, shape, 0, vocabulary.size - len(vocabulary.special_ids))
  # Each step skips one special id. In ascending order no later step lands on an earlier
  # one.
  for special in sorted(vocabulary.special_ids):
    ids = ids + (ids >= special)
  return ids


def cumulative_frequencies(counts: np.ndarray,
                           special_ids: tuple[int, ...]) -> np.ndarray:
  """Returns the cumulative distribution of ordinary tokens: [V] counts -> [V] float32."""
  counts = counts.astype(np.float64)
  counts[list(special_ids)] = 0
  return (np.cumsum(counts) / counts.sum()).astype(np.float32)


def _budgets(key: jax.Array, n: jax.Array, rate: jax.Array, most: int) -> jax.Array:
  """Returns how many of the n ordinary tokens of each group to draw: [P] -> [P] int32.

  The budget of a group is max(1, round(rate * n)). If the budgets sum to more than
  `most`, each group gets its share of `most`, rounded up or down at random.
  """
  budgets = jnp.where(n > 0, jnp.maximum(1, jnp.round(rate * n).astype(jnp.int32)), 0)
  total = jnp.maximum(jnp.sum(budgets), 1)
  # All groups share one random shift: the budgets sum to exactly `most`, and no group is
  # favored.
  shift = jax.random.randint(key, (), 0, total)
  up_to = (jnp.cumsum(budgets) * most + shift) // total  # budgets summed up to each group
  return jnp.where(total > most, jnp.diff(up_to, prepend=0), budgets)


def _select_row(key: jax.Array, eligible: jax.Array, text_ids: jax.Array,
                unit_start: jax.Array, word_start: jax.Array, rate: jax.Array, pairs: int,
                most: int, config: MaskingConfig) -> tuple[jax.Array, jax.Array]:
  """Draws the positions to predict in one row, whose arrays are [L].

  Units are drawn in random order. Whole units come from the whole row. Other units come
  from each pair, and the last unit of a pair is cut off at its budget (as in SpanBERT).

  Returns:
    (positions [M] int32, True where a position is used [M] bool).
  """
  length = eligible.shape[0]
  groups = 1 if config.is_whole else pairs
  group = jnp.minimum(text_ids, groups)
  group = jnp.where(eligible, group, groups + 1)  # other tokens sort to the end
  # n: [P], the ordinary tokens of each group.
  n = jnp.sum(group[None, :] == jnp.arange(1, groups + 1)[:, None], axis=1)
  budgets = _budgets(jax.random.fold_in(key, 2), n, rate, most)

  if config.is_whole:
    # A unit longer than the budget would leave some rows without a prediction and give
    # others too many.
    longest = jnp.clip(budgets[0], 1, min(config.longest_unit, most))
    unit_start = masking_units.cut_long(unit_start, word_start, longest)

  # Sort by (group, random bits of the unit, unit): groups stay in order, the units of a
  # group are in random order, and the tokens of a unit stay together. The third key
  # separates two units with equal bits.
  unit = jnp.cumsum(unit_start) - 1
  bits = jax.random.bits(key, (length,))[unit]
  group_at, _, unit_at, order = jax.lax.sort((group, bits, unit, jnp.arange(length)),
                                             num_keys=3)
  place = jnp.arange(length)
  ordinary = group_at <= groups
  if config.is_whole:
    start = jnp.full(length, length).at[unit_at].min(
        jnp.where(ordinary, place, length))[unit_at]
    size = jnp.zeros(length, jnp.int32).at[unit_at].add(ordinary)[unit_at]
    taken = ordinary & masking_units.draw_whole(
        jax.random.fold_in(key, 3), start, size, n[0], budgets[0], most)
  else:
    first = jnp.cumsum(n) - n  # where each group starts in this order
    # [P] -> [L]: the value of each token's group; 0 for tokens that are not eligible.
    of_group = lambda x: jnp.append(x, 0)[group_at - 1]
    taken = place - of_group(first) < of_group(budgets)
  drawn = jnp.zeros(length, bool).at[order].set(taken)

  # A stable sort keeps the drawn positions ascending, in front of all others.
  positions = jnp.argsort(~drawn, stable=True)[:most]
  valid = drawn[positions]
  return jnp.where(valid, positions, 0), valid


def mask(key: jax.Array, ids: jax.Array, text_ids: jax.Array, row: jax.Array,
         config: MaskingConfig, vocabulary: Vocabulary, *, pairs: int = 1,
         word_start: jax.Array | None = None, rate: jax.Array | None = None) -> Masked:
  """Masks a batch of rows.

  Args:
    key: the key of the step; each row folds in its global number.
    ids: [B, L] int32 tokens.
    text_ids: [B, L] int32, 0 on padding, 1..P on the tokens of each pair.
    row: [B] int32, the number of each row in the global batch.
    config: the masking rules.
    vocabulary: the ids that replacements are drawn from.
    pairs: P, the most pairs in a row.
    word_start: [B, L] int32, 1 where a word starts, on special tokens and on the token
      after a special token. May be None only if `config.unit` is 'token'.
    rate: [B] float32, replaces `config.rate`.

  Returns:
    `Masked`, with M = `config.predictions(L, pairs)`.
  """
  most = config.predictions(ids.shape[1], pairs)
  lengths = config.unit_lengths()
  if word_start is None:
    word_start = jnp.ones_like(ids)
  if rate is None:
    rate = jnp.full(row.shape, config.rate, jnp.float32)

  def mask_row(ids, text_ids, row, word_start, rate):
    # Folds in the global number, not the index on the device: every mesh draws the same.
    draw_key, action_key, token_key = jax.random.split(jax.random.fold_in(key, row), 3)
    eligible = (text_ids > 0) & ~jnp.isin(ids, jnp.asarray(vocabulary.special_ids))
    # `join_words` needs every padding token to be a word.
    word_start = word_start.astype(bool) | (text_ids == 0)
    unit_start = word_start
    if config.unit == 'token':
      unit_start = jnp.ones_like(unit_start)
    elif len(lengths) > 1:
      unit_start = masking_units.join_words(
          jax.random.fold_in(draw_key, 1), unit_start, ~eligible, lengths)
    positions, valid = _select_row(draw_key, eligible, text_ids, unit_start, word_start,
                                   rate, pairs, most, config)
    targets = ids[positions]
    if config.unit == 'span':
      # SpanBERT replaces all tokens of a span in the same way: one draw per unit.
      unit = jnp.cumsum(unit_start) - 1
      action = jax.random.uniform(action_key, ids.shape)[unit[positions]]
    else:
      action = jax.random.uniform(action_key, (most,))
    random = random_ordinary(token_key, (most,), vocabulary)
    new = jnp.where(action < config.replace_mask + config.replace_random, random, targets)
    new = jnp.where(action < config.replace_mask, vocabulary.mask_id, new)
    # Unused slots write past the end of the row, where JAX drops the update.
    corrupted = ids.at[jnp.where(valid, positions, ids.shape[0])].set(new, mode='drop')
    return Masked(corrupted, positions, jnp.where(valid, targets, 0),
                  valid.astype(jnp.float32))

  return jax.vmap(mask_row)(ids, text_ids, row, word_start, rate)
