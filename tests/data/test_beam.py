import dataclasses

import numpy as np
import pytest

from bert_jax.data import beam, dataset, preparation
from bert_jax.errors import Failed, UserError
from tests import conftest
from tests.data import made

pytest.importorskip('apache_beam')  # an optional install


def _content(split):
  """The documents of a split as sorted lists of tokens."""
  documents = []
  for number in range(split.num_blocks):
    lengths, starts, _ = split.block(number)
    begin = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]) + split.blocks[number, 0]
    bounds = [*begin[starts], begin[-1]]
    documents += [split.tokens(np.arange(a, b)).tolist() for a, b in zip(bounds, bounds[1:])]
  return sorted(documents)


def test_the_direct_runner_makes_the_records_of_prepare(tmp_path):
  documents = conftest.make_documents(90)
  for i in range(3):
    conftest.write_corpus(tmp_path / f'c{i}.txt', documents[30 * i:30 * i + 30])
  source = str(tmp_path / 'c*.txt')
  whole = preparation.Settings(source, vocab_size=200, heldout=0.0)
  preparation.prepare(whole, str(tmp_path / 'one'), 1)
  settings = preparation.Settings(source, vocab=str(tmp_path / 'one/tokenizer/vocab.txt'),
                                  heldout=0.1)
  beam.run(settings, str(tmp_path / 'many'), ['--runner=DirectRunner'])
  one = dataset.open_records(made.path(tmp_path / 'one'))
  many = dataset.open_records(made.path(tmp_path / 'many'))
  assert len(list((tmp_path / 'many').glob('train-*.tokens.bin'))) == 3
  assert 0 < many.heldout.num_documents < 20
  assert sorted(_content(many.train) + _content(many.heldout)) == _content(one.train)
  np.testing.assert_array_equal(
      many.counts, np.bincount([t for d in _content(many.train) for t in d],
                               minlength=many.tokenizer.vocab_size))
  with pytest.raises(UserError, match='is not empty'):
    beam.run(settings, str(tmp_path / 'many'))
  (tmp_path / 'c1.txt').write_bytes(b'fine\n\n\xff\n')
  with pytest.raises((UserError, Failed),
                     match=r'failed, delete .*bad before you run it again: .*c1.txt'):
    beam.run(settings, str(tmp_path / 'bad'), ['--runner=DirectRunner'])
  (tmp_path / 'one.txt').write_text('w1 w2.\n')
  with pytest.raises((UserError, Failed), match='holds one document: at least two are needed'):
    beam.run(dataclasses.replace(settings, source=str(tmp_path / 'one.txt')),
             str(tmp_path / 'alone'), ['--runner=DirectRunner'])
  with pytest.raises(UserError, match='Beam needs --vocab'):
    beam.run(preparation.Settings(source), str(tmp_path / 'new'))
