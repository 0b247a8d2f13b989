"""Tokenisers: WordPiece through `tokenizers`, SentencePiece through `sentencepiece`.

Both offer the same few things. Text of a corpus is encoded without parsing special tokens: a
"[MASK]" that somebody wrote is text. Only fill_mask asks for them to be parsed.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import functools
import hashlib
import io
import json
from typing import Protocol

from etils import epath
import numpy as np
import sentencepiece
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import trainers

from bert_jax.errors import UserError

KINDS = ('wordpiece', 'sentencepiece')
# In the order in which trained vocabularies begin, and under the names every published one uses.
SPECIAL_TOKENS = ('[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]')
# A cased vocabulary read in lower case would turn every capitalised word into pieces or [UNK].
_CASED_SHARE = 0.05


class Tokenizer(Protocol):
  """What the rest of bert_jax asks of a tokeniser."""

  kind: str
  vocab_size: int
  pad_id: int
  unk_id: int
  cls_id: int
  sep_id: int
  mask_id: int

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, without special tokens."""

  def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """Token ids of each text, and the character at which each token begins."""

  def encode_with_masks(self, text: str) -> list[int]:
    """Token ids of a text in which "[MASK]" stands for the mask token."""

  def word_starts(self) -> np.ndarray:
    """[V] bool: whether a word starts with this entry."""

  def tokens(self, ids: Sequence[int]) -> list[str]:
    """The vocabulary entry of each id."""

  def serialized(self) -> bytes:
    """All that decides what it does: the vocabulary and its settings."""

  def save(self, directory: epath.Path):
    """Writes the files that `load` reads."""


def special_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
  """The ids that masking leaves alone, ascending."""
  t = tokenizer
  return tuple(sorted((t.pad_id, t.unk_id, t.cls_id, t.sep_id, t.mask_id)))


def digest(tokenizer: Tokenizer) -> str:
  """A short hash of what the tokeniser does: the vocabulary and its settings."""
  return hashlib.blake2b(tokenizer.serialized(), digest_size=16).hexdigest()


class WordPiece:
  """BERT's own: clean, split at spaces, punctuation and CJK characters, longest match first.

  Equal to google-research/bert `tokenization.py` (lower-casing also strips accents).
  """

  kind = 'wordpiece'

  def __init__(self, vocab: Sequence[str], lowercase: bool = True):
    self.vocab, self.lowercase = list(vocab), lowercase
    ids = {token: i for i, token in enumerate(self.vocab)}
    self.vocab_size = len(self.vocab)
    self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
        ids[token] for token in SPECIAL_TOKENS)
    self._tokenizer = tokenizers.Tokenizer(
        models.WordPiece(ids, unk_token='[UNK]', max_input_chars_per_word=100))
    self._tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    self._tokenizer.decoder = decoders.WordPiece()

  @functools.cached_property
  def _with_masks(self) -> tokenizers.Tokenizer:
    parsing = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
    parsing.add_special_tokens(['[MASK]'])
    return parsing

  def untrained(self) -> tokenizers.Tokenizer:
    """The library's tokeniser, to be trained."""
    return self._tokenizer

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, without special tokens."""
    encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [e.ids for e in encodings]

  def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """Token ids of each text, and the character at which each token begins."""
    encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [(e.ids, [start for start, _ in e.offsets]) for e in encodings]

  def word_starts(self) -> np.ndarray:
    """[V] bool: whether a word starts with this entry."""
    return np.array([not token.startswith('##') for token in self.vocab])

  def encode_with_masks(self, text: str) -> list[int]:
    """Token ids of a text in which "[MASK]" stands for the mask token."""
    return self._with_masks.encode(text, add_special_tokens=False).ids

  def tokens(self, ids: Sequence[int]) -> list[str]:
    """The vocabulary entry of each id."""
    return [self.vocab[i] for i in ids]

  def serialized(self) -> bytes:
    """The vocabulary and settings as bytes."""
    return json.dumps([self.vocab, self.lowercase]).encode()

  def save(self, directory: epath.Path):
    """Writes vocab.txt, tokenizer_config.json and tokenizer.json, as Hugging Face has them."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / 'vocab.txt').write_text('\n'.join(self.vocab) + '\n')
    (directory / 'tokenizer_config.json').write_text(json.dumps(
        {'tokenizer_class': 'BertTokenizer', 'do_lower_case': self.lowercase}))
    (directory / 'tokenizer.json').write_text(self._tokenizer.to_str())


class SentencePiece:
  """A SentencePiece model; its ids are the library's own.

  Special tokens that the model does not have get the ids after its last piece.
  """

  kind = 'sentencepiece'
  _NAMES = {'pad': ('<pad>', '[PAD]'), 'unk': ('<unk>', '[UNK]'), 'cls': ('[CLS]', '<cls>'),
            'sep': ('[SEP]', '<sep>'), 'mask': ('[MASK]', '<mask>')}

  def __init__(self, model: bytes):
    self._model = model
    self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    self.vocab_size = self._processor.get_piece_size()
    self._appended = []
    for role, names in self._NAMES.items():
      known = (i for i in map(self._processor.piece_to_id, names)
               if i != self._processor.unk_id() and self._processor.id_to_piece(i) in names)
      index = self._processor.unk_id() if role == 'unk' else next(known, None)
      if index is None:
        index = self.vocab_size
        self.vocab_size += 1
        self._appended.append(f'[{role.upper()}]')
      setattr(self, f'{role}_id', index)

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, without special tokens."""
    return self._processor.encode(list(texts))

  def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """Token ids of each text, and the character at which each token begins."""
    encoded = (self._processor.encode(text, out_type='immutable_proto').pieces for text in texts)
    return [([p.id for p in pieces], [p.begin for p in pieces]) for pieces in encoded]

  def word_starts(self) -> np.ndarray:
    """[V] bool: whether a word starts with this entry."""
    size = self._processor.get_piece_size()
    starts = [self._processor.id_to_piece(i).startswith('\u2581') for i in range(size)]
    return np.array(starts + [True] * len(self._appended))

  def encode_with_masks(self, text: str) -> list[int]:
    """Token ids of a text in which "[MASK]" stands for the mask token."""
    first, *rest = map(self._processor.encode, text.split('[MASK]'))
    return first + [i for part in rest for i in (self.mask_id, *part)]

  def tokens(self, ids: Sequence[int]) -> list[str]:
    """The vocabulary entry of each id."""
    size = self._processor.get_piece_size()
    return [self._processor.id_to_piece(int(i)) if i < size else self._appended[i - size]
            for i in ids]

  def serialized(self) -> bytes:
    """The model file."""
    return self._model

  def save(self, directory: epath.Path):
    """Writes spiece.model."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / 'spiece.model').write_bytes(self._model)


def read_vocab(path: str | epath.Path) -> list[str]:
  """Reads vocab.txt: one entry a line.

  Raises:
    UserError: no such file, not UTF-8, an entry twice, or a special token that is not there.
  """
  try:
    # Split at \n alone: published vocabularies hold other characters that Python calls line ends.
    vocab = epath.Path(path).read_bytes().decode('utf-8').removesuffix('\n').split('\n')
  except OSError as e:
    raise UserError(f'data.vocab={str(path)!r} cannot be read: {e.strerror or e}') from e
  except UnicodeDecodeError as e:
    raise UserError(f'{path}: invalid UTF-8 at byte {e.start}: a vocabulary is a text file with '
                    'one entry a line') from e
  vocab = [entry.removesuffix('\r') for entry in vocab]
  missing = [token for token in SPECIAL_TOKENS if token not in vocab]
  if missing:
    raise UserError(f'{path}: the vocabulary has no {", ".join(missing)}: BERT needs '
                    f'{", ".join(SPECIAL_TOKENS)}, each on a line of its own')
  if len(set(vocab)) < len(vocab):
    seen = set()
    twice = next(t for t in vocab if t in seen or seen.add(t))
    raise UserError(f'{path}: the entry {twice!r} stands in the vocabulary twice')
  return vocab


def load(path: str | epath.Path, lowercase: bool | None = None) -> Tokenizer:
  """Loads a vocabulary file (vocab.txt), a SentencePiece model (*.model), or a folder with either.

  Args:
    path: the file or the folder.
    lowercase: of a WordPiece vocabulary; None = what its folder's tokenizer_config.json says.

  Raises:
    UserError: what is there is no vocabulary, or a cased one is to be read in lower case.
  """
  path = epath.Path(path)
  if path.is_dir():
    found = [path / name for name in ('vocab.txt', 'spiece.model') if (path / name).exists()]
    if not found:
      raise UserError(f'{path} holds neither vocab.txt nor spiece.model')
    settings = path / 'tokenizer_config.json'
    if lowercase is None and settings.exists():
      lowercase = json.loads(settings.read_text()).get('do_lower_case', True)
    path = found[0]
  if path.suffix == '.model':
    try:
      return SentencePiece(path.read_bytes())
    except OSError as e:
      raise UserError(f'data.vocab={str(path)!r} cannot be read: {e.strerror or e}') from e
    except RuntimeError as e:
      raise UserError(f'{path} is no SentencePiece model: {e}') from e
  vocab = read_vocab(path)
  lowercase = True if lowercase is None else lowercase
  words = [t for t in vocab if t not in SPECIAL_TOKENS and t.isalpha()]
  cased = sum(t != t.lower() for t in words)
  if lowercase and cased > _CASED_SHARE * len(words):
    raise UserError(f'{path} is a cased vocabulary ({cased} of {len(words)} words have capitals) '
                    'and the text would be lower-cased: set data.lowercase=False')
  return WordPiece(vocab, lowercase)


def _train_wordpiece(texts: Callable[[], Iterable[str]], vocab_size: int,
                     lowercase: bool) -> WordPiece:
  def entries(size, first):
    # Published vocabularies hold about 1,000 single characters; rarer ones become [UNK].
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=[*SPECIAL_TOKENS, *first], show_progress=False,
        limit_alphabet=max(vocab_size // 8, 100), min_frequency=2)
    untrained = WordPiece(SPECIAL_TOKENS, lowercase).untrained()
    untrained.train_from_iterator(texts(), trainer)
    return sorted(set(untrained.get_vocab()) - set(SPECIAL_TOKENS))

  # The trainer numbers the pieces inside words in the order of a hash table, and breaks ties
  # between equally frequent pairs by these numbers: another vocabulary every time. Its alphabet
  # alone does not depend on them; given first and sorted, it makes the rest the same every time.
  inside = [e for e in entries(len(SPECIAL_TOKENS), ()) if e.startswith('##')]
  return WordPiece([*SPECIAL_TOKENS, *entries(vocab_size, inside)], lowercase)


def train(kind: str, texts: Callable[[], Iterable[str]], vocab_size: int,
          lowercase: bool) -> Tokenizer:
  """Trains a vocabulary of at most `vocab_size` entries, special tokens included.

  Args:
    kind: wordpiece or sentencepiece.
    texts: reads the sentences from the start each time it is called.
    vocab_size: V.
    lowercase: lower-case the text (and strip its accents, for WordPiece).

  Raises:
    UserError: an unknown kind, a size that cannot be, or too little text for it.
  """
  if kind not in KINDS:
    raise UserError(f'data.tokenizer={kind!r} is unknown: use {" or ".join(KINDS)}')
  if vocab_size <= len(SPECIAL_TOKENS):
    raise UserError(f'model.vocab_size={vocab_size} leaves no room beside the special tokens')
  if kind == 'wordpiece':
    return _train_wordpiece(texts, vocab_size, lowercase)
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts()), model_writer=model, vocab_size=vocab_size,
        model_type='unigram', hard_vocab_limit=False, minloglevel=2, pad_id=0, unk_id=1, bos_id=-1,
        eos_id=-1, pad_piece='<pad>', unk_piece='<unk>',
        control_symbols=['[CLS]', '[SEP]', '[MASK]'],
        normalization_rule_name='nmt_nfkc_cf' if lowercase else 'nmt_nfkc',
        input_sentence_size=5_000_000, shuffle_input_sentence=False)
  except RuntimeError as e:
    raise UserError(f'SentencePiece cannot train {vocab_size} pieces on this corpus: {e}') from e
  return SentencePiece(model.getvalue())
