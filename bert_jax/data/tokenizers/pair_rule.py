"""The post-processor of a tokenizer.json for models with two segments.

RoBERTa's post-processor gives both texts of a pair the segment 0. bert_jax gives the
second text the segment 1 if the model has two.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bert_jax.data.tokenizers.base import Around

_ROBERTAS = 'RobertaProcessing'


def _template(parts: Sequence[Sequence[int]], vocab: Sequence[str]) -> list[Any]:
  """The special tokens `parts` with texts between them; the segment 1 from text B on."""
  pieces = []
  for text, ids in zip(' AB', parts):
    segment = int(text == 'B')
    if text != ' ':
      pieces.append({'Sequence': {'id': text, 'type_id': segment}})
    pieces += [{'SpecialToken': {'id': vocab[i], 'type_id': segment}} for i in ids]
  return pieces


def with_segments(rule: Any, around: Around, vocab: Sequence[str]) -> Any:
  """Returns RoBERTa's post-processor with segments; any other post-processor as it is."""
  if not isinstance(rule, Mapping) or rule.get('type') != _ROBERTAS:
    return rule
  names = {vocab[i]: i for part in around.two for i in part}
  template = {'type': 'TemplateProcessing',
              'single': _template(around.one, vocab),
              'pair': _template(around.two, vocab),
              'special_tokens': {name: {'id': name, 'ids': [i], 'tokens': [name]}
                                 for name, i in names.items()}}
  # ByteLevel corrects the places in the text, as RoBERTa's own post-processor does. It
  # does not use `use_regex`; False tells this rule from published ones in digests.
  places = {'type': 'ByteLevel', 'use_regex': False,
            **{x: rule[x] for x in ('add_prefix_space', 'trim_offsets')}}
  return {'type': 'Sequence', 'processors': [places, template]}


def without_segments(rule: Any, around: Around, vocab: Sequence[str]) -> Any:
  """The inverse of `with_segments`: digests do not depend on the segments."""
  try:
    places, _ = rule['processors']
    (cls,), (_, sep), _ = around.two
    roberta = {'type': _ROBERTAS, 'sep': [vocab[sep], sep], 'cls': [vocab[cls], cls],
               **{x: places[x] for x in ('trim_offsets', 'add_prefix_space')}}
  except (KeyError, TypeError, ValueError):
    return rule
  return roberta if with_segments(roberta, around, vocab) == rule else rule
