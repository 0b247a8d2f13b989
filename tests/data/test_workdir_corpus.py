"""The corpus that a run prepares in its workdir, from one text or a mixture."""

import json
import os

from etils import epath
import numpy as np
import pytest

from bert_jax.data import dataset
from bert_jax.errors import UserError
from tests import conftest
from tests.data.corpora import begin, files, open_corpus, sentences


def test_held_out_documents_share_no_sentence_with_the_training_text(tmp_path):
  documents = conftest.make_documents(60)
  copied = documents[:20]  # exact copies land on the same side
  for document in documents[20:40]:
    document.append('A sentence that stands in many documents.')
  source = conftest.write_corpus(tmp_path / 'c.txt', documents + copied)
  corpus = open_corpus(tmp_path / 'w', source)
  assert corpus.heldout.num_documents in range(6, 13)  # 6 different ones, and their copies
  assert corpus.train.num_documents + corpus.heldout.num_documents == 80
  train, heldout = ({s for d in sentences(corpus, split) for s in d}
                    for split in (corpus.train, corpus.heldout))
  assert not train & heldout
  assert any('20 documents are exact copies' in note for note in corpus.notes)
  assert any('1 held-out sentences that occur' in note for note in corpus.notes)


def test_a_corpus_has_every_sentence_and_token_of_its_text(tmp_path):
  documents = [['The cat sat.', 'It purred.'], ['Birds fly, don\'t they?', 'Yes.', 'No!']] * 4
  documents = [[f'{s} {i}' for s in d] for i, d in enumerate(documents)]
  source = conftest.write_corpus(tmp_path / 'c.txt', documents)
  corpus = open_corpus(tmp_path / 'w', source, 60, heldout=0.0, lines_are_sentences=True)
  expected = [[' '.join(corpus.tokenizer.tokens(ids)) for ids in corpus.tokenizer.encode_batch(d)]
              for d in documents]
  assert sentences(corpus, corpus.train) == expected
  position = np.arange(corpus.train.num_tokens)
  pieces = corpus.tokenizer.tokens(corpus.train.tokens(position))
  assert corpus.train.word_starts(position).tolist() == [not p.startswith('##') for p in pieces]
  assert any(p.startswith('##') for p in pieces)
  np.testing.assert_array_equal(corpus.counts, np.bincount(
      corpus.train.tokens(position), minlength=corpus.tokenizer.vocab_size))


def test_a_workdir_keeps_its_corpus(tmp_path, corpus_file):
  first = open_corpus(tmp_path / 'w', corpus_file)
  again = open_corpus(tmp_path / 'w', corpus_file)
  assert first.train.digest == again.train.digest
  assert first.unigram_entropy == again.unigram_entropy
  other = open_corpus(tmp_path / 'v', corpus_file)
  assert other.train.digest == first.train.digest  # a new workdir gets the same records
  with pytest.raises(UserError, match='made with data.heldout=0.1, now it is 0.2'):
    open_corpus(tmp_path / 'w', corpus_file, heldout=0.2)


def test_at_least_two_documents_stay_in_training(tmp_path):
  source = conftest.write_corpus(tmp_path / 'c.txt', conftest.make_documents(8))
  corpus = open_corpus(tmp_path / 'w', source, heldout=0.95)
  assert (corpus.train.num_documents, corpus.heldout.num_documents) == (2, 6)
  corpus = open_corpus(tmp_path / 'v', source, heldout=0.0)
  assert not corpus.heldout.num_tokens and not corpus.notes


def test_a_mixture_trains_its_vocabulary_after_a_kill(tmp_path, corpus_file):
  (tmp_path / 'w/vocabulary/progress').mkdir(parents=True)  # left by a killed run
  corpus = open_corpus(tmp_path / 'w', f'{corpus_file}=1,{corpus_file}=1')
  assert 100 < corpus.tokenizer.vocab_size <= 200
  assert not (tmp_path / 'w/vocabulary/progress').exists()
  with pytest.raises(UserError, match='is text, and 2 processes train on it'):
    dataset.open_corpus(conftest.tiny_config(f'{corpus_file}=1,{corpus_file}=1').data, 200,
                        epath.Path(tmp_path / 'v'), processes=2)
  assert not (tmp_path / 'v').exists()


def test_several_processes_need_prepared_records(tmp_path, corpus_file):
  with pytest.raises(UserError, match='is text, and 2 processes train on it'):
    dataset.open_corpus(conftest.tiny_config(corpus_file).data, 200, epath.Path(tmp_path), 2)


def test_a_given_vocabulary(tmp_path, corpus_file):
  trained = open_corpus(tmp_path / 'w', corpus_file)
  given = open_corpus(tmp_path / 'v', corpus_file,
                      vocab=str(tmp_path / 'w/corpus/tokenizer/vocab.txt'))
  assert given.tokenizer.vocab == trained.tokenizer.vocab
  assert given.train.digest == trained.train.digest


def test_a_text_that_changed_before_the_run_began_is_prepared_again(tmp_path):
  source = conftest.write_corpus(tmp_path / 'a.txt', conftest.make_documents(40))
  before = open_corpus(tmp_path / 'w', source).train.digest
  written = os.stat(tmp_path / 'w/corpus/manifest.json').st_mtime_ns
  assert open_corpus(tmp_path / 'w', source).train.digest == before
  assert os.stat(tmp_path / 'w/corpus/manifest.json').st_mtime_ns == written  # the corpus is kept
  conftest.write_corpus(tmp_path / 'a.txt', conftest.make_documents(50))
  corpus = open_corpus(tmp_path / 'w', source)
  assert corpus.train.num_documents + corpus.heldout.num_documents == 50
  assert corpus.train.digest == open_corpus(tmp_path / 'v', source).train.digest != before
  assert [path.name for path in (tmp_path / 'w').iterdir()] == ['corpus']
  os.utime(source, (1, 1))  # a correction may leave the size as it was
  open_corpus(tmp_path / 'w', source)
  assert json.loads((tmp_path / 'w/corpus/manifest.json').read_text())['settings']['inputs'] == [
      f'{source} {os.path.getsize(source)} 1']


@pytest.mark.parametrize('parts', ['{0}/*.txt', '{0}/a.txt=1,{0}/b.txt=1'])
def test_a_text_that_changed_after_the_run_began_is_refused(tmp_path, parts):
  texts, workdir = tmp_path / 'my texts', tmp_path / 'w'
  texts.mkdir()
  for name in 'ab':
    conftest.write_corpus(texts / f'{name}.txt', conftest.make_documents(40))
  source = parts.format(texts)
  before = open_corpus(workdir, source).train.digest
  begin(workdir)
  kept = files(workdir)
  os.utime(texts / 'a.txt', (1, 1))  # as a copy on another machine has
  assert open_corpus(workdir, source).train.digest == before
  conftest.write_corpus(texts / 'b.txt', conftest.make_documents(50))
  with pytest.raises(UserError) as e:
    open_corpus(workdir, source)
  assert str(e.value) == (f'{texts}/b.txt is not the text with which this run began: put that '
                          'text back, or use another --workdir')
  (texts / 'b.txt').write_text('')  # unreadable
  assert open_corpus(workdir, source).train.digest == before
  (texts / 'b.txt').unlink()
  (texts / 'a.txt').unlink()
  assert open_corpus(workdir, source).train.digest == before
  assert files(workdir) == kept


def test_the_vocabulary_of_a_mixture_follows_its_fields_and_texts(tmp_path):
  for name, seed in (('a', 0), ('b', 1)):
    conftest.write_corpus(tmp_path / f'{name}.txt', conftest.make_documents(40, seed))
  source, workdir = f'{tmp_path}/a.txt=1,{tmp_path}/b.txt=1', tmp_path / 'w'
  small = open_corpus(workdir, source, 72)
  assert small.tokenizer.vocab_size == 72
  assert open_corpus(workdir, source, 72).train.digest == small.train.digest
  for fields in ({'vocab_size': 90}, {'tokenizer': 'bpe', 'vocab_size': 300},
                 {'lowercase': False}, {'heldout': 0.2}):
    again = open_corpus(workdir, source, **fields)
    fresh = open_corpus(tmp_path / f'fresh_{min(fields)}', source, **fields)
    assert again.tokenizer.serialized() == fresh.tokenizer.serialized()
    assert again.train.digest == fresh.train.digest
  (tmp_path / 'b.txt').write_text((tmp_path / 'b.txt').read_text().replace('river', 'ocean'))
  assert 'ocean' in open_corpus(workdir, source).tokenizer.vocab
  begin(workdir)
  with pytest.raises(UserError) as e:
    open_corpus(workdir, source, 90)
  assert str(e.value) == (f'{workdir} was made with model.vocab_size=200, now it is 90: use '
                          'another --workdir')
  with pytest.raises(UserError, match='was made with data.lowercase=True, now it is False: use'):
    open_corpus(workdir, source, lowercase=False)
  (workdir / 'vocabulary/made_of.json').unlink()  # as older versions left it
  assert 'ocean' in open_corpus(workdir, source, 90).tokenizer.vocab


def test_held_out_sentences_in_the_training_text_of_another_part_are_counted(tmp_path, monkeypatch):
  documents = conftest.make_documents(300)
  a = conftest.write_corpus(tmp_path / 'a.txt', documents)
  # A document with another sentence has another hash, so it may be held out in one part only.
  b = conftest.write_corpus(tmp_path / 'b.txt', [
      [f'Page {i} is a copy.', *document] for i, document in enumerate(documents)])
  corpus = open_corpus(tmp_path / 'w', f'{a}=1,{b}=1')
  train, held = ([s for part in split.corpora for d in sentences(corpus, part) for s in d]
                 for split in (corpus.train, corpus.heldout))
  seen = sum(s in set(train) for s in held)
  assert len(held) > seen > 100
  assert corpus.notes[-1] == (
      f'{seen:,} of {len(held):,} held-out sentences occur in the training text of another part: a '
      'part leaves out only its own held-out sentences')
  with monkeypatch.context() as m:
    m.setattr(dataset, '_COUNTED', 1_000)
    assert open_corpus(tmp_path / 'w', f'{a}=1,{b}=1').notes[-1] == (
        'held-out sentences may also occur in the training text of another part: a text of more '
        'than 1,000 tokens is not searched')
  begin(tmp_path / 'w')
  assert corpus.notes[:-1] == open_corpus(tmp_path / 'w', f'{a}=1,{b}=1').notes
  alone = open_corpus(tmp_path / 'v', f'{a}=1,{a}=2')  # the same documents are held out
  assert not any('of another part' in note for note in alone.notes)


def test_a_workdir_moves_with_its_vocabulary(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  source = conftest.write_corpus(tmp_path / 'a.txt', conftest.make_documents(40))
  mixture = open_corpus('mix', f'{source}=1,{source}=1').train.digest
  (tmp_path / 'one').mkdir()
  open_corpus('other', source, 72)
  (tmp_path / 'other/corpus/tokenizer').rename('one/tokenizer')  # as init_from leaves it
  one = open_corpus('one', source, vocab='one/tokenizer').train.digest
  for name in ('mix', 'one'):
    begin(name)
    (tmp_path / name).rename(tmp_path / f'{name}_moved')
  for folder in ('', f'{tmp_path}/'):
    assert open_corpus(f'{folder}mix_moved', f'{source}=1,{source}=1').train.digest == mixture
    assert open_corpus(f'{folder}one_moved', source,
                       vocab=f'{folder}one_moved/tokenizer').train.digest == one
  with pytest.raises(UserError) as e:
    open_corpus('one_moved', source, vocab='mix_moved/vocabulary')
  assert str(e.value) == (
      'data.vocab=mix_moved/vocabulary is not the vocabulary that made the records in '
      'one_moved/corpus: give that vocabulary, or use another --workdir')


def test_a_corpus_of_three_documents_holds_nothing_out(tmp_path):
  three = conftest.write_corpus(tmp_path / 'three.txt', conftest.make_documents(3))
  corpus = open_corpus(tmp_path / 'w', three)
  assert corpus.heldout.num_documents == 0 and corpus.unigram_entropy is None
  assert any('nothing is held out' in note for note in corpus.notes)


@pytest.mark.parametrize('text, message', [
    ('\n \n\n', 'holds no document'),
    ('One.\nTwo.\nThree.\n', 'one document.*blank line'),
    ('Same.\n\nSame.\n\nSame.\n', 'one document'),
])
def test_corpora_without_pairs_are_refused(tmp_path, text, message):
  (tmp_path / 'c.txt').write_text(text)
  with pytest.raises(UserError, match=message):
    open_corpus(tmp_path / 'w', str(tmp_path / 'c.txt'))
  assert not (tmp_path / 'w/corpus').exists()


def test_the_manifest_has_the_settings(tmp_path, corpus_file):
  open_corpus(tmp_path / 'w', corpus_file)
  manifest = json.loads((tmp_path / 'w/corpus/manifest.json').read_text())
  assert manifest['settings']['source'] == corpus_file and manifest['settings']['vocab_size'] == 200
