"""Runs on a mixture of corpora: one vocabulary, resumed with the same bits, mistakes."""

import json
import pathlib
import re

from etils import epath
import numpy as np
import pytest

from bert_jax.data import dataset, mixture, preparation
from bert_jax.data.pairs import RowLayout
from bert_jax.data.phases import Phases
from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.errors import UserError
from bert_jax.runs import run
from bert_jax.training import integrity
from tests import conftest


@pytest.fixture(scope='module')
def texts(tmp_path_factory) -> pathlib.Path:
  """A folder of two texts without a word in common."""
  folder = tmp_path_factory.mktemp('texts')
  documents = conftest.make_documents(60)
  conftest.write_corpus(folder / 'a.txt', documents)
  conftest.write_corpus(folder / 'b.txt', [[re.sub(r'\w+', lambda m: m[0][::-1] + 'q', sentence)
                                            for sentence in document] for document in documents])
  return folder


def train(source, workdir, **overrides):
  run.run(conftest.tiny_config(source, **{'data.heldout': 0.1, **overrides}), str(workdir))


@pytest.mark.medium
def test_a_mixture_of_texts_is_prepared_once_and_resumes_with_the_same_bits(texts, tmp_path):
  source, workdir = f'{texts}/a.txt=3:1,{texts}/b.txt=1:3', tmp_path / 'run'
  train(source, workdir, log_batch_digest=True)
  corpora = [dataset.open_records(epath.Path(workdir / 'corpora' / name / 'corpus'))
             for name in '01']
  shared = epath.Path(workdir / 'vocabulary')
  for corpus in corpora:  # every word of both is known
    assert corpus.counts[corpus.tokenizer.unk_id] == 0
  assert shared.exists() and corpora[0].tokenizer.vocab_size == corpora[1].tokenizer.vocab_size
  checkpoints = epath.Path(workdir / 'checkpoints')
  whole = integrity.description(checkpoints / '12')['arrays']
  (checkpoints / '12').rmtree()
  train(source, workdir, log_batch_digest=True)
  assert integrity.description(checkpoints / '12')['arrays'] == whole

  lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  plateau = [line['eval_unigram_entropy'] for line in lines if 'eval_unigram_entropy' in line]
  alone = [corpus.unigram_entropy for corpus in corpora]
  assert plateau[-1] > max(alone)  # two texts without a common word are harder to guess
  with pytest.raises(UserError, match='trained on other rows'):  # other shares
    train(source.replace('3:1', '1:1'), workdir, log_batch_digest=True)


@pytest.mark.medium
def test_records_with_different_vocabularies_are_refused(texts, tmp_path):
  for name in 'ab':
    train(f'{texts}/{name}.txt', tmp_path / name, train_steps=1, **{'optimizer.warmup_steps': 0})
  with pytest.raises(UserError, match='have another vocabulary than the records in .*prepare one '
                                      'of them again with --vocab'):
    train(f'{tmp_path}/a/corpus=1,{tmp_path}/b/corpus=1', tmp_path / 'run')


def test_a_corpus_of_a_mixture_may_hold_nothing_out(texts, tmp_path):
  vocab = str(texts / 'vocab.txt')
  (texts / 'vocab.txt').write_text(
      '\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *'abcdefghijklmnopqrstuvwxyz.',
                 *(f'##{c}' for c in 'abcdefghijklmnopqrstuvwxyz0123456789')]) + '\n')
  # The vocabulary of b has a model whose table has six unused rows.
  tokenizer = tokenizer_reader.load(epath.Path(vocab))
  tokenizer.padded(tokenizer.vocab_size + 6).save(epath.Path(tmp_path / 'padded'))
  for name, heldout, read in (('a', 0.0, vocab), ('b', 0.1, str(tmp_path / 'padded'))):
    preparation.prepare(preparation.Settings(f'{texts}/{name}.txt', vocab=read, heldout=heldout),
                        str(tmp_path / name))
  config = conftest.tiny_config(f'{tmp_path}/a=3,{tmp_path}/b=1')
  corpus = dataset.open_corpus(config.data, 200, epath.Path(tmp_path / 'run'))
  assert corpus.tokenizer.vocab_size == len(corpus.counts) == tokenizer.vocab_size + 6
  assert len(corpus.train.corpora) == 2 and corpus.heldout.weights == ((0.25, 0.25),)
  assert corpus.heldout.num_tokens == dataset.open_records(
      epath.Path(tmp_path / 'b')).heldout.num_tokens
  phases = Phases.create(((2, 32, 8),), 2, 0, 0)
  (rows,) = mixture.mixed_rows(
      corpus.heldout, [RowLayout(32, 4)], phases, 0, corpus.tokenizer, False)
  # Padding, [CLS] and [SEP] are not in the text.
  tokens = [~np.isin(batch.tokens.ids, (0, 2, 3)) for batch in rows.epoch_batches(8)]
  assert np.sum(tokens) == corpus.heldout.num_tokens
