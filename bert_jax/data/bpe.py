"""Byte-level BPE (Radford et al. 2019), as RoBERTa and ModernBERT have it: no text is unknown.

A tokeniser of the library `tokenizers`, whatever its settings, whose special tokens are not parsed.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import functools
import json
from typing import Any

from etils import epath
import numpy as np
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors
from tokenizers import trainers

from bert_jax.errors import UserError
from bert_jax.runtime import storage

_NAMES = {'cls': ('<s>', '[CLS]'), 'pad': ('<pad>', '[PAD]'), 'sep': ('</s>', '[SEP]'),
          'unk': ('<unk>', '[UNK]'), 'mask': ('<mask>', '[MASK]')}
_MOST = 2**24  # entries: no vocabulary comes near
_SPACE = '\u0120'  # how the space before a word is written in an entry


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
  """Makes one line of what the library says, which has no class of its own for it."""
  try:
    yield
  except BaseException as e:  # where Rust panics it is not even an Exception
    if not isinstance(e, Exception) and type(e).__name__ != 'PanicException':
      raise
    raise UserError(f'{what}: {" ".join(str(e).split())[:200]}') from e


def _check_ids(vocab: Any, where: Any):
  """Raises UserError for ids with large gaps, each of which the library would go through."""
  if not isinstance(vocab, dict):
    raise UserError(f'{where} has no vocabulary of entries and their ids')
  for entry, i in vocab.items():
    if not isinstance(i, int) or not 0 <= i < 2 * len(vocab):
      raise UserError(f'{where}: the id of {entry[:50]!r} is {str(i)[:50]}, among {len(vocab)} '
                      'entries')


class ByteBPE:
  """Bytes merged into ever longer pieces.

  Args of the constructor:
    settings: of a tokenizer.json, read.
    where: it is from, for people.

  Raises:
    UserError: it is no byte-level BPE, or lacks a special token.
  """

  kind = 'bpe'

  def __init__(self, settings: dict[str, Any], where: Any = 'tokenizer.json'):
    self._settings = settings
    _check_ids((settings.get('model') or {}).get('vocab'), where)
    with _told(f'{where} is no tokenizer'):
      tokenizers.Tokenizer.from_str(json.dumps(settings))  # says what is malformed
      tokens = settings.get('added_tokens') or ()
      added = {x['content']: int(x['id']) for x in tokens}
      # Those that are special are text in a corpus; others, runs of spaces say, are entries.
      plain = settings | {'post_processor': None,
                          'added_tokens': [x for x in tokens if not x['special']]}
      self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(plain))
    entries = {**self._tokenizer.get_vocab(with_added_tokens=True), **added}
    for role, names in _NAMES.items():
      index = next((entries[name] for name in names if name in entries), None)
      if index is None:
        raise UserError(f'{where} has no {" or ".join(names)}: BERT needs it')
      setattr(self, f'{role}_id', index)
    around = settings.get('post_processor') or {}
    self.separators = 2 if around.get('type') == 'RobertaProcessing' else 1
    self.vocab_size = max(entries.values()) + 1
    if self.vocab_size > _MOST:
      raise UserError(f'{where} has an entry of id {self.vocab_size - 1}: the most is {_MOST - 1}')
    self._entries = [''] * self.vocab_size
    for entry, i in entries.items():
      self._entries[i] = entry

  @functools.cached_property
  def _with_masks(self) -> tokenizers.Tokenizer:
    parsing = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
    parsing.add_special_tokens([tokenizers.AddedToken(
        self._entries[self.mask_id], lstrip=True, special=True)])
    return parsing

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, without special tokens."""
    encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [e.ids for e in encodings]

  def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list]]:
    """Token ids of each text, and the characters [start, end) of each token."""
    found = []
    for text, e in zip(texts, self._tokenizer.encode_batch(list(texts), add_special_tokens=False)):
      # A piece that begins a word has the space before it.
      spans = [(end - len(text[start:end].lstrip()), end) for start, end in e.offsets]
      found.append((e.ids, spans))
    return found

  def encode_with_masks(self, text: str) -> list[int]:
    """Token ids of a text in which "[MASK]" stands for the mask token."""
    text = text.replace('[MASK]', self._entries[self.mask_id])
    return self._with_masks.encode(text, add_special_tokens=False).ids

  def word_starts(self) -> np.ndarray:
    """[V] bool: whether a word starts with this entry."""
    return np.array([entry.startswith(_SPACE) for entry in self._entries])

  def tokens(self, ids: Sequence[int]) -> list[str]:
    """The vocabulary entry of each id."""
    return [self._entries[i] for i in ids]

  def serialized(self) -> bytes:
    """All settings as bytes."""
    return json.dumps(self._settings, sort_keys=True).encode()

  def save(self, directory: epath.Path):
    """Writes tokenizer.json, and the tokenizer_config.json that Hugging Face wants beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / 'tokenizer.json').write_text(json.dumps(self._settings, ensure_ascii=False))
    roles = {f'{role}_token': self._entries[getattr(self, f'{role}_id')] for role in _NAMES}
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', **roles}
    (directory / 'tokenizer_config.json').write_text(json.dumps(config, indent=2) + '\n')


def _settings(model: models.BPE, lowercase: bool, spaced: bool) -> tokenizers.Tokenizer:
  made = tokenizers.Tokenizer(model)
  if lowercase:
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
  made.decoder = decoders.ByteLevel()
  return made


def _finished(made: tokenizers.Tokenizer, spaced: bool) -> ByteBPE:
  """With its special tokens, which stand around texts as RoBERTa has them."""
  cls, pad, sep, unk, mask = (names[0] for names in _NAMES.values())
  made.add_special_tokens([cls, pad, sep, unk])
  made.add_special_tokens([tokenizers.AddedToken(mask, lstrip=True, special=True)])
  made.post_processor = processors.RobertaProcessing(
      (sep, made.token_to_id(sep)), (cls, made.token_to_id(cls)), add_prefix_space=spaced)
  return ByteBPE(json.loads(made.to_str()))


def train(texts: Callable[[], Iterable[str]], vocab_size: int, lowercase: bool) -> ByteBPE:
  """Trains a vocabulary of at most `vocab_size` entries, special tokens included.

  The first word of a text is written as any other, as if a space stood before it.

  Raises:
    UserError: no room for the bytes.
  """
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  special = [names[0] for names in _NAMES.values()]
  if vocab_size < len(alphabet) + len(special):
    raise UserError(f'model.vocab_size={vocab_size} leaves no room for the {len(alphabet)} bytes '
                    f'and {len(special)} special tokens of data.tokenizer=bpe')
  made = _settings(models.BPE(), lowercase, spaced=True)
  made.train_from_iterator(texts(), trainers.BpeTrainer(
      vocab_size=vocab_size, min_frequency=2, special_tokens=special, initial_alphabet=alphabet,
      show_progress=False))
  return _finished(made, spaced=True)


def load(path: epath.Path) -> ByteBPE | None:
  """Loads a tokenizer.json, or a vocab.json with merges.txt beside it; None = it is no BPE.

  Raises:
    UserError: the file is damaged, or no byte-level BPE of BERT's kind.
  """
  merges = path.parent / 'merges.txt'
  content = storage.read_json(path)
  if path.name != 'vocab.json' or not merges.exists():
    model = content.get('model')
    is_bpe = isinstance(model, dict) and model.get('type') == 'BPE'
    return ByteBPE(content, path) if is_bpe else None
  _check_ids(content, path)
  with _told(f'{path} and {merges} are no BPE'):
    model = models.BPE.from_file(str(path), str(merges))
  return _finished(_settings(model, lowercase=False, spaced=False), spaced=False)
