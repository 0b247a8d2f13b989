"""A loaded model: makes inputs from texts, packs them into rows, and orders the outputs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import itertools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.data import inputs as inputs_lib
from bert_jax.errors import require, require_choice
from bert_jax.inference import packed_texts
from bert_jax.interop.cross_layout import CrossLayout
from bert_jax.interop.late_layout import LateLayout
from bert_jax.interop.pretrained import Pretrained
from bert_jax.interop.sentence_layout import SentenceLayout
from bert_jax.interop.sparse_layout import SparseLayout
from bert_jax.interop.text_layout import TextLayout

# Tokens of a batch: the caches of a CPU hold few; an accelerator needs many to be busy.
_BATCH_TOKENS, _BATCH_TOKENS_CPU = 16384, 2048

Text = str | tuple[str, ...]  # a text, or a pair of them


Layout = TypeVar('Layout', bound=TextLayout)


def _own_or_default(own: TextLayout | None, kind: type[Layout]) -> Layout:
  return own if isinstance(own, kind) else kind()


def check_list(texts: Any):
  """Raises UserError for a string or a table: a loop over a table gives column names."""
  require(texts is not None and not isinstance(texts, str | bytes | Mapping)
          and getattr(texts, 'ndim', 1) == 1, 'give a list of texts, not a string or a table')


class LoadedModel:
  """A model with its tokenizer, and its parameters on the device.

  Tasks take it as a `tasks.task_kind.TrainedModel` to answer examples. `bert.Bert` adds
  the methods for users.
  """

  def __init__(self, model: Pretrained):
    self.params = jax.tree.map(jnp.asarray, model.params)
    self.model = dataclasses.replace(model, params=self.params)
    self.config, self.tokenizer = model.config, model.tokenizer
    own = model.text_layout
    self.dense = _own_or_default(own, SentenceLayout)
    self.sparse = _own_or_default(own, SparseLayout)
    self.cross = _own_or_default(own, CrossLayout)
    self.late = _own_or_default(own, LateLayout)

  @property
  def trained_length(self) -> int:
    """The tokens of the longest input in fine-tuning, or the positions of the model."""
    return self.model.facts.get('max_len') or self.config.max_positions

  # ---- texts to rows ---------------------------------------------------------------------

  def require_head(self, group: str, title: str):
    """Raises UserError if the model lacks the head `group`; messages call it `title`."""
    require(group in self.model.groups,
            f'this model has no {title}: it was trained without one, or the checkpoint '
            'leaves it out')

  def _strings(self, texts: Sequence[Text]) -> list[tuple[str, ...]]:
    """Returns (text,) or a pair for each text; raises UserError for anything else."""
    check_list(texts)
    strings = [tuple(text) if isinstance(text, tuple | list) else (text,)
               for text in texts]
    for i, text in enumerate(strings):
      require(len(text) in (1, 2) and all(isinstance(string, str) for string in text),
              f'text {i + 1} is neither a string nor a pair of strings')
    return strings

  def _single(self, texts: Sequence[str]) -> list[str]:
    """Returns the texts; raises UserError for anything but strings."""
    strings = self._strings(texts)
    require(all(len(text) == 1 for text in strings), 'give single texts, not pairs')
    return [text for text, in strings]

  def _ids(self, texts: Sequence[Text]) -> list[tuple[list[int], ...]]:
    return inputs_lib.encode(self._strings(texts), self.tokenizer)

  def row(self, text: Text) -> inputs_lib.Input:
    """Makes the input of a text or pair: its tokens and the special tokens."""
    return self._whole_row(*self._ids([text])[0])

  def _whole_row(self, *ids: Sequence[int]) -> inputs_lib.Input:
    row = inputs_lib.join(self.tokenizer, *ids)
    require(len(row.ids) <= self.config.max_positions,
            f'a text of {len(row.ids)} tokens is longer than the '
            f'{self.config.max_positions} positions of the model: shorten it')
    return row

  def _rows(self, texts: Sequence[Text], long: str,
            max_len: int | None) -> tuple[list[inputs_lib.Input], np.ndarray]:
    """Returns (the rows of texts, [rows] the index of each row's text)."""
    require_choice('long', long, inputs_lib.LONG)
    longest = self.config.max_positions if max_len is None else max_len
    require(longest <= self.config.max_positions,
            f'max_len={max_len} is above the {self.config.max_positions} positions of '
            'the model')
    require(longest >= 8, f'max_len={max_len} must be at least 8')
    return inputs_lib.text_inputs(self._strings(texts), self.tokenizer, longest, long)

  # ---- rows to results -------------------------------------------------------------------

  def _run(self, rows: Sequence[inputs_lib.Input], function: Callable,
           positions: np.ndarray | None = None,
           *values: np.ndarray) -> Iterator[tuple[inputs_lib.InputRows, Any]]:
    """Yields (batch, function(params, batch, [R, P] positions, *[R, P] values)).

    `positions` [texts] count from the start of each text; None = the starts. `values` are
    [texts].
    """
    offsets = np.zeros(len(rows), np.int32) if positions is None else positions

    def run(packed):
      is_text = packed.index >= 0
      shift, *others = (np.where(is_text, x[packed.index], 0).astype(np.int32)
                        for x in (offsets, *values))
      return function(self.params, packed.tokens, packed.starts + shift, *others)

    most_tokens = _BATCH_TOKENS_CPU if jax.default_backend() == 'cpu' else _BATCH_TOKENS
    batches = packed_texts.pack(rows, self.tokenizer.pad_id, self.config.max_positions,
                                most_tokens)
    running = ((packed, run(packed)) for packed in batches)
    # In pairs: the device runs the next batch while the caller uses this one.
    for batch, _ in itertools.pairwise(itertools.chain(running, [None])):
      yield jax.device_get(batch)

  def per_text(self, rows: Sequence[inputs_lib.Input], function: Callable,
               positions: np.ndarray | None = None,
               *values: np.ndarray) -> Any:
    """Runs `function` and reorders its [R, P, ...] to [texts, ...]; None without texts.

    `positions` [texts] count from the start of each text; None = the starts. `values` are
    [texts].
    """
    results = None
    for packed, output in self._run(rows, function, positions, *values):
      if results is None:
        results = np.zeros((len(rows), *output.shape[2:]), output.dtype)
      is_text = packed.index >= 0
      results[packed.index[is_text]] = output[is_text]
    return results

  def per_token(self, rows: Sequence[inputs_lib.Input],
                function: Callable) -> list[np.ndarray]:
    """Runs `function` and cuts its [R, L, ...] into [tokens, ...] of each text.

    Special tokens are included.
    """
    results: list[Any] = [None] * len(rows)
    for packed, output in self._run(rows, function):
      put_tokens(results, rows, packed, output)
    return results


def put_tokens(results: list, rows: Sequence[inputs_lib.Input],
               packed: inputs_lib.InputRows, output: np.ndarray):
  """Copies the tokens of each text of a batch from [R, L, ...] into its result."""
  for row, slot in zip(*np.nonzero(packed.index >= 0)):
    text, start = packed.index[row, slot], packed.starts[row, slot]
    results[text] = output[row, start:start + len(rows[text].ids)].astype(np.float32)
