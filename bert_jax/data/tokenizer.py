"""Tokenisers: WordPiece. `spiece.py`, `fairseq.py`, `deberta_pieces.py` and `bpe.py` have others.

Text of a corpus is encoded without parsing special tokens: a "[MASK]" that somebody wrote is text.
Only fill_mask parses them.
"""

import collections
from collections.abc import Collection, Sequence
import functools
import hashlib
import json
import re
import unicodedata

from etils import epath
import numpy as np
import tokenizers

from bert_jax.data import bpe, deberta_pieces, fairseq, spiece, tokenizer_base
from bert_jax.data.tokenizer_base import Tokenizer
from bert_jax.errors import UserError, require
from bert_jax.runtime import storage

# In the order in which trained vocabularies begin, and under the names every published one uses.
SPECIAL_TOKENS = ('[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]')
_MPNET = ('<pad>', '[UNK]', '<s>', '</s>', '<mask>')  # as in fairseq, but for [UNK]
# A cased vocabulary read in lower case would turn every capitalised word into pieces or [UNK].
_CASED_SHARE = 0.05  # of the words, from which a vocabulary is cased
_TABLE_MULTIPLE = 64  # to which tables beside a vocab.txt are padded, for speed
# A text of these characters alone is simple: BERT's normaliser lower-cases letters of ASCII, puts
# spaces around Han characters, and leaves the others as they are.
_SIMPLE = re.compile('[ -~\xa1-\xac\xae-\xbf\xd7\xf7\u2010-\u2027\u2030-\u205e\u3001-\u3020'
                     '\u3400-\u4dbf\u4e00-\u9fff\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40'
                     '\uff5b-\uff65]*')
_MOST_UNUSED = 1024  # rows of a table beyond the vocabulary: DeBERTa v3 has 99, multilingual E5 35


def special_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
  """The ids that masking leaves alone, ascending."""
  t = tokenizer
  return tuple(sorted((t.pad_id, t.unk_id, t.cls_id, t.sep_id, t.mask_id)))


def digest(tokenizer: Tokenizer) -> str:
  """A short hash of the vocabulary and its settings."""
  return hashlib.blake2b(tokenizer.serialized(), digest_size=16).hexdigest()


@functools.cache  # a text asks for each of its characters
def _is_mark(character: str) -> bool:
  """True for an accent that stands behind its letter, a character of its own."""
  return unicodedata.category(character).startswith('M')


@functools.cache
def _spaces_around_han() -> dict[int, str]:
  """For `str.translate`."""
  return {code: f' {chr(code)} ' for code in (*range(0x3400, 0x4dc0), *range(0x4e00, 0xa000))}


def _special_of(vocab: Collection[str]) -> tuple[str, ...]:
  return _MPNET if all(token in vocab for token in _MPNET) else SPECIAL_TOKENS


class WordPiece(tokenizer_base.LibraryTokenizer):
  """BERT's own: clean, split at spaces, punctuation and CJK characters, longest match first.

  Equal to google-research/bert `tokenization.py`.

  Args of the constructor:
    strip_accents: None = like `lowercase`, as published.
    split_chinese: each CJK character is a word of its own.
    whole: entries with punctuation, such as "covid-19", which are matched before the text is split.
  """

  kind = 'wordpiece'

  def __init__(self, vocab: Sequence[str], lowercase: bool = True,
               strip_accents: bool | None = None, split_chinese: bool = True,
               whole: Sequence[str] = ()):
    self.vocab, self.lowercase, self.whole = list(vocab), lowercase, tuple(whole)
    self._strip_accents, self._split_chinese = strip_accents, split_chinese
    ids = {token: i for i, token in enumerate(self.vocab)}
    self.special = _special_of(ids)
    self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
        ids[token] for token in self.special)
    self.separators = 2 if self.special == _MPNET else 1
    self.library = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(ids, unk_token='[UNK]', max_input_chars_per_word=100))
    self.library.normalizer = tokenizers.normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=split_chinese)
    self.library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    self._of_normalised = tokenizers.Tokenizer(self.library.model)
    self._of_normalised.pre_tokenizer = self.library.pre_tokenizer
    self.library.decoder = tokenizers.decoders.WordPiece()
    self.library.add_tokens([tokenizers.AddedToken(word, single_word=True, normalized=True)
                             for word in self.whole])

  def _normalised(self, text: str) -> str | None:
    """A simple text as the library's normaliser has it; None for other texts."""
    if self.whole or not _SIMPLE.fullmatch(text):
      return None
    if self._split_chinese and not text.isascii():
      text = text.translate(_spaces_around_han())
    return text.lower() if self.lowercase else text

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    # The library's normaliser follows each character to its place: a third of all its time.
    normalised = [self._normalised(text) for text in texts]
    others = iter(super().encode_batch(
        [text for text, simple in zip(texts, normalised) if simple is None]))
    encodings = iter(self._of_normalised.encode_batch_fast(
        [simple for simple in normalised if simple is not None], add_special_tokens=False))
    return [next(others) if simple is None else next(encodings).ids for simple in normalised]

  def _spans(self, text: str, offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The offsets, with the accents that stripping has removed from the end of a token."""
    if text.isascii() or not any(map(_is_mark, set(text))):
      return offsets

    def behind(end):
      while end < len(text) and _is_mark(text[end]):
        end += 1
      return end

    return [(start, behind(end)) for start, end in offsets]

  def word_starts(self) -> np.ndarray:
    return np.array([not token.startswith('##') for token in self.vocab])

  def extended(self, words: Sequence[str]) -> 'WordPiece':
    """The same tokeniser with more entries, after all others."""
    split = self.library.pre_tokenizer.pre_tokenize_str
    whole = [word for word in words if len(split(self.clean(word))) > 1]
    return WordPiece([*self.vocab, *words], self.lowercase, self._strip_accents,
                     self._split_chinese, [*self.whole, *whole])

  def padded(self, size: int) -> 'WordPiece':
    if size % _TABLE_MULTIPLE:  # a vocab.txt that has lost its end must not pass for a short one
      return self
    unused = tokenizer_base.unused_names(self.vocab_size, size)
    return WordPiece([*self.vocab, *unused], self.lowercase, self._strip_accents,
                     self._split_chinese, self.whole)

  def clean(self, text: str) -> str:
    """A text without control characters, and in lower case if the vocabulary is."""
    return self.library.normalizer.normalize_str(text).strip()

  def serialized(self) -> bytes:
    settings = [self.vocab, self.lowercase]
    others = [self._strip_accents, self._split_chinese]
    if others != [None, True] or self.whole:  # digests of the usual settings stay as they were
      settings += others
    if self.whole:
      settings.append(self.whole)
    return json.dumps(settings).encode()

  def save(self, directory: epath.Path):
    complete = tokenizers.Tokenizer.from_str(self.library.to_str())
    is_mpnet = self.special == _MPNET
    complete.add_special_tokens([*self.special[:-1], tokenizers.AddedToken(
        self.special[-1], lstrip=is_mpnet, special=True)])
    complete.post_processor = self._around_texts()
    self._save(directory, {'vocab.txt': ('\n'.join(self.vocab) + '\n').encode(),
                           'tokenizer.json': complete.to_str().encode()},
               {'tokenizer_class': 'MPNetTokenizer' if is_mpnet else 'BertTokenizer',
                'do_lower_case': self.lowercase,
                'strip_accents': self._strip_accents,
                'tokenize_chinese_chars': self._split_chinese})


def read_vocab(path: str | epath.Path) -> list[str]:
  """Reads vocab.txt, one entry a line; raises UserError if it is no vocabulary of BERT."""
  try:
    # Split at \n alone: published vocabularies hold other characters that Python calls line ends.
    vocab = epath.Path(path).read_bytes().decode('utf-8-sig').removesuffix('\n').split('\n')
  except OSError as e:
    raise UserError(f'data.vocab={str(path)!r} cannot be read: {e.strerror or e}') from e
  except UnicodeDecodeError as e:
    raise UserError(f'{path}: invalid UTF-8 at byte {e.start}: a vocabulary is a text file with '
                    'one entry a line') from e
  return _checked_vocab([entry.removesuffix('\r') for entry in vocab], path)


def _checked_vocab(vocab: list[str], path: str | epath.Path) -> list[str]:
  missing = [token for token in _special_of(vocab) if token not in vocab]
  require(not missing, f'{path}: the vocabulary has no {", ".join(missing)}: BERT needs '
          f'{", ".join(SPECIAL_TOKENS)}, each on a line of its own')
  entry, count = collections.Counter(vocab).most_common(1)[0]
  require(count == 1, f'{path}: the entry {entry!r} stands in the vocabulary twice')
  return vocab


def is_cased(vocab: Sequence[str]) -> bool:
  """True if a vocabulary was made from text with capitals."""
  words = [t for t in vocab if t not in SPECIAL_TOKENS and t.isalpha()]
  return sum(t != t.lower() for t in words) > _CASED_SHARE * len(words)


def _settings(directory: epath.Path) -> dict:
  """A WordPiece folder's settings by BertNormalizer's names; tokenizer_config.json comes first.

  'added' holds its added tokens: (id, content, whether it is special).
  """
  content = storage.read_json_if_any(directory / 'tokenizer.json')
  settings = content.get('normalizer') or {}
  try:
    settings['added'] = sorted((int(token['id']), str(token['content']), bool(token['special']))
                               for token in content.get('added_tokens') or ())
  except (TypeError, KeyError, ValueError) as e:
    raise UserError(f'{directory}/tokenizer.json: an entry of added_tokens has no id, has no '
                    'content or does not say whether it is special') from e
  config = storage.read_json_if_any(directory / tokenizer_base.CONFIG)
  for theirs, ours in (('do_lower_case', 'lowercase'), ('strip_accents', 'strip_accents'),
                       ('tokenize_chinese_chars', 'handle_chinese_chars')):
    if theirs in config:
      settings[ours] = config[theirs]
    value = settings.get(ours)
    require(isinstance(value, bool | None),
            f'{directory}: its tokenizer has {ours}={value!r}, which is neither true nor false')
  return settings


def _vocab_of_json(path: epath.Path) -> list[str]:
  """The entries of a WordPiece tokenizer.json, in the order of their ids."""
  model = storage.read_json(path).get('model')
  kind = model.get('type') if isinstance(model, dict) else None
  require(kind == 'WordPiece' and isinstance(model.get('vocab'), dict),
          f'{path} is of type {kind!r}: known are WordPiece, BPE and Unigram; a vocab.json needs '
          'its merges.txt beside it')
  ids = model['vocab']
  require(set(ids.values()) == set(range(len(ids))), f'{path} has gaps between its ids')
  return _checked_vocab(sorted(ids, key=ids.get), path)


def _with_added(vocab: list[str], added: Sequence[tuple[int, str, bool]], path: epath.Path
                ) -> tuple[list[str], list[str]]:
  """(the entries with the added tokens at their ids, the added tokens that texts hold)."""
  vocab, known = list(vocab), set(vocab)
  for index, content, _ in added:
    if content not in known:
      require(index == len(vocab), f'{path}: tokenizer.json adds {content!r} as entry {index}, the '
                                   f'vocabulary has {len(vocab)}: there are gaps between its ids')
      vocab.append(content)
  return vocab, [content for _, content, special in added if not special]


def load(path: str | epath.Path, lowercase: bool | None = None) -> Tokenizer:
  """Loads vocab.txt, tokenizer.json, a SentencePiece model (*.model), or a folder with one of them.

  The vocab.json of a byte-level BPE has its merges.txt beside it. `lowercase` is for WordPiece;
  None = as tokenizer_config.json or tokenizer.json says. The table of a published model may have
  more rows than its vocabulary has entries: the config.json beside it counts them. Raises UserError
  if there is no vocabulary, or a cased one would be read in lower case.
  """
  path = epath.Path(path)
  tokenizer = _read(path, lowercase)
  config = (path if path.is_dir() else path.parent) / 'config.json'
  rows = storage.read_json_if_any(config).get('vocab_size')
  if isinstance(rows, int) and 0 < rows - tokenizer.vocab_size <= _MOST_UNUSED:
    return tokenizer.padded(rows)
  return tokenizer


def _read(path: epath.Path, lowercase: bool | None) -> Tokenizer:
  settings = {}
  directory = path if path.is_dir() else None
  if directory:
    names = ('vocab.txt', spiece.FILE, 'tokenizer.json', fairseq.FILE, deberta_pieces.FILE,
             'vocab.json')
    path = next((directory / name for name in names if (directory / name).exists()), None)
    require(path, f'{directory} holds no vocabulary: none of {", ".join(names)}')
  if path.suffix == '.model':
    of_name = {fairseq.FILE: fairseq.load, deberta_pieces.FILE: deberta_pieces.load}
    return of_name.get(path.name, spiece.load)(path)
  if path.suffix == '.json' and (tokenizer := deberta_pieces.load(path) or bpe.load(path)):
    return tokenizer
  if directory or path.name == 'tokenizer.json':
    settings = _settings(path.parent)
  vocab = _vocab_of_json(path) if path.suffix == '.json' else read_vocab(path)
  vocab, whole = _with_added(vocab, settings.get('added', ()), path)
  if lowercase is None:
    lowercase = settings.get('lowercase', True)
  require(not lowercase or not is_cased(vocab), f'{path} is a cased vocabulary (its words have '
          'capitals) and the text would be lower-cased: set data.lowercase=False')
  return WordPiece(vocab, lowercase, settings.get('strip_accents'),
                   settings.get('handle_chinese_chars', True), whole)
