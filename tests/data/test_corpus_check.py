import numpy as np
import pytest

from bert_jax.data import corpus_check, preparation
from bert_jax.errors import UserError
from tests import conftest


def _check(tmp_path, documents, separator='\n\n', vocab_size=300, **settings):
  path = tmp_path / 'c.txt'
  path.write_text(separator.join('\n'.join(d) for d in documents) + '\n')
  settings = preparation.Settings(str(path), vocab_size=None if 'vocab' in settings else vocab_size,
                              **settings)
  report = corpus_check.check(settings)
  return report, list(corpus_check.warnings(report, settings))


def test_a_sound_corpus_has_exact_counts_and_no_warnings(tmp_path, capsys):
  documents = conftest.make_documents(80)
  report, warnings = _check(tmp_path, documents)
  assert warnings == []
  assert report.survey.documents == 80 and report.lines == sum(map(len, documents))
  assert len(report.sentences) == report.lines and report.documents.tolist() == list(map(
      len, documents))
  assert report.sentences.sum() == report.counts.sum()
  assert abs(report.labels[0] - report.labels[1]) <= 1
  assert 2 < report.plateau < np.log(300)
  assert not any(p.name != 'c.txt' for p in tmp_path.iterdir())  # nothing is written
  corpus_check.print_report(preparation.Settings(str(tmp_path / 'c.txt'), vocab_size=300))
  out = capsys.readouterr().out
  assert f'{report.counts.sum():,}, 0.00% unknown' in out and 'WARNING' not in out
  assert '8 - 15' in out and '#' in out


def test_histogram_by_hand():
  assert [line.split() for line in corpus_check.histogram(np.array([1, 2, 3, 9]))] == [
      ['1', '-', '1', '25.0%', '#' * 12], ['2', '-', '3', '50.0%', '#' * 25],
      ['4', '-', '7', '0.0%'], ['8', '-', '15', '25.0%', '#' * 12]]


def test_faults_of_a_corpus_give_warnings(tmp_path):
  documents = conftest.make_documents(60)
  _, warnings = _check(tmp_path, documents, separator='\n')
  assert any('all text is one document' in w for w in warnings)
  _, warnings = _check(tmp_path, [[s] for d in documents for s in d])
  assert any('100% of the documents have only one sentence' in w for w in warnings)
  _, warnings = _check(tmp_path, [[*d, 'All rights reserved.'] for d in documents])
  assert any('of the lines are copies of others' in w for w in warnings)
  _, warnings = _check(tmp_path, documents + documents[:10])
  assert any('10 documents are exact copies' in w for w in warnings)
  vocab = tmp_path / 'vocab.txt'
  vocab.write_text('\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'the', '.']) + '\n')
  _, warnings = _check(tmp_path, documents, vocab=str(vocab))
  assert any('of the tokens are [UNK]' in w for w in warnings)
  _, warnings = _check(tmp_path, [['今天天气很好' * 60, '我们去公园吧' * 60]] * 6)
  assert any('give --language=zh' in w for w in warnings)
  assert any('more than 256 tokens' in w for w in warnings)
  with pytest.raises(UserError, match='holds no text that the vocabulary can encode'):
    _check(tmp_path, [['\x01'], ['\x02'], ['\x03']], vocab=str(vocab))
  _, warnings = _check(tmp_path, [documents[0] * 60, documents[1]])
  assert any('would be true next sentences, not half' in w for w in warnings)
