import os
import shutil

from etils import epath
import numpy as np
import pytest

from bert_jax.data import dataset, encode, preparation, records, survey
from bert_jax.data.tokenizers import base as tokenizer_base
from bert_jax.errors import Failed, UserError
from bert_jax.runtime import pool, storage
from tests import conftest
from tests.data.corpora import files, open_corpus, prepare, sentences


@pytest.mark.parametrize('workers', [1, 2])
def test_no_held_out_sentence_has_the_tokens_of_a_training_sentence(tmp_path, monkeypatch,
                                                                    workers):
  """Letters with other case, accents or spaces are the same to the model."""
  monkeypatch.setattr(preparation, '_IN_PROCESS', 0)
  documents = conftest.make_documents(60)
  for i, document in enumerate(documents):  # no two documents spell it alike
    letters = [c.upper() if i >> k & 1 else c for k, c in enumerate('cafe ferm')]
    document.append(''.join(letters) + ('e\u0301' if i % 2 else '\u00c9') + '  .')
  corpus = prepare(tmp_path / 'w', conftest.write_corpus(tmp_path / 'c.txt', documents), workers,
                   heldout=0.2)
  train, heldout = ({s for d in sentences(corpus, split) for s in d}
                    for split in (corpus.train, corpus.heldout))
  assert heldout and not train & heldout
  count = corpus.heldout.num_documents
  assert any(f'{count} held-out sentences that occur' in note for note in corpus.notes)


def test_the_neighbors_of_a_left_out_sentence_are_in_different_documents(tmp_path):
  documents = conftest.make_documents(60)
  for document in documents:
    document[1] = 'they all say this.'
  corpus = prepare(tmp_path / 'w', conftest.write_corpus(tmp_path / 'c.txt', documents), 1,
                   heldout=0.2)
  held_out = sentences(corpus, corpus.heldout)
  assert not any('they all say this.' in document for document in held_out)
  assert sum(len(document) == 1 for document in held_out) >= 12  # the first sentences
  for document in documents:
    assert not any(document[0] in x and document[2] in x for x in held_out)


def test_cross_entropy_of_frequencies_by_hand():
  # Add-one smoothing: (3 + 1) / 6 and (1 + 1) / 6.
  assert preparation.cross_entropy(np.array([1, 1]), np.array([3, 1])) == pytest.approx(
      -(np.log(4 / 6) + np.log(2 / 6)) / 2)


@pytest.fixture
def small_shards(monkeypatch):
  """Several shards and batches from a few kilobytes of text."""
  monkeypatch.setattr(preparation, '_SHARD', 20_000)
  monkeypatch.setattr(preparation, '_IN_PROCESS', 0)
  batches = encode.batches
  monkeypatch.setattr(encode, 'batches', lambda texts, size=0: batches(texts, 3_000))


def test_the_output_does_not_depend_on_the_number_of_workers(tmp_path, small_shards):
  source = conftest.write_corpus(tmp_path / 'c.txt', conftest.make_documents(250))
  one = prepare(tmp_path / 'one', source, workers=1)
  two = prepare(tmp_path / 'two', source, workers=2)
  manifest = records.read_manifest(epath.Path(tmp_path / 'one'))
  assert len(manifest['splits']['train']) > 3
  assert files(tmp_path / 'one') == files(tmp_path / 'two')
  assert not (tmp_path / 'two/progress').exists()
  assert one.train.digest == two.train.digest
  expected = one.train.num_documents + one.heldout.num_documents
  assert expected == 250 == manifest['documents']


@pytest.mark.parametrize('when, name', [(0, 'part'), (1, 'part'), (2, 'part[v2]')])
def test_an_interrupted_preparation_resumes(tmp_path, small_shards, monkeypatch, when, name):
  part = tmp_path / name
  source = conftest.write_corpus(tmp_path / 'c.txt', conftest.make_documents(250))
  prepare(tmp_path / 'whole', source)
  with monkeypatch.context() as m:
    close, closed = records.ShardWriter.close, []

    def stop(writer):
      if len(closed) == when:
        raise KeyboardInterrupt
      closed.append(writer.name)
      return close(writer)

    m.setattr(records.ShardWriter, 'close', stop)
    with pytest.raises(KeyboardInterrupt):
      prepare(part, source)
  assert not (part / 'manifest.json').exists()
  with pytest.raises(UserError, match='interrupted preparation with another lowercase'):
    prepare(part, source, lowercase=False)
  with monkeypatch.context() as m:  # finished shards are not written again
    begin, begun = records.ShardWriter.__init__, []
    m.setattr(records.ShardWriter, '__init__',
              lambda self, d, name, *a: (begun.append(name), begin(self, d, name, *a))[1])
    prepare(part, source)
    assert f'train-{when - 1:05}' not in begun and f'train-{when:05}' in begun
  assert files(part) == files(tmp_path / 'whole')


def test_a_finished_folder_does_not_change(tmp_path, corpus_file):
  prepare(tmp_path / 'r', corpus_file)
  before = files(tmp_path / 'r')
  prepare(tmp_path / 'r', corpus_file)
  assert files(tmp_path / 'r') == before
  with pytest.raises(UserError, match='not empty: it holds records made with another heldout'):
    prepare(tmp_path / 'r', corpus_file, heldout=0.3)
  (tmp_path / 'mine').mkdir()
  (tmp_path / 'mine/notes.txt').write_text('keep me')
  with pytest.raises(UserError, match='is not empty .it holds notes.txt'):
    prepare(tmp_path / 'mine', corpus_file)
  assert files(tmp_path / 'mine') == {'notes.txt': b'keep me'}


def test_mistakes_leave_nothing_behind(tmp_path, corpus_file):
  (tmp_path / 'bad.jsonl').write_text('{"text": "Fine."}\n{"text"')
  with pytest.raises(UserError, match='bad.jsonl, line 2: invalid JSON'):
    prepare(tmp_path / 'r', tmp_path / 'bad.jsonl')
  # Impossible vocabularies are refused before the text is read.
  for options, message in (({'vocab_size': 3}, 'leaves no room'),
                           ({'tokenizer': 'morphemes'}, "data.tokenizer='morphemes' is unknown"),
                           ({'tokenizer': 'bpe', 'vocab_size': 100}, 'no room for the 256 bytes')):
    with pytest.raises(UserError, match=message):
      prepare(tmp_path / 'r', tmp_path / 'absent.txt', **options)
  (tmp_path / 'controls.txt').write_text('\x01\n\n\x02\n\n\x03\n')
  with pytest.raises(UserError, match='no text that the vocabulary can encode'):
    prepare(tmp_path / 'r', tmp_path / 'controls.txt', vocab_size=9)
  assert not (tmp_path / 'r').exists()


def test_a_manifest_of_another_program_is_refused(tmp_path, corpus_file):
  (tmp_path / 'app').mkdir()
  (tmp_path / 'app/manifest.json').write_text('{"version": 1, "name": "app"}')
  for use in (lambda: prepare(tmp_path / 'app', corpus_file),
              lambda: open_corpus(tmp_path / 'w', str(tmp_path / 'app'))):
    with pytest.raises(UserError, match='is not a manifest of token records, it has no settings,'):
      use()


def _die(item):
  os._exit(9)


def test_a_users_folder_named_progress_is_kept(tmp_path, corpus_file):
  (tmp_path / 'r/progress').mkdir(parents=True)
  (tmp_path / 'r/progress/notes.txt').write_text('mine')
  with pytest.raises(UserError, match='is not empty .it holds progress/notes.txt.: use another'):
    prepare(tmp_path / 'r', corpus_file)
  assert (tmp_path / 'r/progress/notes.txt').read_text() == 'mine'


def test_a_mistake_in_a_resumed_preparation_keeps_the_users_files(tmp_path, monkeypatch):
  (tmp_path / 'c.txt').write_text('A text.\n\nAnother text.\n')
  with monkeypatch.context() as m:
    m.setattr(preparation, 'make_tokenizer', None)  # stops after the survey
    with pytest.raises(TypeError):
      prepare(tmp_path / 'r', tmp_path / 'c.txt')
  (tmp_path / 'r/notes.txt').write_text('mine')

  def fail(*_):
    raise UserError('a mistake')

  monkeypatch.setattr(preparation, 'make_tokenizer', fail)
  with pytest.raises(UserError, match='a mistake'):
    prepare(tmp_path / 'r', tmp_path / 'c.txt')
  assert files(tmp_path / 'r') == {'notes.txt': b'mine'}


def test_an_unwritable_output_is_refused_before_the_text_is_read(corpus_file, monkeypatch):
  monkeypatch.setattr(preparation, 'survey_of', None)
  with pytest.raises(UserError, match='cannot be written: Not a directory'):
    prepare(f'{corpus_file}/records', corpus_file)


def test_counts_of_other_records_are_refused(tmp_path, corpus_file):
  prepare(tmp_path / 'r', corpus_file)
  np.save(tmp_path / 'r/counts.npy', np.zeros(3, np.int64))
  with pytest.raises(UserError, match='counts.npy does not belong to these records: run bert_jax'):
    dataset.open_records(epath.Path(tmp_path / 'r'))
  (tmp_path / 'r/counts.npy').unlink()
  with pytest.raises(UserError, match='counts.npy cannot be read'):
    dataset.open_records(epath.Path(tmp_path / 'r'))


def test_a_dead_worker_is_an_error():
  with (pytest.raises(Failed, match='a worker process died'),
        pool.processes(2, os.getpid) as executor):
    list(pool.ordered_map(executor, _die, range(10), 6))


def test_a_run_reads_prepared_records(tmp_path, corpus_file):
  prepared = prepare(tmp_path / 'r', corpus_file)
  corpus = open_corpus(tmp_path / 'w', str(tmp_path / 'r'))
  assert corpus.train.digest == prepared.train.digest
  assert not (tmp_path / 'w/corpus').exists()
  open_corpus(tmp_path / 'w', str(tmp_path / 'r'), vocab=str(tmp_path / 'r/tokenizer'))
  other = tmp_path / 'vocab.txt'
  other.write_text('\n'.join([*tokenizer_base.SPECIAL_TOKENS, 'a', 'b']) + '\n')
  with pytest.raises(UserError, match='is not the vocabulary that made the records'):
    open_corpus(tmp_path / 'v', str(tmp_path / 'r'), vocab=str(other))
  # As in transformers, this flag wins over the one in tokenizer.json.
  changed = tmp_path / 'r/tokenizer/tokenizer_config.json'
  changed.write_text(changed.read_text().replace('"do_lower_case": true', '"do_lower_case": false'))
  with pytest.raises(UserError, match='is not the tokenizer that made these records'):
    open_corpus(tmp_path / 'u', str(tmp_path / 'r'))


def test_records_are_written_to_a_bucket_and_read_back(tmp_path, monkeypatch):
  """A local folder stands in for the bucket: this tests the copying."""
  source = conftest.write_corpus(tmp_path / 'c.txt', conftest.make_documents(60))
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  monkeypatch.setattr(storage, 'is_remote', lambda path: str(path).startswith(str(tmp_path / 'b')))
  monkeypatch.setattr(storage.network, 'check', lambda url: None)
  bucket = tmp_path / 'b/records'
  preparation.prepare(preparation.Settings(source, vocab_size=200), str(bucket), 1)
  prepare(tmp_path / 'local', source)
  assert files(bucket) == files(tmp_path / 'local')
  staging = storage.local_folder(f'{bucket}#prepare')
  assert not staging.exists()

  def interrupted(local, remote):
    (remote / 'half').mkdir(parents=True)
    raise KeyboardInterrupt
  other = tmp_path / 'b/other'
  with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
    patched.setattr(storage, 'upload', interrupted)
    preparation.prepare(preparation.Settings(source, vocab_size=200), str(other), 1)
  with pytest.raises(UserError, match='is not empty'):
    preparation.prepare(preparation.Settings(source, vocab_size=100), str(other), 1)
  preparation.prepare(preparation.Settings(source, vocab_size=200), str(other), 1)
  assert files(other) == files(bucket)
  corpus = open_corpus(tmp_path / 'w', str(bucket))
  assert files(storage.local_folder(str(bucket))) == files(bucket)
  (bucket / 'train-00000.tokens.bin').unlink()  # a second run reads the local copy
  assert open_corpus(tmp_path / 'v', str(bucket)).train.digest == corpus.train.digest
  # The local copy of deleted records does not come back after a change of the text.
  shutil.rmtree(bucket)
  conftest.write_corpus(tmp_path / 'c.txt', conftest.make_documents(70, seed=5))
  preparation.prepare(preparation.Settings(source, vocab_size=200), str(bucket), 1)
  assert files(bucket) != files(other)
  # Neither do complete records whose upload was interrupted.
  shutil.rmtree(bucket)
  shutil.copytree(other, staging)
  preparation.prepare(preparation.Settings(source, vocab_size=200), str(bucket), 1)
  assert files(bucket) != files(other) and not staging.exists()


def test_a_changed_vocabulary_is_refused(tmp_path, small_shards, monkeypatch):
  source = conftest.write_corpus(tmp_path / 'c.txt', conftest.make_documents(250))
  trained = open_corpus(tmp_path / 'w', source)
  vocab = tmp_path / 'vocab.txt'
  vocab.write_text('\n'.join(trained.tokenizer.vocab) + '\n')
  open_corpus(tmp_path / 'v', source, vocab=str(vocab))
  prepare(tmp_path / 'r', source, vocab=str(vocab))
  made = (tmp_path / 'r/manifest.json').read_bytes()
  prepare(tmp_path / 'r', source, vocab=f'{tmp_path}/./vocab.txt')  # the same file
  assert (tmp_path / 'r/manifest.json').read_bytes() == made
  with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
    m.setattr(preparation._Preparation, '_finish', _interrupt)
    prepare(tmp_path / 'half', source, vocab=str(vocab))
  vocab.write_text('\n'.join([*trained.tokenizer.vocab, 'more']) + '\n')
  with pytest.raises(UserError, match='holds records made with another version of .*vocab.txt'):
    prepare(tmp_path / 'r', source, vocab=str(vocab))
  with pytest.raises(UserError, match='interrupted preparation with another vocabulary'):
    prepare(tmp_path / 'half', source, vocab=str(vocab))
  with pytest.raises(UserError, match='is not the vocabulary that made the records in .*corpus'):
    open_corpus(tmp_path / 'v', source, vocab=str(vocab))


def _interrupt(*_):
  raise KeyboardInterrupt


def test_changed_files_are_refused(tmp_path):
  source = conftest.write_corpus(tmp_path / 'a.txt', conftest.make_documents(40))
  settings = preparation.Settings(source, vocab_size=200)
  preparation.prepare(settings, str(tmp_path / 'r'), 1)
  preparation.prepare(settings, str(tmp_path / 'r'), 1)
  conftest.write_corpus(tmp_path / 'a.txt', conftest.make_documents(50))
  with pytest.raises(UserError, match='holds records of files that have changed since'):
    preparation.prepare(settings, str(tmp_path / 'r'), 1)


def test_a_tfds_source_is_prepared(tmp_path, poems, monkeypatch):
  monkeypatch.setenv('TFDS_DATA_DIR', str(poems))
  corpus = prepare(tmp_path / 'r', 'tfds:poems', vocab_size=80, lines_are_sentences=True)
  assert corpus.train.num_documents + corpus.heldout.num_documents == 40
  assert corpus.train.num_sentences == 2 * corpus.train.num_documents
  # The poems differ only in their numbers.
  assert all(d[0].startswith('poem') and d[0].endswith('is red .') and d[1] == 'it is short .'
             for d in sentences(corpus, corpus.train))


def test_counting_different_texts_in_constant_memory():
  exact, sampled = survey.Distinct(), survey.Distinct(capacity=2_000)
  for i in range(30_000):
    for distinct in (exact, sampled):
      distinct.add(survey.text_hash(str(i % 20_000).encode()))
  assert exact.different() == 20_000 and exact.total == sampled.total == 30_000
  assert len(sampled._hashes) <= 2_000
  assert sampled.different() == pytest.approx(20_000, rel=0.1)
  # The sample has all of the smallest hashes, which are held out.
  small = sampled.smallest()
  np.testing.assert_array_equal(small, exact.smallest()[:len(small)])
