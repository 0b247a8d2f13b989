"""The post-processor of a tokenizer.json for models with two segments.

RoBERTa's post-processor gives both texts of a pair segment id 0. If the model has two
segments, bert_jax replaces it with a rule that gives the second text segment id 1.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bert_jax.data.tokenizers.base import Around

_ROBERTAS = 'RobertaProcessing'


def _template(parts: Sequence[Sequence[int]], vocab: Sequence[str]) -> list[Any]:
  """The special tokens `parts`, with texts between them; segment id 1 from text B on."""
  pieces = []
  for text, ids in zip(' AB', parts):
    segment = int(text == 'B')
    if text != ' ':
      pieces.append({'Sequence': {'id': text, 'type_id': segment}})
    pieces += [{'SpecialToken': {'id': vocab[i], 'type_id': segment}} for i in ids]
  return pieces


def with_segments(rule: Any, around: Around, vocab: Sequence[str]) -> Any:
  """Gives RoBERTa's post-processor segments; returns any other one unchanged."""
  if not isinstance(rule, Mapping) or rule.get('type') != _ROBERTAS:
    return rule
  names = {vocab[i]: i for part in around.two for i in part}
  template = {'type': 'TemplateProcessing',
              'single': _template(around.one, vocab),
              'pair': _template(around.two, vocab),
              'special_tokens': {name: {'id': name, 'ids': [i], 'tokens': [name]}
                                 for name, i in names.items()}}
  # ByteLevel corrects the offsets in the text, as RoBERTa's own post-processor does. It
  # ignores `use_regex`. False marks this rule, so that `without_segments` does not
  # mistake a published rule for it.
  places = {'type': 'ByteLevel', 'use_regex': False,
            **{x: rule[x] for x in ('add_prefix_space', 'trim_offsets')}}
  return {'type': 'Sequence', 'processors': [places, template]}


def without_segments(rule: Any, around: Around, vocab: Sequence[str]) -> Any:
  """Undoes `with_segments`, so that a digest does not depend on the segments."""
  try:
    places, _ = rule['processors']
    (cls,), (_, sep), _ = around.two
    roberta = {'type': _ROBERTAS, 'sep': [vocab[sep], sep], 'cls': [vocab[cls], cls],
               **{x: places[x] for x in ('trim_offsets', 'add_prefix_space')}}
  except (KeyError, TypeError, ValueError):
    return rule
  return roberta if with_segments(roberta, around, vocab) == rule else rule
