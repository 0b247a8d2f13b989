"""Masked-LM loss of a text, in nats per token, word and byte.

The losses per word and per byte compare models with different vocabularies. They are the
loss per token, times the number of tokens in the text, divided by the number of its words
or bytes. White space separates words.
"""

from collections.abc import Iterable, Iterator
import math
from typing import Any

from etils import epath
import jax
import numpy as np

from bert_jax.data import corpus
from bert_jax.data import inputs as inputs_lib
from bert_jax.data.tokens import Tokens
from bert_jax.errors import require
from bert_jax.evaluation.report import Report
from bert_jax.inference import forward, json_lines
from bert_jax.inference.bert import Bert

SUMS = '.batches.jsonl'  # suffix of a file next to the report: sums of all batches
_BATCH_TOKENS = 8192
_LARGEST_EXPONENT = 700.0  # exp of more than 709 overflows a double


def _pieces(bert: Bert, documents: Iterable[str], length: int) -> Iterator[list[int]]:
  """Cuts the tokens of each document into pieces that fill a row of `length` tokens."""
  room = length - inputs_lib.count_special(bert.tokenizer, 1)
  for document in documents:
    # Training reads sentences with one space between them: in a byte-level BPE, line ends
    # and indentation are tokens.
    ids = bert.tokenizer.encode_batch([' '.join(document.split())])[0]
    yield from (ids[i:i + room] for i in range(0, len(ids), room))


def _rows(length: int) -> int:
  return max(_BATCH_TOKENS // length, 1)


def _batches(bert: Bert, pieces: list[list[int]], length: int, rate: float,
             seed: int) -> Iterator[tuple[Tokens, np.ndarray, np.ndarray, np.ndarray]]:
  """Yields (batch [R, L], positions [R, M], targets [R, M], is_real [R, M]), masked.

  The tokens, the length of a row, the rate and the seed decide the masks. Each masked
  token becomes [MASK].
  """
  rng, rows = np.random.default_rng(seed), _rows(length)
  before = len(bert.tokenizer.around.one[0])
  slots = max(1, math.ceil(rate * length))
  for first in range(0, len(pieces), rows):
    window = pieces[first:first + rows]
    joined = [inputs_lib.join(bert.tokenizer, piece) for piece in window]
    placed = inputs_lib.one_per_row(joined, bert.tokenizer.pad_id, rows=rows, length=length)
    positions, is_real = np.zeros((2, rows, slots), np.int32)
    for row, piece in enumerate(window):
      # The special tokens before the text need no prediction.
      chosen = before + rng.permutation(len(piece))[:max(1, round(rate * len(piece)))]
      positions[row, :len(chosen)] = np.sort(chosen)
      is_real[row, :len(chosen)] = 1
    # An empty slot points at position 0, whose token stays.
    targets = np.take_along_axis(placed.tokens.ids, positions, axis=1)
    masked = np.where(is_real, bert.tokenizer.mask_id, targets)
    np.put_along_axis(placed.tokens.ids, positions, masked, axis=1)
    yield placed.tokens, positions, targets, is_real


def _loss_sums(bert: Bert, pieces: list[list[int]], path: epath.Path,
               masks: dict[str, Any]) -> list[dict[str, Any]]:
  """Writes the loss sum and the masked tokens of each batch, and returns them."""
  @jax.jit
  def loss_sum(params, tokens, positions, targets, is_real):
    surprisals = forward.surprisals(bert.config, params, tokens, positions, targets)
    return (surprisals * is_real).sum()

  def sums(batches):
    return [{'loss': float(loss_sum(bert.params, *batch)), 'tokens': int(batch[-1].sum())}
            for batch in batches]

  job = {'model': json_lines.identity(bert.model), 'text': json_lines.digest(pieces),
         **masks}
  count = -(-len(pieces) // _rows(masks['length']))
  # A resumed job also builds the answered batches: all masks come from one random stream.
  lines, _ = json_lines.write_all(path, job, _batches(bert, pieces, **masks), count, 1,
                                  sums, unit=' batches')
  return lines


def evaluate(bert: Bert, source: str, path: epath.Path, *, rate: float = 0.15,
             max_len: int = 128, seed: int = 0) -> Report:
  """Computes the masked-LM loss of the documents of text files.

  Args:
    bert: a model with a masked-LM head.
    source: a glob of text files with a blank line between documents.
    path: the path of the report; the sums of all batches are in PATH.batches.jsonl.
    rate: fraction of masked tokens.
    max_len: tokens of a row, special tokens included.
    seed: random seed of the masks.

  Raises:
    UserError: no masked-LM head, no text, or a rate or length out of range.
  """
  bert.require_head('mlm', 'masked-LM head')
  require(0 < rate < 1, f'--rate={rate} must lie in (0, 1)')
  require(8 <= max_len <= bert.config.max_positions,
          f'--max_len={max_len} must be at least 8 and at most the '
          f'{bert.config.max_positions} positions of the model')
  files = corpus.find_files(source)
  corpus.check_plain(files, '')
  documents = [
      document for file in files
      for document in corpus.read_file(file, corpus.format_of(file, 'auto'), 'text')]
  pieces = list(_pieces(bert, documents, max_len))
  require(bool(pieces), f'--data={source} holds no text')
  lines = _loss_sums(bert, pieces, path.with_suffix(SUMS),
                     {'rate': rate, 'length': max_len, 'seed': seed})
  count, tokens = sum(line['tokens'] for line in lines), sum(map(len, pieces))
  loss = sum(line['loss'] for line in lines) / count
  # The masked tokens are a sample: their mean loss stands for all tokens of the text.
  units = {'token': tokens, 'word': sum(len(document.split()) for document in documents),
           'byte': sum(len(document.encode()) for document in documents)}
  rows = [[unit, number, loss * tokens / number, _exp(loss * tokens / number)]
          for unit, number in units.items()]
  facts = {'loss': loss, 'masked_tokens': count, 'rate': rate, 'max_len': max_len,
           'seed': seed}
  return Report(facts, ('unit', 'in the text', 'nat', 'perplexity'), rows[::-1], 'nat')


def _exp(nat: float) -> float | None:
  """Returns exp(nat); None on overflow, such as per word of a text without spaces."""
  return math.exp(nat) if nat < _LARGEST_EXPONENT else None
