import json
import pathlib

from etils import epath
import hypothesis
from hypothesis import strategies as st
import pytest
import tokenizers
import transformers

from bert_jax.data import corpus
from bert_jax.data.tokenizers import base as tokenizer_base
from bert_jax.data.tokenizers import library, older, training
from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.errors import UserError
from tests import conftest

TEXTS = [s for d in conftest.make_documents(30) for s in d]

# The ids that the published uncased vocabulary gives these entries.
PUBLISHED = {'[PAD]': 0, '[UNK]': 100, '[CLS]': 101, '[SEP]': 102, '[MASK]': 103, 'the': 1996,
             'quick': 4248, 'brown': 2829, 'jumps': 14523, 'over': 2058, 'lazy': 13971,
             'dog': 3899, '[': 1031, ']': 1033, 'mask': 7308}


def _published() -> tokenizer_base.Tokenizer:
  vocab = [f'[unused{i}]' for i in range(15_000)]
  for token, i in PUBLISHED.items():
    vocab[i] = token
  return older.wordpiece(vocab)


def test_the_published_example():
  t = _published()
  ids = t.encode_with_masks('The quick brown [MASK] jumps over the lazy dog')
  assert [t.cls_id, *ids, t.sep_id] == [101, 1996, 4248, 2829, 103, 14523, 2058, 1996, 13971, 3899,
                                        102]


def test_added_tokens_of_a_published_vocabulary_are_read(tmp_path):
  (tmp_path / 'vocab.txt').write_text('\n'.join([*tokenizer_base.SPECIAL_TOKENS, 'the', 'dog', '-',
                                                 'covid', '19']))
  theirs = transformers.BertTokenizerFast(str(tmp_path / 'vocab.txt'))
  theirs.add_tokens(['covid-19', 'brand-new'])
  theirs.add_special_tokens({'additional_special_tokens': ['[E1]']})
  theirs.save_pretrained(tmp_path / 'saved')
  ours = tokenizer_reader.load(str(tmp_path / 'saved'))
  texts = ['the covid-19 dog', 'covid 19 brand-new', 'the [E1] dog']
  assert ours.vocab_size == len(theirs) == 13
  assert ours.encode_batch(texts[:2]) == [
      theirs(text, add_special_tokens=False)['input_ids'] for text in texts[:2]]
  marker = ours.vocab.index('[E1]')
  assert [marker in t.encode_batch(texts)[2] for t in (ours, ours.parsing(False))] == [True] * 2
  ours.save(epath.Path(tmp_path / 'again'))
  again = tokenizer_reader.load(str(tmp_path / 'again'))
  assert again.vocab == ours.vocab and again.encode_batch(texts) == ours.encode_batch(texts)


@pytest.mark.parametrize('name, content, message', [
    ('vocab.json', '{"model": 7, "[CLS]": 1}', 'a vocab.json needs its merges.txt next to it'),
    ('tokenizer.json', '{"model": [1]}', 'has no model with a vocabulary'),
    ('tokenizer.json', '{"model": {"type": "WordPiece", "vocab": {"a": 0, "b": 2}}}',
     'is not a tokenizer: missing field'),
    ('spiece.model', '', 'is empty: it is not a SentencePiece model'),
    ('spm.model', '', 'is empty: it is not a SentencePiece model')])
def test_files_without_a_vocabulary_are_refused(tmp_path, name, content, message):
  (tmp_path / name).write_text(content)
  with pytest.raises(UserError, match=message):
    tokenizer_reader.load(str(tmp_path))


def test_special_tokens_in_a_corpus_are_text():
  assert _published().encode_batch(['the [MASK] dog']) == [[1996, 1031, 7308, 1033, 3899]]


def test_wordpiece_splits():
  vocab = [*tokenizer_base.SPECIAL_TOKENS, 'un', '##aff', '##able', 'cafe', '猫', '坐', '!', 'A',
           'b']
  t = older.wordpiece(vocab)
  assert t.tokens(t.encode_batch(['unaffable Café猫坐!  x\x00\t'])[0]) == [
      'un', '##aff', '##able', 'cafe', '猫', '坐', '!', '[UNK]']
  cased = older.wordpiece(vocab, lowercase=False)
  assert cased.tokens(cased.encode_batch(['A a b'])[0]) == ['A', '[UNK]', 'b']


@pytest.mark.parametrize('kind, size', [('wordpiece', 120), ('sentencepiece', 120), ('bpe', 300)])
def test_train_save_load(kind, size, tmp_path):
  t = training.train(kind, lambda: TEXTS, size, True)
  assert 60 <= t.vocab_size <= size
  assert tokenizer_base.special_ids(t) == (0, 1, 2, 3, 4)
  t.save(epath.Path(tmp_path))
  again = tokenizer_reader.load(tmp_path)
  assert again.encode_batch(TEXTS) == t.encode_batch(TEXTS)
  assert tokenizer_base.digest(again) == tokenizer_base.digest(t)
  for name in {'bpe': ['tokenizer.json'], 'wordpiece': ['vocab.txt', 'tokenizer.json'],
               'sentencepiece': ['spiece.model']}[kind]:  # data.vocab may name the file itself
    by_file = tokenizer_reader.load(tmp_path / name, True)
    assert tokenizer_base.digest(by_file) == tokenizer_base.digest(t)
  ids = t.encode_with_masks('The [MASK] runs.')
  assert ids.count(t.mask_id) == 1 and t.tokens([t.mask_id])[0] in ('[MASK]', '<mask>')
  assert t.mask_id not in t.encode_batch(['The [MASK] runs.'])[0]


def test_sentencepiece_also_learns_from_the_longest_sentences():
  document = f'{"字" * 1_398}\n{"猫" * 1_397}\n{"😀" * 16_384}'  # 4,194, 4,191 and 65,536 bytes
  sentences = [*corpus.Settings('', language='zh').sentences(document), *TEXTS]
  assert list(map(len, sentences[:3])) == [1_398, 1_397, 16_384]
  vocab = ''.join(training.train('sentencepiece', lambda: sentences, 80, True).vocab)
  assert {'字', '猫', '😀'} < set(vocab)


@pytest.mark.parametrize('kind', ['wordpiece', 'sentencepiece', 'bpe'])
def test_the_largest_vocabulary(kind):
  assert training.train(kind, lambda: TEXTS, 1 << 24, True).vocab_size < 1_000
  with pytest.raises(UserError, match='^model.vocab_size=16777217 must be at most 16777216$'):
    training.train(kind, lambda: TEXTS, (1 << 24) + 1, True)


@pytest.mark.parametrize('name', ['spiece.model', 'spm.model'])
def test_pieces_that_are_not_utf8_are_refused(tmp_path, name):
  training.train('sentencepiece', lambda: TEXTS, 120, True).save(epath.Path(tmp_path))
  content = (tmp_path / 'spiece.model').read_bytes()
  broken = content.replace('▁'.encode(), b'\xe2\x96\xff')  # of the same length
  (tmp_path / 'spiece.model').unlink()
  (tmp_path / name).write_bytes(broken)
  with pytest.raises(UserError, match='is not a SentencePiece model: .utf-8. codec'):
    tokenizer_reader.load(tmp_path / name)


def test_training_a_vocabulary_twice_gives_the_same():
  assert len({tokenizer_base.digest(training.train('bpe', lambda: TEXTS, 320, True))
              for _ in range(3)}) == 1
  for size in (90, 120, 150, 200):
    one, two, three = (training.train('wordpiece', lambda: TEXTS, size, True).vocab
                       for _ in range(3))
    assert one == two == three and one[:5] == list(tokenizer_base.SPECIAL_TOKENS)


CASED = [s.title() + ' Über naïve 中文 😀\n  two  spaces <mask> </s>' for s in TEXTS[:20]]


def test_byte_level_bpe_equals_the_library(tmp_path):
  """From the two files of a RoBERTa folder, or from one tokenizer.json."""
  library = tokenizers.ByteLevelBPETokenizer()
  library.train_from_iterator(CASED, vocab_size=330, special_tokens=[
      '<s>', '<pad>', '</s>', '<unk>', '<mask>'], show_progress=False)
  library.save_model(str(tmp_path))
  t = tokenizer_reader.load(tmp_path)
  assert (t.cls_id, t.pad_id, t.sep_id, t.unk_id, t.mask_id) == (0, 1, 2, 3, 4)
  plain = tokenizers.ByteLevelBPETokenizer(str(tmp_path / 'vocab.json'),
                                           str(tmp_path / 'merges.txt'))
  expected = [plain.encode(x).ids for x in CASED]
  assert t.encode_batch(CASED) == expected and not any({0, 2, 4} & set(x) for x in expected)
  (ids, spans), = t.encode_with_offsets(CASED[:1])
  assert ids == expected[0]
  assert {CASED[0][a:b] for a, b in spans} >= {'😀', '中文', 'Über'}
  assert not any(CASED[0][a:b] != CASED[0][a:b].lstrip(' ') for a, b in spans)
  starts = [CASED[0][a:b] for i, (a, b) in zip(ids, spans) if t.word_starts()[i]]
  assert len(starts) == CASED[0].count(' ') - 1  # the space after a line end joins its token
  masked = t.encode_with_masks('One [MASK] two')
  assert masked == [*t.encode_batch(['One '])[0], 4, *t.encode_batch([' two'])[0]]

  t.save(epath.Path(tmp_path / 'one'))
  theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / 'one'))
  again = tokenizer_reader.load(tmp_path / 'one')
  assert tokenizer_base.digest(again) == tokenizer_base.digest(t)
  assert theirs('One two').input_ids == [0, *t.encode_batch(['One two'])[0], 2]
  assert theirs.mask_token_id == 4


def test_bad_byte_level_bpe(tmp_path):
  with pytest.raises(UserError, match='no room for the 256 bytes and 5 special'):
    training.train('bpe', lambda: TEXTS, 260, True)
  (tmp_path / 'vocab.json').write_text('{"a": 0}')
  (tmp_path / 'merges.txt').write_text('#version: 0.2\nb c\n')
  with pytest.raises(UserError, match='are not a BPE model'):
    tokenizer_reader.load(tmp_path)
  for model, message in (({'type': 'BPE', 'vocab': {'a': 0}, 'merges': []}, 'has no <pad> or'),
                         ({'type': 'BPE', 'vocab': [1]}, 'is not a tokenizer: invalid type'),
                         ({'type': 'BPE', 'vocab': {'a': 0, 'b': 10**7}, 'merges': []},
                          "the id of 'b' is 10000000: the ids of 2 entries")):
    (tmp_path / 'tokenizer.json').write_text(json.dumps({'version': '1.0', 'model': model}))
    with pytest.raises(UserError, match=message):
      tokenizer_reader.load(tmp_path)
  training.train('bpe', lambda: TEXTS, 300, True).save(epath.Path(tmp_path))
  good = json.loads((tmp_path / 'tokenizer.json').read_text())
  huge = [good['added_tokens'][0] | {'id': 2**31}, *good['added_tokens'][1:]]
  panic = good['model'] | {'continuing_subword_prefix': 9 * '#', 'merges': [['a', 'b']]}
  undefined = {'type': 'TemplateProcessing', 'special_tokens': {}, 'pair': [],
               'single': [{'SpecialToken': {'id': '<s>', 'type_id': 0}}]}
  nested = {'type': 'Sequence', 'processors': [undefined]}
  for wrong, message in (({'added_tokens': [1]}, 'is not a tokenizer'),
                         ({'post_processor': undefined}, "adds '<s>', which it does not define"),
                         ({'post_processor': nested}, "adds '<s>', which it does not define"),
                         ({'post_processor': [1]}, 'is not a tokenizer'),
                         ({'model': panic}, 'is not a tokenizer: range'),  # a panic in Rust
                         ({'added_tokens': huge}, "adds '<s>' as entry 2147483648")):
    (tmp_path / 'tokenizer.json').write_text(json.dumps(good | wrong))
    with pytest.raises(UserError, match=message):
      tokenizer_reader.load(tmp_path)


def _vocab(path: pathlib.Path, entries) -> pathlib.Path:
  path.write_text('\n'.join(entries) + '\n')
  return path


def test_bad_vocabularies(tmp_path):
  special = tokenizer_base.SPECIAL_TOKENS
  with pytest.raises(UserError, match=r'no \[MASK\]'):
    tokenizer_reader.load(_vocab(tmp_path / 'a.txt', special[:-1]))
  with pytest.raises(UserError, match='data.lowercase=False'):
    tokenizer_reader.load(_vocab(tmp_path / 'c.txt', [*special, 'Dog', 'cat', 'Tree']), True)
  assert tokenizer_reader.load(tmp_path / 'c.txt', lowercase=False).vocab_size == 8
  with pytest.raises(UserError, match='cannot be read'):
    tokenizer_reader.load(tmp_path / 'none.txt')
  (tmp_path / 'd.txt').write_bytes(b'\xff\xfe')
  with pytest.raises(UserError, match='invalid UTF-8'):
    tokenizer_reader.load(tmp_path / 'd.txt')
  (tmp_path / 'e.model').write_bytes(b'no model')
  with pytest.raises(UserError, match='not a SentencePiece model'):
    tokenizer_reader.load(tmp_path / 'e.model')


KINDS = [dict(lowercase=lowercase, strip_accents=strip, split_chinese=split)
         for lowercase in (True, False) for strip in (None, True, False) for split in (True, False)]


@pytest.mark.parametrize('settings', KINDS, ids=str)
def test_every_simple_character_is_normalized_as_by_the_library(settings):
  t = older.wordpiece(tokenizer_base.SPECIAL_TOKENS, **settings)
  simple = [chr(i) for i in range(1 << 16) if library._SIMPLE.fullmatch(chr(i))]
  assert len(simple) > 27_000
  assert [t._normalized(c) for c in simple] == [t.library.normalizer.normalize_str(c)
                                                for c in simple]


VOCAB = (*tokenizer_base.SPECIAL_TOKENS, *'abcAB019.,-?!·，。“中国人é', '##a', '##b', '##1',
         'ab', 'e')


@hypothesis.settings(deadline=None)
@hypothesis.given(
    texts=st.lists(st.text(st.sampled_from(
        'abAB01 .-·，。“”中国人é\u0301\t\u3000\xad\x7fΣｱがＡ𠀀😀')), max_size=5),
    settings=st.sampled_from(KINDS), whole=st.booleans())
def test_simple_and_other_texts_have_the_tokens_of_the_library(texts, settings, whole):
  t = older.wordpiece(VOCAB, **settings)
  t = t.extended(['a-b']) if whole else t
  assert t.encode_batch(texts) == [
      e.ids for e in t.library.encode_batch(texts, add_special_tokens=False)]


def test_an_accent_that_is_stripped_belongs_to_its_token():
  t = older.wordpiece([*tokenizer_base.SPECIAL_TOKENS, 'cafe', 'x', 'ca', '##fe'])
  text = 'cafe\u0301 x'
  (_, spans), = t.encode_with_spans([text])
  assert [text[a:b] for a, b in spans] == ['cafe\u0301', 'x']


def test_a_padded_table_gets_unused_entries(tmp_path):
  entries = [*tokenizer_base.SPECIAL_TOKENS, 'dog', 'un', '##used', '[', ']']
  _vocab(tmp_path / 'vocab.txt', entries)
  (tmp_path / 'config.json').write_text('{"vocab_size": 64}')
  t = tokenizer_reader.load(tmp_path)
  assert t.vocab == [*entries, *(f'[unused{i}]' for i in range(10, 64))]
  assert t.encode_batch(['dog [unused10]']) == [[5, 8, 1, 9]]
  t.save(epath.Path(tmp_path / 'again'))
  assert tokenizer_reader.load(tmp_path / 'again').vocab == t.vocab
