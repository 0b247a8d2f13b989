"""Tokenisers in a tokenizer.json: BPE and unigram models of the library `tokenizers`.

RoBERTa and ModernBERT have byte-level BPE (Radford et al. 2019): no text is unknown. XLM-R has a
unigram model, mmBERT a BPE that writes spaces as SentencePiece does. Special tokens are not parsed.
"""

from collections.abc import Callable, Collection, Iterable
import json
from typing import Any

from etils import epath
import numpy as np
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from bert_jax.data import tokenizer_base
from bert_jax.errors import UserError, require
from bert_jax.runtime import storage

_NAMES = {'cls': ('<s>', '[CLS]', '<bos>'), 'pad': ('<pad>', '[PAD]'),
          'sep': ('</s>', '[SEP]', '<eos>'), 'unk': ('<unk>', '[UNK]'),
          'mask': ('<mask>', '[MASK]')}
_SPECIAL = [names[0] for names in _NAMES.values()]  # as RoBERTa writes them
_MAX_ENTRIES = 2**24  # no vocabulary comes near
# How the space before a word is written in an entry, with and without the byte level.
_SPACES = {True: '\u0120', False: tokenizer_base.SPACE}


def _without(pieces: Collection[str], model: dict[str, Any]) -> dict[str, Any]:
  """Hides pieces of a unigram model from texts; other models stay as they are.

  A hidden piece keeps its id. Its name gets a space, which no piece of a text contains. A BPE needs
  no hiding: none of its merges makes a special token.
  """
  if model['type'] != 'Unigram':
    return model
  return model | {'vocab': [[f'{piece} ' if piece in pieces else piece, score]
                            for piece, score in model['vocab']]}


def _check_ids(vocab: Any, where: Any):
  """Raises UserError for ids with large gaps, through which the library would loop."""
  require(isinstance(vocab, dict), f'{where} has no vocabulary of entries and their ids')
  for entry, i in vocab.items():
    if not isinstance(i, int) or not 0 <= i < 2 * len(vocab):
      raise UserError(f'{where}: the id of {entry[:50]!r} is {str(i)[:50]}, among {len(vocab)} '
                      'entries')


class JsonTokenizer(tokenizer_base.LibraryTokenizer):
  """A BPE or a unigram model, with the rules around it that its file has.

  The constructor takes the content of a tokenizer.json, and its origin for messages. It raises
  UserError for something else, or if a special token is missing.
  """

  def __init__(self, settings: dict[str, Any], where: Any = 'tokenizer.json'):
    self._settings = settings
    model = settings.get('model') or {}
    self.kind = str(model.get('type', 'bpe')).lower()
    if self.kind == 'bpe':
      _check_ids(model.get('vocab'), where)
      self.before_word = ' '  # RoBERTa's file adds none: it takes each text for a whole one
    with tokenizer_base.library_errors(f'{where} is no tokenizer'):
      complete = tokenizers.Tokenizer.from_str(json.dumps(settings))  # raises if it is malformed
      tokens = settings.get('added_tokens') or ()
      added = {x['content']: int(x['id']) for x in tokens}
      special = {x['content']: added[x['content']] for x in tokens if x['special']}
      self.library = self._parsing()
    entries = {**complete.get_vocab(with_added_tokens=True), **added}
    # Gemma's <s> is an entry of HTML: a special token comes first.
    self._find_special(_NAMES, where, special, entries)
    around = [complete.num_special_tokens_to_add(is_pair) for is_pair in (False, True)]
    self.separators = max(around[1] - around[0], 1)
    size = max(entries.values()) + 1
    require(size <= _MAX_ENTRIES,
            f'{where} has an entry of id {size - 1}: the most is {_MAX_ENTRIES - 1}')
    self.vocab = [''] * size
    for entry, i in entries.items():
      self.vocab[i] = entry

  def _parsing(self, *special: str) -> tokenizers.Tokenizer:
    """A tokeniser that finds these special tokens in a text; the others are text."""
    tokens, model = self._settings.get('added_tokens') or (), self._settings['model']
    # Those that are not special, such as runs of spaces, are entries.
    text = [x['content'] for x in tokens if x['special'] and x['content'] not in special]
    plain = {'post_processor': None, 'model': _without(text, model),
             'added_tokens': [x for x in tokens if x['content'] not in text]}
    return tokenizers.Tokenizer.from_str(json.dumps(self._settings | plain))

  def word_starts(self) -> np.ndarray:
    space = _SPACES['ByteLevel' in json.dumps(self._settings.get('pre_tokenizer'))]
    return np.array([entry.startswith(space) for entry in self.vocab])

  def save(self, directory: epath.Path):
    content = json.dumps(self._settings, ensure_ascii=False).encode()
    self._save(directory, {'tokenizer.json': content},
               {'tokenizer_class': 'PreTrainedTokenizerFast'})


def _untrained(model: tokenizers.models.BPE, *, lowercase: bool,
               prefix_space: bool) -> tokenizers.Tokenizer:
  tokenizer = tokenizers.Tokenizer(model)
  if lowercase:
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  return tokenizer


def _with_special_tokens(tokenizer: tokenizers.Tokenizer, *, prefix_space: bool) -> JsonTokenizer:
  """Adds RoBERTa's special tokens, and its rule where they stand."""
  cls, pad, sep, unk, mask = _SPECIAL
  tokenizer.add_special_tokens([cls, pad, sep, unk])
  tokenizer.add_special_tokens([tokenizers.AddedToken(mask, lstrip=True, special=True)])
  tokenizer.post_processor = tokenizers.processors.RobertaProcessing(
      (sep, tokenizer.token_to_id(sep)), (cls, tokenizer.token_to_id(cls)),
      add_prefix_space=prefix_space)
  return JsonTokenizer(json.loads(tokenizer.to_str()))


def train(texts: Callable[[], Iterable[str]], vocab_size: int, lowercase: bool) -> JsonTokenizer:
  """Trains a vocabulary of at most `vocab_size` entries, special tokens included.

  The first word of a text is encoded like any other, as if a space stood before it.
  """
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  require(vocab_size >= len(alphabet) + len(_SPECIAL),
          f'model.vocab_size={vocab_size} leaves no room for the {len(alphabet)} bytes and '
          f'{len(_SPECIAL)} special tokens of data.tokenizer=bpe')
  tokenizer = _untrained(tokenizers.models.BPE(), lowercase=lowercase, prefix_space=True)
  tokenizer.train_from_iterator(texts(), tokenizers.trainers.BpeTrainer(
      vocab_size=vocab_size, min_frequency=2, special_tokens=_SPECIAL, initial_alphabet=alphabet,
      show_progress=False))
  return _with_special_tokens(tokenizer, prefix_space=True)


def load(path: epath.Path) -> JsonTokenizer | None:
  """Loads a tokenizer.json, or a vocab.json with merges.txt; None = it is of another kind."""
  merges = path.parent / 'merges.txt'
  content = storage.read_json(path)
  if path.name != 'vocab.json' or not merges.exists():
    model = content.get('model')
    is_known = isinstance(model, dict) and model.get('type') in ('BPE', 'Unigram')
    return JsonTokenizer(content, path) if is_known else None
  _check_ids(content, path)
  with tokenizer_base.library_errors(f'{path} and {merges} are no BPE'):
    model = tokenizers.models.BPE.from_file(str(path), str(merges))
  return _with_special_tokens(_untrained(model, lowercase=False, prefix_space=False),
                              prefix_space=False)
