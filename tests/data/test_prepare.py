import json
import os
import pathlib

from etils import epath
import numpy as np
import pytest

from bert_jax.data import dataset, encode, preparation, records, survey
from bert_jax.data.tokenizers import base as tokenizer_base
from bert_jax.errors import Failed, UserError
from bert_jax.runtime import pool, storage
from tests import conftest


def _open(workdir, source, vocab_size=200, **data):
  config = conftest.tiny_config(source).data
  config.update({'heldout': 0.1, **data})
  return dataset.open_corpus(config, vocab_size, epath.Path(workdir))


def _prepare(output, source, workers=1, vocab_size=200, **settings):
  if 'vocab' in settings:
    vocab_size = None
  options = preparation.Settings(str(source), vocab_size=vocab_size, **settings)
  preparation.prepare(options, str(output), workers)
  return dataset.open_records(epath.Path(output))


def _sentences(corpus, split):
  """The tokens of every sentence of a split, by document."""
  documents = []
  for number in range(split.num_blocks):
    lengths, starts, _ = split.block(number)
    ends = split.blocks[number, 0] + np.cumsum(lengths, dtype=np.int64)
    for i, (end, length) in enumerate(zip(ends, lengths)):
      if i in starts:
        documents.append([])
      documents[-1].append(' '.join(corpus.tokenizer.tokens(
          split.tokens(np.arange(end - length, end)))))
  return documents


def _files(folder):
  return {str(p.relative_to(folder)): p.read_bytes() for p in pathlib.Path(folder).rglob('*')
          if p.is_file()}


def test_held_out_documents_share_no_sentence_with_the_training_text(tmp_path):
  documents = conftest.make_documents(60)
  copied = documents[:20]  # exact copies land on the same side
  for document in documents[20:40]:
    document.append('A sentence that stands in many documents.')
  source = conftest.write_corpus(tmp_path / 'c.txt', documents + copied)
  corpus = _open(tmp_path / 'w', source)
  assert corpus.heldout.num_documents in range(6, 13)  # 6 different ones, and their copies
  assert corpus.train.num_documents + corpus.heldout.num_documents == 80
  train, heldout = ({s for d in _sentences(corpus, split) for s in d}
                    for split in (corpus.train, corpus.heldout))
  assert not train & heldout
  assert any('20 documents are exact copies' in note for note in corpus.notes)
  assert any('1 held-out sentences that occur' in note for note in corpus.notes)


@pytest.mark.parametrize('workers', [1, 2])
def test_held_out_sentences_are_those_that_no_training_text_has_as_tokens(tmp_path, monkeypatch,
                                                                          workers):
  """Letters with other case, accents or spaces are the same to the model."""
  monkeypatch.setattr(preparation, '_IN_PROCESS', 0)
  documents = conftest.make_documents(60)
  for i, document in enumerate(documents):  # no two documents write it alike
    letters = [c.upper() if i >> k & 1 else c for k, c in enumerate('cafe ferm')]
    document.append(''.join(letters) + ('e\u0301' if i % 2 else '\u00c9') + '  .')
  corpus = _prepare(tmp_path / 'w', conftest.write_corpus(tmp_path / 'c.txt', documents), workers,
                    heldout=0.2)
  train, heldout = ({s for d in _sentences(corpus, split) for s in d}
                    for split in (corpus.train, corpus.heldout))
  assert heldout and not train & heldout
  count = corpus.heldout.num_documents
  assert any(f'{count} held-out sentences that occur' in note for note in corpus.notes)


def test_nothing_is_lost_or_changed_on_the_way(tmp_path):
  documents = [['The cat sat.', 'It purred.'], ['Birds fly, don\'t they?', 'Yes.', 'No!']] * 4
  documents = [[f'{s} {i}' for s in d] for i, d in enumerate(documents)]
  source = conftest.write_corpus(tmp_path / 'c.txt', documents)
  corpus = _open(tmp_path / 'w', source, 60, heldout=0.0, lines_are_sentences=True)
  expected = [[' '.join(corpus.tokenizer.tokens(ids)) for ids in corpus.tokenizer.encode_batch(d)]
              for d in documents]
  assert _sentences(corpus, corpus.train) == expected
  position = np.arange(corpus.train.num_tokens)
  pieces = corpus.tokenizer.tokens(corpus.train.tokens(position))
  assert corpus.train.word_starts(position).tolist() == [not p.startswith('##') for p in pieces]
  assert any(p.startswith('##') for p in pieces)
  np.testing.assert_array_equal(corpus.counts, np.bincount(
      corpus.train.tokens(position), minlength=corpus.tokenizer.vocab_size))


def test_cross_entropy_of_frequencies_by_hand():
  # Add-one smoothing: (3 + 1) / 6 and (1 + 1) / 6.
  assert preparation.cross_entropy(np.array([1, 1]), np.array([3, 1])) == pytest.approx(
      -(np.log(4 / 6) + np.log(2 / 6)) / 2)


def test_kept_in_the_workdir(tmp_path, corpus_file):
  first = _open(tmp_path / 'w', corpus_file)
  again = _open(tmp_path / 'w', corpus_file)
  assert first.train.digest == again.train.digest
  assert first.unigram_entropy == again.unigram_entropy
  other = _open(tmp_path / 'v', corpus_file)
  assert other.train.digest == first.train.digest  # a new one is the same
  with pytest.raises(UserError, match='made with data.heldout=0.1, now it is 0.2'):
    _open(tmp_path / 'w', corpus_file, heldout=0.2)


@pytest.fixture
def small_shards(monkeypatch):
  """Several shards and batches from a few kilobytes of text."""
  monkeypatch.setattr(preparation, '_SHARD', 20_000)
  monkeypatch.setattr(preparation, '_IN_PROCESS', 0)
  batches = encode.batches
  monkeypatch.setattr(encode, 'batches', lambda texts, size=0: batches(texts, 3_000))


def test_the_output_does_not_depend_on_the_number_of_workers(tmp_path, small_shards):
  source = conftest.write_corpus(tmp_path / 'c.txt', conftest.make_documents(250))
  one = _prepare(tmp_path / 'one', source, workers=1)
  two = _prepare(tmp_path / 'two', source, workers=2)
  manifest = records.read_manifest(epath.Path(tmp_path / 'one'))
  assert len(manifest['splits']['train']) > 3
  assert _files(tmp_path / 'one') == _files(tmp_path / 'two')
  assert not (tmp_path / 'two/progress').exists()
  assert one.train.digest == two.train.digest
  expected = one.train.num_documents + one.heldout.num_documents
  assert expected == 250 == manifest['documents']


@pytest.mark.parametrize('when', [0, 1, 2])
def test_what_was_interrupted_goes_on_where_it_was(tmp_path, small_shards, monkeypatch, when):
  source = conftest.write_corpus(tmp_path / 'c.txt', conftest.make_documents(250))
  _prepare(tmp_path / 'whole', source)
  with monkeypatch.context() as m:
    close, closed = records.ShardWriter.close, []

    def stop(writer):
      if len(closed) == when:
        raise KeyboardInterrupt
      closed.append(writer.name)
      return close(writer)

    m.setattr(records.ShardWriter, 'close', stop)
    with pytest.raises(KeyboardInterrupt):
      _prepare(tmp_path / 'part', source)
  assert not (tmp_path / 'part/manifest.json').exists()
  with pytest.raises(UserError, match='interrupted preparation with another lowercase'):
    _prepare(tmp_path / 'part', source, lowercase=False)
  with monkeypatch.context() as m:  # finished shards are not written again
    begin, begun = records.ShardWriter.__init__, []
    m.setattr(records.ShardWriter, '__init__',
              lambda self, d, name, *a: (begun.append(name), begin(self, d, name, *a))[1])
    _prepare(tmp_path / 'part', source)
    assert f'train-{when - 1:05}' not in begun and f'train-{when:05}' in begun
  assert _files(tmp_path / 'part') == _files(tmp_path / 'whole')


def test_a_finished_folder_is_left_alone(tmp_path, corpus_file):
  _prepare(tmp_path / 'r', corpus_file)
  before = _files(tmp_path / 'r')
  _prepare(tmp_path / 'r', corpus_file)
  assert _files(tmp_path / 'r') == before
  with pytest.raises(UserError, match='not empty: it holds records made with another heldout'):
    _prepare(tmp_path / 'r', corpus_file, heldout=0.3)
  (tmp_path / 'mine').mkdir()
  (tmp_path / 'mine/notes.txt').write_text('keep me')
  with pytest.raises(UserError, match='is not empty .it holds notes.txt'):
    _prepare(tmp_path / 'mine', corpus_file)
  assert _files(tmp_path / 'mine') == {'notes.txt': b'keep me'}


def test_mistakes_leave_nothing_behind(tmp_path, corpus_file):
  (tmp_path / 'bad.jsonl').write_text('{"text": "Fine."}\n{"text"')
  with pytest.raises(UserError, match='bad.jsonl, line 2: invalid JSON'):
    _prepare(tmp_path / 'r', tmp_path / 'bad.jsonl')
  with pytest.raises(UserError, match='leaves no room'):
    _prepare(tmp_path / 'r', corpus_file, vocab_size=3)
  (tmp_path / 'controls.txt').write_text('\x01\n\n\x02\n\n\x03\n')
  with pytest.raises(UserError, match='no text that the vocabulary can encode'):
    _prepare(tmp_path / 'r', tmp_path / 'controls.txt', vocab_size=9)
  assert not (tmp_path / 'r').exists()


def test_a_manifest_that_is_none_of_records(tmp_path, corpus_file):
  (tmp_path / 'app').mkdir()
  (tmp_path / 'app/manifest.json').write_text('{"version": 1, "name": "app"}')
  for use in (lambda: _prepare(tmp_path / 'app', corpus_file),
              lambda: _open(tmp_path / 'w', str(tmp_path / 'app'))):
    with pytest.raises(UserError, match='is not a manifest of token records, it has no settings,'):
      use()


def test_nearly_all_is_held_out_but_two_documents(tmp_path):
  source = conftest.write_corpus(tmp_path / 'c.txt', conftest.make_documents(8))
  corpus = _open(tmp_path / 'w', source, heldout=0.95)
  assert (corpus.train.num_documents, corpus.heldout.num_documents) == (2, 6)
  corpus = _open(tmp_path / 'v', source, heldout=0.0)
  assert not corpus.heldout.num_tokens and not corpus.notes


def _die(item):
  os._exit(9)


def test_a_folder_of_the_users_own_is_not_taken_for_progress(tmp_path, corpus_file):
  (tmp_path / 'r/progress').mkdir(parents=True)
  (tmp_path / 'r/progress/notes.txt').write_text('mine')
  with pytest.raises(UserError, match='is not empty .it holds progress/notes.txt.: use another'):
    _prepare(tmp_path / 'r', corpus_file)
  assert (tmp_path / 'r/progress/notes.txt').read_text() == 'mine'


def test_an_output_that_cannot_be_written_is_told_before_the_text_is_read(corpus_file, monkeypatch):
  monkeypatch.setattr(preparation, 'survey_of', None)
  with pytest.raises(UserError, match='cannot be written: Not a directory'):
    _prepare(f'{corpus_file}/records', corpus_file)


def test_counts_that_are_not_those_of_the_records(tmp_path, corpus_file):
  _prepare(tmp_path / 'r', corpus_file)
  np.save(tmp_path / 'r/counts.npy', np.zeros(3, np.int64))
  with pytest.raises(UserError, match='counts.npy does not belong to these records: run bert_jax'):
    dataset.open_records(epath.Path(tmp_path / 'r'))
  (tmp_path / 'r/counts.npy').unlink()
  with pytest.raises(UserError, match='counts.npy cannot be read'):
    dataset.open_records(epath.Path(tmp_path / 'r'))


def test_a_mixture_whose_vocabulary_was_not_trained_goes_on(tmp_path, corpus_file):
  (tmp_path / 'w/vocabulary/progress').mkdir(parents=True)  # of a run that was killed
  corpus = _open(tmp_path / 'w', f'{corpus_file}=1,{corpus_file}=1')
  assert 100 < corpus.tokenizer.vocab_size <= 200
  assert not (tmp_path / 'w/vocabulary/progress').exists()
  with pytest.raises(UserError, match='is text, and 2 processes train on it'):
    dataset.open_corpus(conftest.tiny_config(f'{corpus_file}=1,{corpus_file}=1').data, 200,
                        epath.Path(tmp_path / 'v'), processes=2)
  assert not (tmp_path / 'v').exists()


def test_a_worker_that_dies_is_told():
  with (pytest.raises(Failed, match='a worker process died'),
        pool.processes(2, os.getpid) as executor):
    list(pool.ordered_map(executor, _die, range(10), 6))


def test_prepared_records_are_what_a_run_reads(tmp_path, corpus_file):
  prepared = _prepare(tmp_path / 'r', corpus_file)
  corpus = _open(tmp_path / 'w', str(tmp_path / 'r'))
  assert corpus.train.digest == prepared.train.digest
  assert not (tmp_path / 'w/corpus').exists()
  _open(tmp_path / 'w', str(tmp_path / 'r'), vocab=str(tmp_path / 'r/tokenizer'))
  other = tmp_path / 'vocab.txt'
  other.write_text('\n'.join([*tokenizer_base.SPECIAL_TOKENS, 'a', 'b']) + '\n')
  with pytest.raises(UserError, match='is not the vocabulary that made the records'):
    _open(tmp_path / 'v', str(tmp_path / 'r'), vocab=str(other))
  # Its flag counts, and not the one in tokenizer.json, as in transformers.
  changed = tmp_path / 'r/tokenizer/tokenizer_config.json'
  changed.write_text(changed.read_text().replace('"do_lower_case": true', '"do_lower_case": false'))
  with pytest.raises(UserError, match='is not the tokenizer that made these records'):
    _open(tmp_path / 'u', str(tmp_path / 'r'))


def test_several_processes_ask_for_prepared_records(tmp_path, corpus_file):
  with pytest.raises(UserError, match='is text, and 2 processes train on it'):
    dataset.open_corpus(conftest.tiny_config(corpus_file).data, 200, epath.Path(tmp_path), 2)


def test_to_a_bucket_and_back(tmp_path, corpus_file, monkeypatch):
  """A local folder plays the bucket: this tests the copying."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  monkeypatch.setattr(storage, 'is_remote', lambda path: str(path).startswith(str(tmp_path / 'b')))
  monkeypatch.setattr(storage.network, 'check', lambda url: None)
  bucket = tmp_path / 'b/records'
  preparation.prepare(preparation.Settings(corpus_file, vocab_size=200), str(bucket), 1)
  _prepare(tmp_path / 'local', corpus_file)
  assert _files(bucket) == _files(tmp_path / 'local')
  assert not storage.local_folder(str(bucket)).exists()  # the staging is gone

  def interrupted(local, remote):
    (remote / 'half').mkdir(parents=True)
    raise KeyboardInterrupt
  other = tmp_path / 'b/other'
  with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
    patched.setattr(storage, 'upload', interrupted)
    preparation.prepare(preparation.Settings(corpus_file, vocab_size=200), str(other), 1)
  with pytest.raises(UserError, match='is not empty'):
    preparation.prepare(preparation.Settings(corpus_file, vocab_size=100), str(other), 1)
  preparation.prepare(preparation.Settings(corpus_file, vocab_size=200), str(other), 1)
  assert _files(other) == _files(bucket)
  corpus = _open(tmp_path / 'w', str(bucket))
  assert _files(storage.local_folder(str(bucket))) == _files(bucket)
  (bucket / 'train-00000.tokens.bin').unlink()  # a second run reads its copy
  assert _open(tmp_path / 'v', str(bucket)).train.digest == corpus.train.digest


def test_a_given_vocabulary(tmp_path, corpus_file):
  trained = _open(tmp_path / 'w', corpus_file)
  given = _open(tmp_path / 'v', corpus_file, vocab=str(tmp_path / 'w/corpus/tokenizer/vocab.txt'))
  assert given.tokenizer.vocab == trained.tokenizer.vocab
  assert given.train.digest == trained.train.digest


def test_a_given_vocabulary_that_has_changed_since(tmp_path, small_shards, monkeypatch):
  source = conftest.write_corpus(tmp_path / 'c.txt', conftest.make_documents(250))
  trained = _open(tmp_path / 'w', source)
  vocab = tmp_path / 'vocab.txt'
  vocab.write_text('\n'.join(trained.tokenizer.vocab) + '\n')
  _open(tmp_path / 'v', source, vocab=str(vocab))
  _prepare(tmp_path / 'r', source, vocab=str(vocab))
  with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
    m.setattr(preparation._Preparation, '_finish', _interrupt)
    _prepare(tmp_path / 'half', source, vocab=str(vocab))
  vocab.write_text('\n'.join([*trained.tokenizer.vocab, 'more']) + '\n')
  with pytest.raises(UserError, match='holds records made with another version of .*vocab.txt'):
    _prepare(tmp_path / 'r', source, vocab=str(vocab))
  with pytest.raises(UserError, match='interrupted preparation with another vocabulary'):
    _prepare(tmp_path / 'half', source, vocab=str(vocab))
  with pytest.raises(UserError, match='is not the vocabulary that made the records in .*corpus'):
    _open(tmp_path / 'v', source, vocab=str(vocab))


def _interrupt(*_):
  raise KeyboardInterrupt


def test_files_that_have_changed_since_are_told(tmp_path):
  source = conftest.write_corpus(tmp_path / 'a.txt', conftest.make_documents(40))
  settings = preparation.Settings(source, vocab_size=200)
  preparation.prepare(settings, str(tmp_path / 'r'), 1)
  preparation.prepare(settings, str(tmp_path / 'r'), 1)
  conftest.write_corpus(tmp_path / 'a.txt', conftest.make_documents(50))
  with pytest.raises(UserError, match='holds records of files that have changed since'):
    preparation.prepare(settings, str(tmp_path / 'r'), 1)


def _begin(workdir):
  """Makes the workdir that of a run, not only of an attempt that failed."""
  (pathlib.Path(workdir) / 'run.json').write_text('{}')


def test_a_text_that_changed_before_the_run_began_is_prepared_again(tmp_path):
  source = conftest.write_corpus(tmp_path / 'a.txt', conftest.make_documents(40))
  before = _open(tmp_path / 'w', source).train.digest
  written = os.stat(tmp_path / 'w/corpus/manifest.json').st_mtime_ns
  assert _open(tmp_path / 'w', source).train.digest == before
  assert os.stat(tmp_path / 'w/corpus/manifest.json').st_mtime_ns == written  # it is kept
  conftest.write_corpus(tmp_path / 'a.txt', conftest.make_documents(50))
  corpus = _open(tmp_path / 'w', source)
  assert corpus.train.num_documents + corpus.heldout.num_documents == 50
  assert corpus.train.digest == _open(tmp_path / 'v', source).train.digest != before
  assert [path.name for path in (tmp_path / 'w').iterdir()] == ['corpus']
  os.utime(source, (1, 1))  # a correction may leave the size as it was
  _open(tmp_path / 'w', source)
  assert json.loads((tmp_path / 'w/corpus/manifest.json').read_text())['settings']['inputs'] == [
      f'{source} {os.path.getsize(source)} 1']


@pytest.mark.parametrize('parts', ['{0}/*.txt', '{0}/a.txt=1,{0}/b.txt=1'])
def test_a_text_that_changed_since_the_run_began_is_told(tmp_path, parts):
  texts, workdir = tmp_path / 'my texts', tmp_path / 'w'
  texts.mkdir()
  for name in 'ab':
    conftest.write_corpus(texts / f'{name}.txt', conftest.make_documents(40))
  source = parts.format(texts)
  before = _open(workdir, source).train.digest
  _begin(workdir)
  kept = _files(workdir)
  os.utime(texts / 'a.txt', (1, 1))  # a copy on another machine
  assert _open(workdir, source).train.digest == before
  conftest.write_corpus(texts / 'b.txt', conftest.make_documents(50))
  with pytest.raises(UserError) as e:
    _open(workdir, source)
  assert str(e.value) == (f'{texts}/b.txt is not the text with which this run began: put that '
                          'text back, or use another --workdir')
  (texts / 'b.txt').write_text('')  # unreadable
  assert _open(workdir, source).train.digest == before
  (texts / 'b.txt').unlink()
  (texts / 'a.txt').unlink()
  assert _open(workdir, source).train.digest == before
  assert _files(workdir) == kept


def test_the_vocabulary_of_a_mixture_is_that_of_its_fields_and_texts(tmp_path):
  for name, seed in (('a', 0), ('b', 1)):
    conftest.write_corpus(tmp_path / f'{name}.txt', conftest.make_documents(40, seed))
  source, workdir = f'{tmp_path}/a.txt=1,{tmp_path}/b.txt=1', tmp_path / 'w'
  small = _open(workdir, source, 72)
  assert small.tokenizer.vocab_size == 72
  assert _open(workdir, source, 72).train.digest == small.train.digest
  for fields in ({'vocab_size': 90}, {'tokenizer': 'bpe', 'vocab_size': 300},
                 {'lowercase': False}, {'heldout': 0.2}):
    again = _open(workdir, source, **fields)
    fresh = _open(tmp_path / f'fresh_{min(fields)}', source, **fields)
    assert again.tokenizer.serialized() == fresh.tokenizer.serialized()
    assert again.train.digest == fresh.train.digest
  (tmp_path / 'b.txt').write_text((tmp_path / 'b.txt').read_text().replace('river', 'ocean'))
  assert 'ocean' in _open(workdir, source).tokenizer.vocab
  _begin(workdir)
  with pytest.raises(UserError) as e:
    _open(workdir, source, 90)
  assert str(e.value) == (f'{workdir} was made with model.vocab_size=200, now it is 90: use '
                          'another --workdir')
  with pytest.raises(UserError, match='was made with data.lowercase=True, now it is False: use'):
    _open(workdir, source, lowercase=False)
  (workdir / 'vocabulary/made_of.json').unlink()  # as older versions left it
  assert 'ocean' in _open(workdir, source, 90).tokenizer.vocab


def test_held_out_sentences_in_the_training_text_of_another_part_are_counted(tmp_path, monkeypatch):
  documents = conftest.make_documents(300)
  a = conftest.write_corpus(tmp_path / 'a.txt', documents)
  # A document with another sentence has another hash, so it may be held out in one part only.
  b = conftest.write_corpus(tmp_path / 'b.txt', [
      [f'Page {i} is a copy.', *document] for i, document in enumerate(documents)])
  corpus = _open(tmp_path / 'w', f'{a}=1,{b}=1')
  train, held = ([s for part in split.corpora for d in _sentences(corpus, part) for s in d]
                 for split in (corpus.train, corpus.heldout))
  seen = sum(s in set(train) for s in held)
  assert len(held) > seen > 100
  assert corpus.notes[-1] == (
      f'{seen:,} of {len(held):,} held-out sentences occur in the training text of another part: a '
      'part leaves out only its own held-out sentences')
  with monkeypatch.context() as m:
    m.setattr(dataset, '_COUNTED', 1_000)
    assert _open(tmp_path / 'w', f'{a}=1,{b}=1').notes[-1] == (
        'held-out sentences may also occur in the training text of another part: a text of more '
        'than 1,000 tokens is not searched')
  _begin(tmp_path / 'w')
  assert corpus.notes[:-1] == _open(tmp_path / 'w', f'{a}=1,{b}=1').notes
  alone = _open(tmp_path / 'v', f'{a}=1,{a}=2')  # the same documents are held out
  assert not any('of a part' in note for note in alone.notes)


def test_a_workdir_moves_with_its_vocabulary(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  source = conftest.write_corpus(tmp_path / 'a.txt', conftest.make_documents(40))
  mixture = _open('mix', f'{source}=1,{source}=1').train.digest
  (tmp_path / 'one').mkdir()
  _open('other', source, 72)
  (tmp_path / 'other/corpus/tokenizer').rename('one/tokenizer')  # as init_from leaves it
  one = _open('one', source, vocab='one/tokenizer').train.digest
  for name in ('mix', 'one'):
    _begin(name)
    (tmp_path / name).rename(tmp_path / f'{name}_moved')
  for folder in ('', f'{tmp_path}/'):
    assert _open(f'{folder}mix_moved', f'{source}=1,{source}=1').train.digest == mixture
    assert _open(f'{folder}one_moved', source,
                 vocab=f'{folder}one_moved/tokenizer').train.digest == one
  with pytest.raises(UserError) as e:
    _open('one_moved', source, vocab='mix_moved/vocabulary')
  assert str(e.value) == (
      'data.vocab=mix_moved/vocabulary is not the vocabulary that made the records in '
      'one_moved/corpus: give that vocabulary, or use another --workdir')


def test_tfds_is_prepared_and_trained_on(tmp_path, poems, monkeypatch):
  monkeypatch.setenv('TFDS_DATA_DIR', str(poems))
  corpus = _prepare(tmp_path / 'r', 'tfds:poems', vocab_size=80, lines_are_sentences=True)
  assert corpus.train.num_documents + corpus.heldout.num_documents == 40
  assert corpus.train.num_sentences == 2 * corpus.train.num_documents
  # Numbers are in other documents' pieces, the frame of the sentences is not.
  assert all(d[0].startswith('poem') and d[0].endswith('is red .') and d[1] == 'it is short .'
             for d in _sentences(corpus, corpus.train))


def test_small_corpora(tmp_path):
  three = conftest.write_corpus(tmp_path / 'three.txt', conftest.make_documents(3))
  corpus = _open(tmp_path / 'w', three)
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
    _open(tmp_path / 'w', str(tmp_path / 'c.txt'))
  assert not (tmp_path / 'w/corpus').exists()


def test_manifest_says_what_was_asked(tmp_path, corpus_file):
  _open(tmp_path / 'w', corpus_file)
  manifest = json.loads((tmp_path / 'w/corpus/manifest.json').read_text())
  assert manifest['settings']['source'] == corpus_file and manifest['settings']['vocab_size'] == 200


def test_counting_different_texts_in_constant_memory():
  exact, sampled = survey.Distinct(), survey.Distinct(capacity=2_000)
  for i in range(30_000):
    for distinct in (exact, sampled):
      distinct.add(survey.text_hash(str(i % 20_000).encode()))
  assert exact.different() == 20_000 and exact.total == sampled.total == 30_000
  assert len(sampled._hashes) <= 2_000
  assert sampled.different() == pytest.approx(20_000, rel=0.1)
  # The smallest hashes, which are held out, are all there.
  small = sampled.smallest()
  np.testing.assert_array_equal(small, exact.smallest()[:len(small)])
