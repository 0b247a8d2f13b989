"""The pieces of DeBERTa give the ids of transformers' DebertaV2Tokenizer, from either file."""

import importlib
import json

from etils import epath
import pytest
import sentencepiece
import transformers
from transformers.utils import sentencepiece_model_pb2_new

from bert_jax.data.tokenizers import base as tokenizer_base
from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.errors import UserError
from bert_jax.interop import tokenizer_checks
from tests.data.test_tokenizer import TEXTS

HOSTILE = [text for text in tokenizer_checks.HOSTILE if '[MASK]' not in text] + [
    'Two  spaces,   three', ' in front', 'behind  \n', 'word\u2581word', '\x0b\u2028lines\u3000']


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A model with the published special tokens: [PAD] [CLS] [SEP] [UNK], no [MASK]."""
  folder = tmp_path_factory.mktemp('pieces')
  sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter([*TEXTS, 'CAFÉ naïve "quoted" 1,000 日本語 Привет é']),
      model_prefix=str(folder / 'spm'), vocab_size=150, hard_vocab_limit=False, minloglevel=2,
      pad_id=0, bos_id=1, eos_id=2, unk_id=3, pad_piece='[PAD]', bos_piece='[CLS]',
      eos_piece='[SEP]', unk_piece='[UNK]', user_defined_symbols=['\u00e9t'])
  return folder


def settings_of(folder, tmp_path, **settings):
  tmp_path.mkdir(exist_ok=True)
  (tmp_path / 'spm.model').write_bytes((folder / 'spm.model').read_bytes())
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(settings))
  return tmp_path


@pytest.mark.parametrize('settings', [
    {}, {'do_lower_case': True}, {'split_by_punct': True}])
def test_hostile_strings_give_the_ids_of_transformers(folder, tmp_path, monkeypatch, settings):
  # The class in the sentencepiece package requires a newer protobuf than others allow.
  monkeypatch.setattr(importlib.import_module('transformers.convert_slow_tokenizer'),
                      'import_protobuf', lambda *_: sentencepiece_model_pb2_new)
  theirs = transformers.DebertaV2Tokenizer.from_pretrained(
      str(settings_of(folder, tmp_path / 'a', **settings)))
  t = tokenizer_reader.load(tmp_path / 'a')
  assert (t.pad_id, t.cls_id, t.sep_id, t.unk_id) == (0, 1, 2, 3)
  assert t.mask_id == theirs.mask_token_id == t.vocab_size - 1 == len(theirs) - 1
  theirs.save_pretrained(str(tmp_path / 'b'))  # as tokenizer.json
  (tmp_path / 'b/tokenizer_config.json').unlink()
  t.save(epath.Path(tmp_path / 'c'))
  exported = transformers.AutoTokenizer.from_pretrained(str(tmp_path / 'c'))
  others = [tokenizer_reader.load(tmp_path / name) for name in 'bc']
  assert tokenizer_base.digest(others[1]) == tokenizer_base.digest(t)
  unknown = 0
  for text in (*HOSTILE, 'é été étude'):
    expected = theirs(text).input_ids
    assert exported(text).input_ids == expected, text
    for one in (t, *others):
      (ids, spans), = one.encode_with_spans([text])
      assert [1, *ids, 2] == [1, *one.encode_batch([text])[0], 2] == expected, text
      assert len(spans) == len(ids) and all(0 <= a <= b <= len(text) for a, b in spans)
      assert not any(text[a:b] != text[a:b].lstrip() for a, b in spans)
    unknown += expected.count(3)
  assert unknown > 20  # other alphabets
  masked = 'The [MASK] sat. [MASK][MASK] x'
  assert [1, *t.encode_with_masks(masked), 2] == theirs(masked).input_ids
  # Special tokens that a user wrote are text.
  assert not {0, 1, 2, t.mask_id} & set(t.encode_batch(['[CLS] [MASK] [SEP] [PAD] x[CLS]'])[0])


def test_extra_table_rows_extend_the_vocabulary_but_not_the_export(folder, tmp_path):
  settings_of(folder, tmp_path)
  plain = tokenizer_reader.load(tmp_path)
  (tmp_path / 'config.json').write_text(json.dumps({'vocab_size': plain.vocab_size + 99}))
  t = tokenizer_reader.load(tmp_path)
  assert t.vocab_size == plain.vocab_size + 99 and t.vocab[:plain.vocab_size] == plain.vocab
  assert t.mask_id == plain.mask_id and t.encode_batch(HOSTILE) == plain.encode_batch(HOSTILE)
  t.save(epath.Path(tmp_path / 'again'))
  assert tokenizer_reader.load(tmp_path / 'again').vocab == t.vocab
  exported = transformers.AutoTokenizer.from_pretrained(str(tmp_path / 'again'))
  assert len(exported) == plain.vocab_size == t.entries


def test_files_that_are_not_tokenizers_are_refused(folder, tmp_path):
  with pytest.raises(UserError, match='spm.model is not a SentencePiece model'):
    (tmp_path / 'spm.model').write_bytes(b'no model')
    tokenizer_reader.load(tmp_path)
  settings_of(folder, tmp_path)
  content = json.loads(tokenizer_reader.load(tmp_path).serialized())
  for change, message in (
      ({'added_tokens': content['added_tokens'][:-1]}, r'has no <mask> or \[MASK\]'),
      ({'added_tokens': [{**content['added_tokens'][-1], 'id': 999}]}, 'there are gaps between'),
      ({'added_tokens': [{}]}, 'is not a tokenizer'),
      ({'model': {**content['model'], 'unk_id': 10**6}}, 'is not a tokenizer'),
      ({'model': {'type': 'Unigram', 'vocab': 5}}, 'is not a tokenizer'),
      ({'normalizer': 5}, 'is not a tokenizer')):
    (tmp_path / 'tokenizer.json').write_text(json.dumps(content | change))
    with pytest.raises(UserError, match=message):
      tokenizer_reader.load(tmp_path)
