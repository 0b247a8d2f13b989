"""A trained model in the hand: fill masks, judge next sentences, score texts."""

from collections.abc import Iterable
from collections.abc import Sequence
import json
import math
from typing import Any
from typing import NamedTuple

from etils import epath
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.data import tokenizer as tokenizer_lib
from bert_jax.errors import UserError
from bert_jax.model.config import BertConfig
from bert_jax.model.encoder import Batch
from bert_jax.model.heads import BertForPreTraining
from bert_jax.training import checkpoint

_ROWS = 32  # rows in a batch; with the lengths below it bounds the number of compilations
_SHORTEST = 32  # rows are padded to this, or twice it, four times, ... up to max_positions


class _Row(NamedTuple):
  """One text or pair, with the special tokens."""

  ids: list[int]
  type_ids: list[int]


class Bert:
  """A BERT with both pretraining heads, its tokeniser and its parameters.

  Every method takes any number of texts, runs them in batches of one of a few fixed lengths, and
  raises UserError for a text longer than the position table.
  """

  def __init__(self, config: BertConfig, params: Any, tokenizer: tokenizer_lib.Tokenizer):
    self.config, self.params, self.tokenizer = config, params, tokenizer
    model = BertForPreTraining(config)
    self._mlm_logits = jax.jit(lambda params, batch, positions: model.apply(
        params, batch, positions, method=lambda m, b, p: m.mlm_logits(m.bert.encode(b), p)))
    self._nsp_logits = jax.jit(lambda params, batch: model.apply(
        params, batch, jnp.zeros((batch.ids.shape[0], 1), jnp.int32),
        method=lambda m, b, p: m.nsp_logits(m.bert.encode(b), p)))

  def _row(self, ids: Sequence[int], pair: Sequence[int] | None = None) -> _Row:
    t = self.tokenizer
    first = [t.cls_id, *ids, t.sep_id]
    second = [] if pair is None else [*pair, t.sep_id]
    if len(first) + len(second) > self.config.max_positions:
      raise UserError(f'a text of {len(first) + len(second)} tokens is longer than the '
                      f'{self.config.max_positions} positions of the model: shorten it')
    return _Row(first + second, [0] * len(first) + [1] * len(second))

  def _batch(self, rows: Sequence[_Row]) -> Batch:
    """Pads rows to [32, L], L the shortest of the fixed lengths that holds them."""
    longest = max(len(row.ids) for row in rows)
    length = min(_SHORTEST * 2 ** max(0, math.ceil(math.log2(longest / _SHORTEST))),
                 self.config.max_positions)
    ids = np.full((_ROWS, length), self.tokenizer.pad_id, np.int32)
    type_ids, pair_index = np.zeros((2, _ROWS, length), np.int32)
    for i, row in enumerate(rows):
      ids[i, :len(row.ids)] = row.ids
      type_ids[i, :len(row.ids)] = row.type_ids
      pair_index[i, :len(row.ids)] = 1
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
    return Batch(ids, type_ids, positions, pair_index)

  def _logits_at(self, rows: Sequence[_Row], positions: Sequence[int]) -> Iterable[np.ndarray]:
    """MLM logits [V] at one position of each row."""
    for start in range(0, len(rows), _ROWS):
      part = rows[start:start + _ROWS]
      at = np.zeros((_ROWS, 1), np.int32)
      at[:len(part), 0] = positions[start:start + _ROWS]
      logits = np.asarray(self._mlm_logits(self.params, self._batch(part), at))
      yield from logits[:len(part), 0, :self.config.vocab_size]

  def fill_mask(self, text: str, top_k: int = 5) -> list[dict[str, Any]]:
    """The likeliest tokens for each "[MASK]" of a text.

    Returns:
      For each mask {'position', 'candidates': [{'token', 'probability', 'logit', 'surprisal'}]},
      the likeliest first; positions count [CLS] as 0, surprisal is -log probability in nat.
    """
    row = self._row(self.tokenizer.encode_with_masks(text))
    masks = [i for i, token in enumerate(row.ids) if token == self.tokenizer.mask_id]
    if not masks:
      raise UserError(f'no [MASK] in {text!r}')
    found = []
    for position, logits in zip(masks, self._logits_at([row] * len(masks), masks)):
      surprisal = np.logaddexp.reduce(logits.astype(np.float64)) - logits
      best = np.argsort(surprisal, kind='stable')[:top_k]
      found.append({'position': position, 'candidates': [
          {'token': token, 'probability': float(np.exp(-surprisal[i])), 'logit': float(logits[i]),
           'surprisal': float(surprisal[i])}
          for i, token in zip(best, self.tokenizer.tokens(best))]})
    return found

  def next_sentence(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """The probability that the second text of each pair follows the first.

    Raises:
      UserError: the model was trained without pairs.
    """
    if 'nsp' not in self.params['params']:
      raise UserError('this model was trained on full sentences: it has no head for pairs')
    texts = self.tokenizer.encode_batch([text for pair in pairs for text in pair])
    rows = [self._row(a, b) for a, b in zip(texts[::2], texts[1::2])]
    found = []
    for start in range(0, len(rows), _ROWS):
      part = rows[start:start + _ROWS]
      logits = self._nsp_logits(self.params, self._batch(part))
      found += jax.nn.softmax(logits)[:len(part), 0, 0].tolist()
    return found

  def score(self, text: str) -> dict[str, Any]:
    """How expected each token of a text is when it alone is masked (Salazar et al. 2020).

    Returns:
      {'tokens': [{'token', 'surprisal'}], 'pseudo_perplexity'}: -log P(token | the others) in nat,
      and the exponential of its mean.
    """
    ids = self.tokenizer.encode_batch([text])[0]
    if not ids:
      raise UserError(f'{text!r} holds no token to score')
    row = self._row(ids)
    masked = [row._replace(ids=row.ids[:i + 1] + [self.tokenizer.mask_id] + row.ids[i + 2:])
              for i in range(len(ids))]
    surprisals = [
        float(np.logaddexp.reduce(logits.astype(np.float64)) - logits[token])
        for token, logits in zip(ids, self._logits_at(masked, range(1, len(ids) + 1)))]
    return {'tokens': [{'token': token, 'surprisal': surprisal}
                       for token, surprisal in zip(self.tokenizer.tokens(ids), surprisals)],
            'pseudo_perplexity': math.exp(sum(surprisals) / len(surprisals))}


def load(directory: str) -> Bert:
  """Loads the newest checkpoint of a workdir.

  Raises:
    UserError: the folder is no workdir of a pretraining run, or holds no checkpoint yet.
  """
  workdir = epath.Path(directory)
  try:
    run = json.loads((workdir / 'run.json').read_text())['config']
    config, sequences = BertConfig(**run['model']), run['data'].get('sequences')
  except FileNotFoundError as e:
    raise UserError(f'--model={directory} is no workdir: it has no run.json') from e
  except (OSError, json.JSONDecodeError, KeyError, TypeError) as e:
    raise UserError(f'{workdir / "run.json"} cannot be read: {e}') from e
  tokenizer = tokenizer_lib.load(workdir / 'tokenizer')
  if tokenizer.vocab_size != config.vocab_size:
    raise UserError(f'{workdir / "tokenizer"} has {tokenizer.vocab_size} entries, the model '
                    f'{config.vocab_size}: the vocabulary is of another model')
  model = BertForPreTraining(config)
  tokens = jnp.zeros((1, 8), jnp.int32)
  abstract = jax.eval_shape(model.init, jax.random.key(0), Batch(*[tokens] * 4), tokens,
                            None if sequences == 'full_sentences' else tokens)
  params, _ = checkpoint.restore_params(workdir, nn.unbox(abstract))
  return Bert(config, params, tokenizer)
