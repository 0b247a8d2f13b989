"""SentencePiece models: the library's ids, and text made ready as the published ALBERTs have it.

What is expected of ALBERT is what transformers 5.23's AlbertTokenizer does, on the strings of
interop/verify.py too; it cannot be asked here: it needs a newer protobuf than Beam allows.
"""

import io
import json

from etils import epath
import pytest
import sentencepiece

from bert_jax.data import spiece
from bert_jax.data import tokenizer as tokenizer_lib
from bert_jax.errors import UserError
from tests.data.test_tokenizer import TEXTS

TEXT = 'Café  ``NAÏVE\'\' e\u0301'


@pytest.fixture(scope='module')
def model() -> bytes:
  """Of lower-case letters without accents, each a piece at least."""
  made = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter([x.lower() for x in TEXTS] + ['cafe naive "quoted"']),
      model_writer=made, vocab_size=90, hard_vocab_limit=False, minloglevel=2, pad_id=0, unk_id=1,
      bos_id=-1, eos_id=-1, control_symbols=['[CLS]', '[SEP]', '[MASK]'])
  return made.getvalue()


def folder(path, model, **settings):
  """A folder of an ALBERT."""
  path.mkdir()
  (path / 'spiece.model').write_bytes(model)
  (path / 'config.json').write_text('{"model_type": "albert"}')
  if settings:
    (path / 'tokenizer_config.json').write_text(json.dumps(settings))
  return path


def test_ids_are_the_librarys(tmp_path):
  path = tmp_path / 'm.model'
  with path.open('wb') as f:  # as T5 has it: no [CLS], [SEP] or [MASK]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=f, vocab_size=90, hard_vocab_limit=False,
        minloglevel=2, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
  library = sentencepiece.SentencePieceProcessor(model_file=str(path))
  t = tokenizer_lib.load(path)
  assert t.encode_batch(TEXTS) == library.encode(TEXTS)
  size = library.get_piece_size()
  assert (t.pad_id, t.unk_id) == (0, 2)
  assert (t.cls_id, t.sep_id, t.mask_id, t.vocab_size) == (size, size + 1, size + 2, size + 3)
  assert t.tokens([size + 2]) == ['[MASK]']
  # Offsets count characters of the text as it was written; no token has the space before it.
  text = 'Über  the fine 😀 dogs, the end'
  (ids, spans), = t.encode_with_offsets([text])
  assert ids == t.encode_batch([text])[0]
  assert ''.join(text[a:b] for a, b in spans) == ''.join(text.split())
  assert not any(text[a:b] != text[a:b].strip() for a, b in spans)


def test_a_published_albert_reads_lower_case_without_accents(tmp_path, model):
  t = tokenizer_lib.load(folder(tmp_path / 'a', model))
  plain = sentencepiece.SentencePieceProcessor(model_proto=model)
  clean = 'cafe  "naive" e'
  assert t.encode_batch([TEXT]) == [plain.encode(clean)]
  assert t.encode_with_masks('CAFÉ [MASK]')[:-1] == plain.encode('cafe ')
  (ids, spans), = t.encode_with_offsets([TEXT])
  assert ids == plain.encode(clean)
  # Of the text as it was written: both quotes, and the letters that are stripped.
  assert ''.join(TEXT[a:b] for a, b in spans) == TEXT.replace(' ', '')
  assert t.encode_with_offsets([''])[0][1] == []


@pytest.mark.parametrize('settings, expected', [
    ({'do_lower_case': False, 'keep_accents': True}, spiece.Cleaning(False, False)),
    ({'do_lower_case': False}, spiece.Cleaning(False, True)),
    ({'keep_accents': True}, spiece.Cleaning(True, False))])
def test_settings_go_there_and_back(tmp_path, model, settings, expected):
  t = tokenizer_lib.load(folder(tmp_path / 'a', model, **settings))
  assert t._cleaning == expected
  t.save(epath.Path(tmp_path / 'b'))
  (tmp_path / 'b/config.json').write_text('{"model_type": "albert"}')
  again = tokenizer_lib.load(tmp_path / 'b')
  assert again._cleaning == expected
  assert tokenizer_lib.digest(again) == tokenizer_lib.digest(t)
  others = {tokenizer_lib.digest(spiece.SentencePiece(model, spiece.Cleaning(*c)))
            for c in ((False, False), (False, True), (True, False), (True, True))}
  assert len(others) == 4


def test_a_setting_that_is_none(tmp_path, model):
  with pytest.raises(UserError, match="keep_accents='no', which is neither true nor false"):
    tokenizer_lib.load(folder(tmp_path / 'a', model, keep_accents='no'))
