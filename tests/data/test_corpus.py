import gzip

import numpy as np
import pytest

from bert_jax.data import builtin
from bert_jax.data import corpus
from bert_jax.errors import UserError


def _documents(path, data_format='text'):
  return list(corpus.open_source(str(path), data_format, 'text')())


def test_blank_lines_part_documents(tmp_path):
  (tmp_path / 'a.txt').write_bytes('\ufeffOne. Two.\r\nThree.\n\n\n \nFour.'.encode())
  with gzip.open(tmp_path / 'b.txt.gz', 'wt') as f:
    f.write('Five.\n')
  assert _documents(tmp_path / '*.txt*') == [['One. Two.', 'Three.'], ['Four.'], ['Five.']]


def test_wikitext(tmp_path):
  (tmp_path / 'wiki.train.raw').write_text(
      ' \n = Valkyria Chronicles = \n \n It was @-@ at last 1 @,@ 000 @.@ 5 m . It ended ! Really ?'
      ' Yes \n \n = = Gameplay = = \n \n = = = Deep = = = \n\n Played . \n'
      ' = Tower = \n\n Tall .\n')
  documents = _documents(tmp_path / 'wiki.train.raw', 'wikitext')
  assert documents == [['It was @-@ at last 1 @,@ 000 @.@ 5 m . It ended ! Really ? Yes',
                        'Played .'], ['Tall .']]
  assert corpus.split_sentences(documents[0][0], 'wikitext', 'en') == [
      'It was-at last 1,000.5 m .', 'It ended !', 'Really ?', 'Yes']


def test_sentences_in_english_and_chinese():
  assert corpus.split_sentences('Dr. Smith came in Jan. 1990. He left.', 'text', 'en') == [
      'Dr. Smith came in Jan. 1990.', 'He left.']
  assert corpus.split_sentences('今天天气很好。我们去公园吧！', 'text', 'zh') == [
      '今天天气很好。', '我们去公园吧！']


@pytest.mark.parametrize('content, message', [
    (b'', 'empty'),
    (b'fine\nbad \xff byte\n', 'line 2: invalid UTF-8'),
    (b'text\n\x00\x01\x02', 'line 2: a NUL byte'),
])
def test_bad_files_are_named_with_their_line(tmp_path, content, message):
  (tmp_path / 'bad.txt').write_bytes(content)
  with pytest.raises(UserError, match=message) as e:
    _documents(tmp_path / 'bad.txt')
  assert 'bad.txt' in str(e.value)


def test_damaged_gzip(tmp_path):
  whole = gzip.compress(b'One.\n' * 10_000)
  for name, content in (('cut.gz', whole[:len(whole) // 2]), ('not.gz', b'plain text\n')):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f'{name}: damaged gzip'):
      _documents(tmp_path / name)


def test_nothing_matches():
  with pytest.raises(UserError, match='matches no file'):
    _documents('/nowhere/*.txt')


def test_tfds_reads_a_real_data_set_without_tensorflow(tmp_path):
  import tensorflow_datasets as tfds

  class Poems(tfds.core.GeneratorBasedBuilder):
    """Two poems."""
    VERSION = tfds.core.Version('1.0.0')

    def _info(self):
      return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(
          {'text': tfds.features.Text(), 'id': tfds.features.Scalar(np.int64)}))

    def _split_generators(self, dl_manager):
      return {'train': self._generate_examples()}

    def _generate_examples(self):
      for i, text in enumerate(('Roses are red.\nViolets are blue.', 'Ünïcode 猫.')):
        yield i, {'text': text, 'id': i}

  builder = Poems(data_dir=tmp_path, file_format='array_record')
  builder.download_and_prepare()
  read = lambda column: sorted(corpus.tfds_documents('poems', column, data_dir=str(tmp_path)))
  assert read('text') == [['Roses are red.', 'Violets are blue.'], ['Ünïcode 猫.']]
  with pytest.raises(UserError, match="no column 'body'.*id, text"):
    read('body')
  with pytest.raises(UserError, match='no_such_set'):
    list(corpus.tfds_documents('no_such_set', 'text', data_dir=str(tmp_path)))
  info = next(tmp_path.rglob('dataset_info.json'))  # as most data sets are stored
  info.write_text(info.read_text().replace('array_record', 'tfrecord'))
  with pytest.raises(UserError, match='tfds:poems cannot be read: .*file_format=array_record'):
    read('text')


def test_docstrings_become_prose(tmp_path):
  source = tmp_path / 'module.py'
  source.write_text('''"""First paragraph that says quite enough to be kept here.

>>> code(1)
"""
class A:
  def f(self):
    """Return the :func:`~numpy.mean` of all the ``values`` that were given."""
''')
  docstrings = builtin.module_docstrings(source)
  found = [p for d in docstrings for p in builtin.paragraphs(d)]
  assert found == ['First paragraph that says quite enough to be kept here.',
                   'Return the numpy.mean of all the values that were given.']
  assert not builtin.is_prose('x = [1, 2, 3]; y = f(x) + g(x) * 2')
  source.write_text('def broken(')
  assert builtin.module_docstrings(source) == []
