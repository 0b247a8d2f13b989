"""Inputs of late interaction: expanded queries, and the tokens that MaxSim uses.

Khattab and Zaharia 2020, https://arxiv.org/abs/2004.12832.
"""

from collections.abc import Sequence
import dataclasses
import string

import numpy as np

from bert_jax.data import inputs as inputs_lib
from bert_jax.data.tokenizers.base import Tokenizer

QUERY, DOCUMENT = 'query', 'document'  # the roles of a text
# The ways to expand a query by [MASK]. fixed: to exactly `expanded` tokens; min: to
# `expanded` tokens or more. Without _visible, no other token sees the added [MASK].
HIDING = ('fixed', 'min')
EXPANSIONS = ('none', *HIDING, *(f'{name}_visible' for name in HIDING))
PUNCTUATION = tuple(string.punctuation)


@dataclasses.dataclass(frozen=True)
class LateInputs:
  """How queries and documents become inputs.

  Attributes:
    expansion: one of EXPANSIONS.
    expanded: tokens of an expanded query; 0 = no expansion.
    query_length: the most tokens of a query; None = the argument `longest` of `make`. A
      fixed expansion ignores it.
    document_length: the most tokens of a document; None = `longest`.
    skipped: entries of the vocabulary that MaxSim leaves out.
    skipped_in: the roles of the texts in which MaxSim leaves out `skipped`.
    only: MaxSim uses only the document tokens with these ids; () = all tokens.
  """

  expansion: str = 'none'
  expanded: int = 0
  query_length: int | None = None
  document_length: int | None = None
  skipped: tuple[str, ...] = ()
  skipped_in: tuple[str, ...] = (DOCUMENT,)
  only: tuple[int, ...] = ()

  def make(self, texts: Sequence[tuple[str, ...]], tokenizer: Tokenizer, role: str,
           longest: int,
           positions: int | None = None) -> tuple[list[inputs_lib.Input], list[np.ndarray]]:
    """Makes the inputs of queries or documents.

    Args:
      texts: (text,) each, with its prompt.
      tokenizer: the tokenizer of the model.
      role: QUERY or DOCUMENT.
      longest: the largest number of tokens in a text whose role sets no length.
      positions: the most tokens of any input; None = `longest`.

    Returns:
      (inputs, [tokens] bool of each: True on tokens that count in MaxSim).
    """
    is_query, positions = role == QUERY, positions or longest
    least = self.expanded if is_query else 0
    own = self.query_length if is_query else self.document_length
    if least and self.expansion.startswith('fixed'):
      own = least
    most = max(own, least) if own else longest
    inputs, _ = inputs_lib.text_inputs(texts, tokenizer, min(most, positions))
    if least:
      inputs = [self._expanded(x, min(least, positions), tokenizer) for x in inputs]
    # Compares entries, not ids: an unknown word would skip every [UNK] of the text.
    entries = set(self.skipped) if role in self.skipped_in else set()
    skipped = [i for i, entry in enumerate(tokenizer.vocab) if entry in entries]
    counts = []
    for ids in (np.array(x.ids) for x in inputs):
      counts.append(~np.isin(ids, skipped))
      if self.only and not is_query:
        counts[-1] &= np.isin(ids, self.only)
    return inputs, counts

  def _expanded(self, text: inputs_lib.Input, length: int,
                tokenizer: Tokenizer) -> inputs_lib.Input:
    missing = max(length - len(text.ids), 0)
    return inputs_lib.Input([*text.ids, *[tokenizer.mask_id] * missing],
                            [*text.type_ids, *[0] * missing],
                            missing if self.expansion in HIDING else 0)
