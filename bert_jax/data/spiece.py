"""SentencePiece models (Kudo and Richardson 2018), as ALBERT has them."""

from collections.abc import Sequence
import json
from typing import NamedTuple
import unicodedata

from etils import epath
import numpy as np
import sentencepiece

from bert_jax.data import storage
from bert_jax.errors import UserError

FILE = 'spiece.model'
_SETTINGS = 'tokenizer_config.json'
_SPACE = '\u2581'  # how the space before a word is written in a piece


class Cleaning(NamedTuple):
  """What is done to a text before the model sees it, outside the model's own rules."""

  lowercase: bool = False
  strip_accents: bool = False


# The published ALBERTs were trained on such text; their folders need not say so.
_ALBERT = Cleaning(lowercase=True, strip_accents=True)


def _cleaned(text: str, cleaning: Cleaning) -> tuple[str, list[tuple[int, int]]]:
  """The text as ALBERT's `preprocess_text` leaves it, and where each of its characters was."""
  clean, places, i = [], [], 0
  while i < len(text):
    piece, end = text[i], i + 1
    if text[i:i + 2] in ('``', "''"):
      piece, end = '"', i + 2
    if cleaning.strip_accents:
      piece = ''.join(x for x in unicodedata.normalize('NFKD', piece)
                      if not unicodedata.combining(x))
    if cleaning.lowercase:
      piece = piece.lower()
    clean.append(piece)
    if places and not piece:  # an accent of its own belongs to its letter
      places[-1] = places[-1][0], end
    places.extend([(i, end)] * len(piece))
    i = end
  return ''.join(clean), places


class SentencePiece:
  """A SentencePiece model; its ids are the library's own.

  Special tokens that the model does not have get the ids after its last piece.
  """

  kind, separators = 'sentencepiece', 1
  _NAMES = {'pad': ('<pad>', '[PAD]'), 'unk': ('<unk>', '[UNK]'), 'cls': ('[CLS]', '<cls>'),
            'sep': ('[SEP]', '<sep>'), 'mask': ('[MASK]', '<mask>')}

  def __init__(self, model: bytes, cleaning: Cleaning = Cleaning()):
    self._model, self._cleaning = model, cleaning
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
    if any(self._cleaning):
      texts = [_cleaned(text, self._cleaning)[0] for text in texts]
    return self._processor.encode(list(texts))

  def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list]]:
    """Token ids of each text, and the characters [start, end) of each token."""
    found = []
    for text in texts:
      places = None
      if any(self._cleaning):
        text, places = _cleaned(text, self._cleaning)
      encoded = self._processor.encode_as_offset_mapping(text)
      # A piece that begins a word has the space before it.
      spans = [(end - len(text[start:end].lstrip()), end) for start, end in encoded['offsets']]
      if places:
        spans = [(places[min(start, len(places) - 1)][0], places[max(end, 1) - 1][1])
                 for start, end in spans]
      found.append((list(encoded['ids']), spans))
    return found

  def word_starts(self) -> np.ndarray:
    """[V] bool: whether a word starts with this entry."""
    size = self._processor.get_piece_size()
    starts = [self._processor.id_to_piece(i).startswith(_SPACE) for i in range(size)]
    return np.array(starts + [True] * len(self._appended))

  def encode_with_masks(self, text: str) -> list[int]:
    """Token ids of a text in which "[MASK]" stands for the mask token."""
    first, *rest = self.encode_batch(text.split('[MASK]'))
    return first + [i for part in rest for i in (self.mask_id, *part)]

  def tokens(self, ids: Sequence[int]) -> list[str]:
    """The vocabulary entry of each id."""
    size = self._processor.get_piece_size()
    return [self._processor.id_to_piece(int(i)) if i < size else self._appended[i - size]
            for i in ids]

  def serialized(self) -> bytes:
    """The model file, and what is done to a text before."""
    return self._model + (json.dumps(self._cleaning).encode() if any(self._cleaning) else b'')

  def save(self, directory: epath.Path):
    """Writes spiece.model and tokenizer_config.json, as Hugging Face has them."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / FILE).write_bytes(self._model)
    settings = {'tokenizer_class': 'AlbertTokenizer', 'do_lower_case': self._cleaning.lowercase,
                'keep_accents': not self._cleaning.strip_accents}
    (directory / _SETTINGS).write_text(json.dumps(settings, indent=2) + '\n')


def _cleaning_of(directory: epath.Path) -> Cleaning:
  """What the files beside a model say; a published ALBERT that says nothing is as published."""
  default, settings = Cleaning(), {}
  of_model = directory / 'config.json'
  if of_model.exists() and storage.read_json(of_model).get('model_type') == 'albert':
    default = _ALBERT
  if (directory / _SETTINGS).exists():
    settings = storage.read_json(directory / _SETTINGS)
  lowercase = settings.get('do_lower_case', default.lowercase)
  keep_accents = settings.get('keep_accents', not default.strip_accents)
  for name, value in (('do_lower_case', lowercase), ('keep_accents', keep_accents)):
    if not isinstance(value, bool):
      raise UserError(f'{directory}/{_SETTINGS} has {name}={value!r}, which is neither true nor '
                      'false')
  return Cleaning(lowercase, not keep_accents)


def load(path: epath.Path) -> SentencePiece:
  """Reads a model file, and what its folder says of text that it is given.

  Raises:
    UserError: it cannot be read, or is none.
  """
  try:
    model = path.read_bytes()
  except OSError as e:
    raise UserError(f'data.vocab={str(path)!r} cannot be read: {e.strerror or e}') from e
  cleaning = _cleaning_of(path.parent) if path.name == FILE else Cleaning()
  try:
    return SentencePiece(model, cleaning)
  except RuntimeError as e:
    raise UserError(f'{path} is no SentencePiece model: {e}') from e
