"""The pieces of DeBERTa v2 and v3: a unigram model without a character map of its own.

Equal to transformers' DebertaV2Tokenizer, which reads a SentencePiece model (`spm.model`), and to
any tokenizer.json with a unigram model (Kudo 2018). Special tokens are not parsed.
"""

import json
from typing import Any

from etils import epath
import numpy as np
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from bert_jax.data import spiece, tokenizer_base
from bert_jax.data.tokenizer_base import SPACE
from bert_jax.errors import require
from bert_jax.runtime import storage

FILE = 'spm.model'
_NAMES = {'pad': ('[PAD]', '<pad>'), 'unk': ('[UNK]', '<unk>'), 'cls': ('[CLS]', '<s>'),
          'sep': ('[SEP]', '</s>'), 'mask': ('[MASK]', '<mask>')}


class UnigramPieces(tokenizer_base.LibraryTokenizer):
  """The likeliest pieces of each word.

  The constructor takes the content of a tokenizer.json, and its origin for messages. It raises
  UserError for something else, or if a special token is missing.
  """

  kind = 'sentencepiece'

  def __init__(self, settings: dict[str, Any], where: Any = 'tokenizer.json'):
    # `save` puts in special tokens around a text; rows are cut and padded elsewhere.
    self._settings = settings | dict.fromkeys(('post_processor', 'truncation', 'padding'))
    with tokenizer_base.library_errors(f'{where} is no unigram tokenizer'):
      pieces, added = settings['model']['vocab'], settings.get('added_tokens') or []
      entries = {i: piece for i, (piece, _) in enumerate(pieces)}
      entries |= {token['id']: token['content'] for token in added}
      special = {token['id'] for token in added if token['special']}
      require(sorted(entries) == list(range(len(entries))), f'{where} has gaps between its ids')
      # No text holds a piece with a space: a special token that somebody wrote is text.
      hidden = [[' ' + piece, score] if i in special else [piece, score]
                for i, (piece, score) in enumerate(pieces)]
      plain = self._settings | {'model': settings['model'] | {'vocab': hidden},
                                'added_tokens': [token for token in added if not token['special']]}
      self.library = tokenizers.Tokenizer.from_str(json.dumps(plain))
    self.vocab = [entries[i] for i in range(len(entries))]
    self._find_special(_NAMES, where, {piece: i for i, piece in entries.items()})

  def word_starts(self) -> np.ndarray:
    return np.array([entry.startswith(SPACE) for entry in self.vocab])

  encode_with_masks = tokenizer_base.Tokenizer.encode_with_masks

  def save(self, directory: epath.Path):
    # Not through the library: it reads some scores as their neighbours.
    around = json.loads(self._around_texts().__getstate__())
    complete = json.dumps(self._settings | {'post_processor': around}, ensure_ascii=False)
    self._save(directory, {'tokenizer.json': complete.encode()},
               {'tokenizer_class': 'PreTrainedTokenizerFast'})


def _from_model(path: epath.Path) -> dict[str, Any]:
  """The content of the tokenizer.json of a SentencePiece model, as transformers converts it."""
  content, model = spiece.read_model(path)
  require(spiece.character_map(content) is not None, f'{path} is no unigram model, as DeBERTa has')
  settings = storage.read_json_if_any(path.parent / tokenizer_base.CONFIG)
  pieces = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.get_piece_size())]
  added = []
  for i, (piece, score) in enumerate(pieces):
    is_special = model.is_control(i) or model.is_unknown(i)
    if is_special or score == 0:  # 0 is no logarithm of a frequency: the user has defined the piece
      added += tokenizer_base.added_tokens([piece], i, is_special)
  if '[MASK]' not in dict(pieces):
    added += tokenizer_base.added_tokens(['[MASK]'], len(pieces), True)
  library = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, model.unk_id(), False))
  library.normalizer = normalizers.Sequence([
      *([normalizers.Lowercase()] if settings.get('do_lower_case') else []),
      normalizers.Replace(tokenizers.Regex(r'\s{2,}|[\n\r\t]'), ' '), normalizers.NFC(),
      normalizers.Strip(left=False, right=True)])
  library.pre_tokenizer = pre_tokenizers.Sequence([
      *([pre_tokenizers.Punctuation()] if settings.get('split_by_punct') else []),
      pre_tokenizers.Metaspace(SPACE, 'always')])
  library.decoder = tokenizers.decoders.Metaspace(SPACE, 'always')
  return json.loads(library.to_str()) | {'added_tokens': added}


def load(path: epath.Path) -> UnigramPieces | None:
  """Loads spm.model, or a tokenizer.json; None = it is no unigram model with a [CLS]."""
  content = _from_model(path) if path.name == FILE else storage.read_json(path)
  model = content.get('model')
  if not isinstance(model, dict) or model.get('type') != 'Unigram':
    return None
  if '"[CLS]"' not in json.dumps([content.get('added_tokens'), model.get('vocab')]):
    return None  # another unigram model, as XLM-R has it
  return UnigramPieces(content, path)
