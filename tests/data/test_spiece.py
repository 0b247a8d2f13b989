"""SentencePiece models give the library's ids, and clean text and digits as ALBERT does."""

import io
import json
import unicodedata

from etils import epath
import pytest
import sentencepiece
import transformers

from bert_jax.data.tokenizers import base as tokenizer_base
from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.data.tokenizers import spiece, training
from bert_jax.errors import UserError
from bert_jax.interop import tokenizer_checks
from tests.data.test_tokenizer import TEXTS

TEXT = 'Café  ``NAÏVE\'\' e\u0301'


@pytest.fixture(scope='module')
def model() -> bytes:
  """A model of lower-case letters without accents; each letter is a piece."""
  buffer = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter([x.lower() for x in TEXTS] + ['cafe naive "quoted"']),
      model_writer=buffer, vocab_size=90, hard_vocab_limit=False, minloglevel=2, pad_id=0, unk_id=1,
      bos_id=-1, eos_id=-1, control_symbols=['[CLS]', '[SEP]', '[MASK]'])
  return buffer.getvalue()


@pytest.fixture(scope='module')
def with_commas() -> bytes:
  """A model of numbers, with pieces like "9," as in the published ALBERTs."""
  numbers = [f'{n}, {n},{n % 7} ("{n}")' for n in range(100)]
  buffer = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(numbers), model_writer=buffer, vocab_size=90, minloglevel=2, pad_id=0,
      unk_id=1, bos_id=-1, eos_id=-1, control_symbols=['[CLS]', '[SEP]', '[MASK]'],
      user_defined_symbols=['9,', '3,'], split_by_number=False, split_by_unicode_script=False,
      hard_vocab_limit=False)
  return buffer.getvalue()


def published(model: bytes, cleaning: spiece.Cleaning, text: str) -> list[int]:
  """Ids by the rules of google-research/albert and transformers 4, character by character."""
  library = sentencepiece.SentencePieceProcessor(model_proto=model)
  text = ' '.join(text.split()).replace('``', '"').replace("''", '"')
  if cleaning.strip_accents:
    text = ''.join(x for x in unicodedata.normalize('NFKD', text) if not unicodedata.combining(x))
  pieces = []
  for piece in library.encode(text.lower() if cleaning.lowercase else text, out_type=str):
    if len(piece) > 1 and piece[-1] == ',' and piece[-2].isdigit():
      digits = library.encode(piece[:-1].replace('\u2581', ''), out_type=str)
      if piece[0] != '\u2581' and digits[0][0] == '\u2581':
        digits = digits[1:] if len(digits[0]) == 1 else [digits[0][1:], *digits[1:]]
      pieces += [*digits, ',']
    else:
      pieces.append(piece)
  return [library.piece_to_id(piece) for piece in pieces]


def folder(path, model, **settings):
  """A folder of an ALBERT."""
  path.mkdir()
  (path / 'spiece.model').write_bytes(model)
  (path / 'config.json').write_text('{"model_type": "albert"}')
  if settings:
    (path / 'tokenizer_config.json').write_text(json.dumps(settings))
  return path


def test_ids_equal_the_library(tmp_path):
  path = tmp_path / 'm.model'
  with path.open('wb') as f:  # like T5: no [CLS], [SEP] or [MASK]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=f, vocab_size=90, hard_vocab_limit=False,
        minloglevel=2, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
  library = sentencepiece.SentencePieceProcessor(model_file=str(path))
  t = tokenizer_reader.load(path)
  assert t.encode_batch(TEXTS) == library.encode(TEXTS)
  size = library.get_piece_size()
  assert (t.pad_id, t.unk_id) == (0, 2)
  assert (t.cls_id, t.sep_id, t.mask_id, t.vocab_size) == (size, size + 1, size + 2, size + 3)
  assert t.tokens([size + 2]) == ['[MASK]']
  # Offsets count characters of the original text; no token includes the space before it.
  text = 'Über  the fine 😀 dogs, the end'
  (ids, spans), = t.encode_with_offsets([text])
  assert ids == t.encode_batch([text])[0]
  assert ''.join(text[a:b] for a, b in spans) == ''.join(text.split())
  assert not any(text[a:b] != text[a:b].strip() for a, b in spans)


def test_a_published_albert_reads_lower_case_without_accents(tmp_path, model):
  t = tokenizer_reader.load(folder(tmp_path / 'a', model))
  plain = sentencepiece.SentencePieceProcessor(model_proto=model)
  clean = 'cafe  "naive" e'
  assert t.encode_batch([TEXT]) == [plain.encode(clean)]
  assert t.encode_with_masks('CAFÉ [MASK]')[:-1] == plain.encode('cafe ')
  (ids, spans), = t.encode_with_offsets([TEXT])
  assert ids == plain.encode(clean)
  # The spans cover the original text, with both quotes and the stripped accents.
  assert ''.join(TEXT[a:b] for a, b in spans) == TEXT.replace(' ', '')
  assert t.encode_with_offsets([''])[0][1] == []
  # Nothing is left of the accent alone, only the space after it.
  (ids, spans), = t.encode_with_offsets(['\u0301 abc'])
  assert ids == plain.encode('abc') and (spans[0][0], spans[-1][1]) == (2, 5)


@pytest.mark.parametrize('cleaning', [spiece.Cleaning(), spiece.Cleaning(True, True)])
def test_hostile_strings_give_the_published_ids(model, with_commas, cleaning):
  commas = spiece.SentencePiece(with_commas, cleaning)
  for serialized in (model, with_commas):
    t = spiece.SentencePiece(serialized, cleaning)
    for text in (*tokenizer_checks.HOSTILE, TEXT, 'x ``9,9\'\' 13,'):
      if '[MASK]' in text:  # the reference looks [MASK] up as a piece
        continue
      expected = published(serialized, cleaning, text)
      (ids, spans), = t.encode_with_offsets([text])
      assert t.encode_batch([text]) == [ids] == [expected], text
      assert len(spans) == len(ids) and all(0 <= a <= b <= len(text) for a, b in spans)
  plain = sentencepiece.SentencePieceProcessor(model_proto=with_commas)
  assert plain.encode('9,9', out_type=str)[1:] == ['9,', '9']
  (ids, spans), = commas.encode_with_offsets(['``9,9'])
  assert commas.tokens(ids)[-3:] == ['9', ',', '9'] and spans[-3:] == [(2, 3), (3, 4), (4, 5)]


@pytest.mark.parametrize('cleaning', [spiece.Cleaning(), spiece.Cleaning(True, True)])
def test_an_export_reads_the_same_in_transformers(tmp_path, with_commas, cleaning):
  trained = training.train('sentencepiece', lambda: TEXTS, 120, True)._model
  for i, serialized in enumerate((trained, with_commas)):
    t = spiece.SentencePiece(serialized, cleaning)
    path = epath.Path(tmp_path / str(i))
    t.save(path)
    (path / 'config.json').write_text('{"model_type": "albert"}')
    theirs = transformers.AutoTokenizer.from_pretrained(str(path))
    assert [theirs.pad_token_id, theirs.unk_token_id, theirs.cls_token_id, theirs.sep_token_id,
            theirs.mask_token_id, len(theirs)] == [
                t.pad_id, t.unk_id, t.cls_id, t.sep_id, t.mask_id, t.vocab_size]
    for text in tokenizer_checks.HOSTILE:
      if '[MASK]' not in text:  # text to us, a special token to transformers
        assert theirs(text).input_ids == [t.cls_id, *t.encode_batch([text])[0], t.sep_id], text
    assert theirs('9, [MASK]').input_ids[-2] == t.mask_id


@pytest.mark.parametrize('settings, expected', [
    ({'do_lower_case': False, 'keep_accents': True}, spiece.Cleaning(False, False)),
    ({'do_lower_case': False}, spiece.Cleaning(False, True)),
    ({'keep_accents': True}, spiece.Cleaning(True, False))])
def test_cleaning_settings_survive_a_save(tmp_path, model, settings, expected):
  t = tokenizer_reader.load(folder(tmp_path / 'a', model, **settings))
  assert t._cleaning == expected
  t.save(epath.Path(tmp_path / 'b'))
  (tmp_path / 'b/config.json').write_text('{"model_type": "albert"}')
  again = tokenizer_reader.load(tmp_path / 'b')
  assert again._cleaning == expected
  assert tokenizer_base.digest(again) == tokenizer_base.digest(t)
  others = {tokenizer_base.digest(spiece.SentencePiece(model, spiece.Cleaning(*c)))
            for c in ((False, False), (False, True), (True, False), (True, True))}
  assert len(others) == 4


def test_a_setting_that_is_not_boolean_is_refused(tmp_path, model):
  with pytest.raises(UserError, match="keep_accents='no', which is neither true nor false"):
    tokenizer_reader.load(folder(tmp_path / 'a', model, keep_accents='no'))
