"""Runs SentencePiece models (Kudo and Richardson 2018) as ALBERT does.

The ids equal the ids of google-research/albert `tokenization.py` and of the slow
AlbertTokenizer of transformers 4.
"""

from collections.abc import Sequence
import json
import re
from typing import Any, NamedTuple
import unicodedata

from etils import epath
from google.protobuf import empty_pb2, unknown_fields
import numpy as np
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from bert_jax.data.tokenizers import base, library
from bert_jax.errors import UserError, require
from bert_jax.runtime import storage

FILE = 'spiece.model'
# The class of the tokenizer.json that `save` also writes.
SAVED_AS = 'PreTrainedTokenizerFast'
# Field numbers in sentencepiece_model.proto.
_TRAINER, _NORMALIZER = 2, 3  # of the model
_MODEL_TYPE, _UNIGRAM = 3, 1  # of the trainer: the field, and its value for unigram
_CHARACTER_MAP = 2  # of the normalizer


class Cleaning(NamedTuple):
  """Changes to a text before the normalization of the model."""

  lowercase: bool = False
  strip_accents: bool = False


def _cleaned(text: str, cleaning: Cleaning) -> str:
  """Changes a text as ALBERT's `preprocess_text` does."""
  text = ' '.join(text.split()).replace('``', '"').replace("''", '"')
  if cleaning.strip_accents and not text.isascii():
    text = ''.join(x for x in unicodedata.normalize('NFKD', text)
                   if not unicodedata.combining(x))
  return text.lower() if cleaning.lowercase else text


def _places(text: str, cleaning: Cleaning) -> list[tuple[int, int]]:
  """The characters [start, end) of `text` that become each cleaned character."""
  places, i = [], 0
  for number, part in enumerate(re.finditer(r'\S+', text)):
    if number:  # also after a part of accents alone, of which nothing is left
      places.append((i, part.start()))
    i = part.start()
    while i < part.end():
      # Cleaning joins two quote characters into one, and changes the others one by one.
      end = i + (2 if text[i:i + 2] in ('``', "''") else 1)
      clean = _cleaned(text[i:end], cleaning)
      if places and not clean:
        # A separate accent character vanishes: it belongs to the letter before it.
        places[-1] = places[-1][0], end
      places.extend([(i, end)] * len(clean))
      i = end
  return places


def _fields(message: bytes) -> dict[int, int | bytes]:
  """Reads a protocol buffer as {field number: value}; the last value of each field."""
  # The generated class of the sentencepiece package requires one exact protobuf version.
  unknown = unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(message))
  return {field.field_number: field.data for field in unknown}


def character_map(model: bytes) -> bytes | None:
  """The normalization of a unigram model (b'' = none); None if it is not unigram."""
  fields = _fields(model)
  trainer, normalizer = (_fields(fields.get(x, b'')) for x in (_TRAINER, _NORMALIZER))
  if trainer.get(_MODEL_TYPE, _UNIGRAM) != _UNIGRAM:
    return None
  return normalizer.get(_CHARACTER_MAP, b'')


class SentencePiece(base.Tokenizer):
  """A SentencePiece model.

  The ids are the library's, except that pieces that end in a digit and a comma are split,
  as in ALBERT. Special tokens that the model lacks get the ids after its last piece.
  """

  kind = 'sentencepiece'
  _NAMES = {
      'pad': ('<pad>', '[PAD]'),
      'unk': ('<unk>', '[UNK]'),
      'cls': ('[CLS]', '<cls>'),
      'sep': ('[SEP]', '<sep>'),
      'mask': ('[MASK]', '<mask>'),
  }

  def __init__(self, model: bytes, cleaning: Cleaning = Cleaning()):
    import sentencepiece  # other tokenizers do not need it
    self._model, self._cleaning = model, cleaning
    self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    self._size = self._processor.get_piece_size()
    self.vocab = [self._processor.id_to_piece(i) for i in range(self._size)]
    ids = {piece: i for i, piece in enumerate(self.vocab)}
    for role, names in self._NAMES.items():
      index = next((ids[name] for name in names if name in ids), len(self.vocab))
      if role == 'unk':
        index = self._processor.unk_id()
      if index == len(self.vocab):
        self.vocab.append(f'[{role.upper()}]')
      setattr(self, f'{role}_id', index)
    self.entries = len(self.vocab)
    self.around = base.Around.berts(self.cls_id, self.sep_id)
    self._special_ids = {self.vocab[i]: i for i in base.special_ids(self)}
    self._special = re.compile('|'.join(map(re.escape, self._special_ids)))
    self._commas = {i: self._without_comma(piece)
                    for i, piece in enumerate(self.vocab[:self._size])
                    if piece[-1:] == ',' and piece[-2:-1].isdigit()}

  def _without_comma(self, piece: str) -> list[tuple[int, int]]:
    """(id, number of characters) of the pieces that replace "9,": digits and a comma."""
    pieces = self._processor.encode(piece[:-1].replace(base.SPACE, ''), out_type=str)
    if piece[0] != base.SPACE:
      pieces[:1] = [x.removeprefix(base.SPACE) for x in pieces[:1]]
    return [(self._processor.piece_to_id(x), len(x.removeprefix(base.SPACE)))
            for x in (*pieces, ',') if x]

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    if self.parses_special:
      return [ids for ids, _ in self.encode_with_offsets(texts)]
    encoded = self._processor.encode([_cleaned(text, self._cleaning) for text in texts])
    if not self._commas:
      return encoded
    return [[i for index in ids for i, _ in self._commas.get(index, [(index, 0)])]
            for ids in encoded]

  def encode_with_offsets(self, texts: Sequence[str]) -> list[base.Offsets]:
    encode = self._encode_parts if self.parses_special else self._encode_text
    return [encode(text) for text in texts]

  def _encode_parts(self, text: str) -> base.Offsets:
    """Encodes a text and parses its special tokens."""
    ids, spans, start = [], [], 0
    for match in (*self._special.finditer(text), None):
      end = match.start() if match else len(text)
      part_ids, part_spans = self._encode_text(text[start:end])
      ids += part_ids
      spans += [(start + a, start + b) for a, b in part_spans]
      if match:
        ids.append(self._special_ids[match[0]])
        spans.append(match.span())
        start = match.end()
    return ids, spans

  def _encode_text(self, text: str) -> base.Offsets:
    clean, places = _cleaned(text, self._cleaning), _places(text, self._cleaning)
    encoded, ids, spans = self._processor.encode_as_offset_mapping(clean), [], []
    for index, (start, end) in zip(encoded['ids'], encoded['offsets']):
      # The first piece of a word includes the space before it.
      start = end - len(clean[start:end].lstrip())
      for i, length in self._commas.get(index, [(index, end - start)]):
        stop = min(start + length, end)
        ids.append(i)
        spans.append((start, stop))
        start = stop
      spans[-1] = spans[-1][0], end
    # Maps spans of the cleaned text to the given text. A piece at the end may be empty.
    begins = [places[min(start, len(places) - 1)][0] for start, _ in spans]
    return ids, [(begin, places[end - 1][1] if end > start else begin)
                 for begin, (start, end) in zip(begins, spans)]

  def word_starts(self) -> np.ndarray:
    starts = np.array([entry.startswith(base.SPACE) for entry in self.vocab])
    starts[self._size:] = True
    # If no piece has a space, as in Japanese, each token is a word.
    return starts if starts[:self._size].any() else np.ones_like(starts)

  def serialized(self) -> bytes:
    return self._model + json.dumps(['albert', *self._cleaning]).encode()

  def _complete(self) -> tokenizers.Tokenizer | None:
    """The tokenizer for transformers, which parses special tokens; None if not a unigram.

    The unigram model of `tokenizers` cannot split a piece such as "9," after encoding. As
    in transformers' converter for ALBERT, such pieces get a very low score. Then other
    pieces win, nearly always the pieces of `_without_comma`.
    """
    normalization = character_map(self._model)
    if normalization is None:
      return None
    p = self._processor
    ids = range(self._size)
    complete = tokenizers.Tokenizer(tokenizers.models.Unigram(
        [(self.vocab[i], p.get_score(i) - 100 * (i in self._commas)) for i in ids],
        p.unk_id(), any(map(p.is_byte, ids))))
    spaces = ''.join(x for x in map(chr, range(0x3001)) if x.isspace())
    # The same steps as `_cleaned`, then the model's normalization.
    steps = [
        normalizers.Replace(tokenizers.Regex(f'[{spaces}]+'), ' '),
        normalizers.Strip(),
        normalizers.Replace('``', '"'),
        normalizers.Replace("''", '"'),
    ]
    if self._cleaning.strip_accents:
      # ALBERT strips by combining class, the library's StripAccents by category.
      marks = ''.join(filter(unicodedata.combining, map(chr, range(0x110000))))
      steps += [normalizers.NFKD(),
                normalizers.Replace(tokenizers.Regex(f'[{marks}]'), '')]
    if self._cleaning.lowercase:
      steps.append(normalizers.Lowercase())
    if normalization:
      steps.append(normalizers.Precompiled(normalization))
    complete.normalizer = normalizers.Sequence(steps)
    complete.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(base.SPACE, 'always')])
    complete.decoder = tokenizers.decoders.Metaspace(base.SPACE, 'always')
    controls = [self.vocab[i] for i in ids if p.is_control(i) or p.is_unknown(i)]
    complete.add_special_tokens(controls + self.vocab[self._size:])
    complete.post_processor = library.template(
        *((self.vocab[i], i) for i in (self.cls_id, self.sep_id)))
    return complete

  def save(self, directory: epath.Path, segments: bool | None = None):
    files, complete = {FILE: self._model}, self._complete()
    if complete:
      files['tokenizer.json'] = complete.to_str().encode()
    self._save(directory, files, {
        'tokenizer_class': SAVED_AS if complete else 'AlbertTokenizer',
        'do_lower_case': self._cleaning.lowercase,
        'keep_accents': not self._cleaning.strip_accents}, segments)


def _read_cleaning(directory: epath.Path) -> Cleaning:
  """The cleaning that a model's folder states, or the default of its model type."""
  model_config, settings = (storage.read_json_if_any(directory / name)
                            for name in ('config.json', base.CONFIG))
  # Published ALBERTs were trained on cleaned text, but not every folder says so.
  is_albert = model_config.get('model_type') == 'albert'
  cleaning = {'do_lower_case': is_albert, 'keep_accents': not is_albert}
  cleaning |= {name: settings[name] for name in cleaning if name in settings}
  for name, value in cleaning.items():
    require(isinstance(value, bool),
            f'{directory}/{base.CONFIG} has {name}={value!r}, which is neither true nor '
            'false')
  return Cleaning(cleaning['do_lower_case'], not cleaning['keep_accents'])


def read_model(path: epath.Path) -> tuple[bytes, Any]:
  """Reads a SentencePiece model; returns (its bytes, its processor).

  Raises:
    UserError: the file cannot be read or is not a SentencePiece model.
  """
  import sentencepiece  # other tokenizers do not need it
  try:
    model = path.read_bytes()
    require(model, f'{path} is empty: it is not a SentencePiece model')
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    # The processor accepts pieces that are not UTF-8, and cannot return them.
    processor.id_to_piece(list(range(processor.get_piece_size())))
    return model, processor
  except OSError as e:
    raise UserError(f'data.vocab={str(path)!r} cannot be read: {e.strerror or e}') from e
  except (RuntimeError, UnicodeDecodeError) as e:
    raise UserError(f'{path} is not a SentencePiece model: {e}') from e


def load(path: epath.Path) -> SentencePiece:
  """Reads a model file, and for a spiece.model also the settings in its folder.

  Raises:
    UserError: the file is not a SentencePiece model, or a setting is malformed.
  """
  model, _ = read_model(path)
  return SentencePiece(
      model, _read_cleaning(path.parent) if path.name == FILE else Cleaning())
