import gzip
import json

import pytest
from tensorflow_datasets.core.download import downloader
import urllib3

from bert_jax.data import builtin, corpus, corpus_check, tfds_reader
from bert_jax.errors import UserError


def _documents(path, data_format='auto', column='text'):
  settings = corpus.Settings(str(path), format=data_format, text_column=column)
  return list(corpus.open_source(settings, None).read())


def _sentences(document, **settings):
  return corpus.Settings(**{'source': '', **settings}).sentences(document)


def test_blank_lines_separate_documents(tmp_path):
  (tmp_path / 'a.txt').write_bytes('\ufeffOne. Two.\r\nThree.\n\n\n \nFour.'.encode())
  with gzip.open(tmp_path / 'b.txt.gz', 'wt') as f:
    f.write('Five.\n')
  assert _documents(tmp_path / '*.txt*') == ['One. Two.\nThree.', 'Four.', 'Five.']
  assert _sentences('One. Two.\r\nThree.') == ['One.', 'Two.', 'Three.']
  assert _sentences('One. Two.\r\nThree.', lines_are_sentences=True) == ['One. Two.', 'Three.']


@pytest.mark.parametrize('blank', [
    '\u3000', '\xa0', '\u3000 \xa0\t', '\x0c', '\x85\r', '\u2028', '\u2003\u202f', '\x1c'])
def test_a_line_of_any_white_space_separates_documents(tmp_path, blank):
  assert not blank.strip()
  text = f'{blank}\n日本。\n\u3000indented.\n{blank}\n{blank}\nOne.\xa0\n{blank}\nTwo.\n{blank}'
  (tmp_path / 'a.txt').write_bytes(text.encode())
  documents = ['日本。\n\u3000indented.', 'One.', 'Two.']
  assert _documents(tmp_path / 'a.txt') == documents
  (tmp_path / 'a.jsonl').write_bytes(f'{{"text": "One."}}\n{blank}\n{{"text": "Two."}}\n'.encode())
  assert _documents(tmp_path / 'a.jsonl') == ['One.', 'Two.']
  # corpus_check counts the same documents.
  stats = corpus_check.check(corpus.Settings(str(tmp_path / 'a.txt'), vocab_size=100))
  assert stats.survey.documents == 3


def test_every_kind_of_white_space_is_blank():
  spaces = [c for c in map(chr, range(0x110000)) if c.isspace()]
  assert len(spaces) == 29
  assert all(corpus._is_blank(f'{c}\n'.encode()) for c in spaces)
  assert not any(corpus._is_blank(f'{c}\n'.encode()) for c in '\u200b\ufeff\0.é猫')
  assert not corpus._is_blank(b'\xff\n') and not corpus._is_blank(b'\xe3\x80\n')  # not UTF-8


def test_documents_do_not_depend_on_line_ends(tmp_path):
  (tmp_path / 'a.txt').write_text('\n\nA b\nc\n \t\nd é\n\n\n\ne\n\n')
  assert _documents(tmp_path / 'a.txt') == ['A b\nc', 'd é', 'e']
  (tmp_path / 'b.txt').write_bytes((tmp_path / 'a.txt').read_bytes().replace(b'\n', b'\r\n'))
  assert _documents(tmp_path / 'b.txt') == ['A b\nc', 'd é', 'e']  # Windows' line ends
  (tmp_path / 'w.raw').write_text(' = One = \n\n a = b \n = = Two = = \n c\n = Three = \n d\n')
  assert _documents(tmp_path / 'w.raw', 'wikitext') == ['a = b \n = = Two = = \n c', 'd']


def test_a_sentence_without_an_end_is_cut_at_white_space():
  words = 'word ' * 10_000
  pieces = _sentences(words, lines_are_sentences=True)
  assert max(map(len, pieces)) <= 16_384 and ' '.join(pieces) == words.strip()
  assert {piece[:5] for piece in pieces} == {'word '}
  assert list(map(len, _sentences('x' * 40_000, lines_are_sentences=True))) == [
      16_384, 16_384, 7_232]


def test_half_of_a_surrogate_pair_is_replaced(tmp_path):
  """JSON can write half of a pair, UTF-8 cannot."""
  (tmp_path / 'a.jsonl').write_text('\ufeff' + r'{"text": "one \ud83d two \uDC00\ud83d\ude00"}'
                                    + '\n' + r'{"text": "\ud55c\uae00"}')
  documents = _documents(tmp_path / 'a.jsonl')
  assert documents == ['one \ufffd two \ufffd\U0001f600', '한글']
  assert len(documents[0].encode()) == 19


def test_json_lines(tmp_path):
  lines = [{'text': 'One.\nTwo.', 'id': 1}, {'text': '猫'}]
  (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, lines)) + '\n\n')
  assert _documents(tmp_path / 'a.jsonl') == ['One.\nTwo.', '猫']
  with gzip.open(tmp_path / 'b.jsonl.gz', 'wt') as f:
    f.write('{"body": "Three."}\n')
  assert _documents(tmp_path / 'b.jsonl.gz', column='body') == ['Three.']


def test_the_builtin_text_of_a_mixture_is_not_wikitext():
  text = 'The first sentence is here. The second one follows.'
  assert _sentences(text, format='wikitext', source='builtin') == _sentences(text)
  assert len(_sentences(text)) == 2 and len(_sentences(text, format='wikitext')) == 1


def test_wikitext(tmp_path):
  (tmp_path / 'wiki.train.raw').write_text(
      ' \n = Valkyria Chronicles = \n \n It was @-@ at last 1 @,@ 000 @.@ 5 m . It ended ! Really ?'
      ' Yes \n \n = = Gameplay = = \n \n = = = Deep = = = \n\n Played . \n'
      ' = Tower = \n\n Tall .\n')
  first, second = _documents(tmp_path / 'wiki.train.raw', 'wikitext')
  assert _sentences(first, format='wikitext') == [
      'It was-at last 1,000.5 m .', 'It ended !', 'Really ?', 'Yes', 'Played .']
  assert second == 'Tall .'


def test_json_lines_without_text_are_skipped(tmp_path):
  (tmp_path / 'a.jsonl').write_text('{"text": ""}\n{"text": "One."}\n{"text": " \\n"}\n')
  assert list(corpus.read_file(str(tmp_path / 'a.jsonl'), 'jsonl', 'text')) == ['One.']


@pytest.mark.parametrize('pattern, message', [
    ('https://host/a.txt', 'buckets are named gs://BUCKET/FOLDER'),
    ('gone.txt', 'cannot be read: No such file')])
def test_sources_out_of_reach(tmp_path, monkeypatch, pattern, message):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'gone.txt').symlink_to('nowhere')
  with pytest.raises(UserError, match=message):
    corpus.find_files(pattern)


def test_sentences_in_english_and_chinese():
  assert _sentences('Dr. Smith came in Jan. 1990. He left.') == [
      'Dr. Smith came in Jan. 1990.', 'He left.']
  french = 'M. Dupont est là. Il parle.'  # Canadian French has the rules of French
  assert _sentences(french, language='fr-ca') == _sentences(french, language='fr')
  assert _sentences(french, language='fr-ca') != _sentences(french, language='en')
  assert _sentences('今天天气很好。我们去公园吧！', language='zh') == [
      '今天天气很好。', '我们去公园吧！']


@pytest.mark.parametrize('space', ['\xa0', '\u202f', '\u2009', '\u3000', '\u2028', '\x85'])
def test_a_wide_space_before_a_period_does_not_break_sentence_splitting(space):
  """sentencex panics on such a text. The text keeps its white space and its sentences."""
  for language in ('en', 'zh'):
    for expected in (['It was I_.', 'Next one.'], ['No.', 'It was I _.', 'By j/J_.', 'Next one.']):
      expected = [sentence.replace('_', space) for sentence in expected]
      assert _sentences(' '.join(expected), language=language) == expected
  assert _sentences(f'The end{space}. Next{space}! One.') == [
      f'The end{space}.', f'Next{space}!', 'One.']
  for kazakh in (f'Бұл I.{space}. еді.', f'A{space}.{space}{space}.'):
    assert ''.join(_sentences(kazakh, language='kk')).replace(' ', '') == kazakh.replace(' ', '')


@pytest.mark.parametrize('name, content, message', [
    ('a.txt', b'', 'empty'),
    ('a.txt', b'fine\nbad \xff byte\n', 'line 2: invalid UTF-8'),
    ('a.txt', b'one\n\ntwo\nthree\n\n\nfour\nbad \xff byte\n', 'line 8: invalid UTF-8'),
    ('a.txt', b'text\n\x00\x01\x02', 'line 2: a NUL byte'),
    ('a.jsonl', b'{"text": "fine"}\n{"text": \n', 'line 2: invalid JSON'),
    ('a.jsonl', b'{"text": "fine"}\n\n{"body": "x"}\n', "line 3: it has no 'text': name"),
    ('a.jsonl', b'["text"]\n', "line 1: it has no 'text': name"),
    ('a.jsonl', b'{"text": 3}\n', "line 1: 'text' is not a string"),
])
def test_bad_files_are_refused_by_name_and_line(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(UserError, match=message) as e:
    _documents(tmp_path / name)
  assert name in str(e.value)


def test_damaged_gzip(tmp_path):
  whole = gzip.compress(b'One.\n\n' * 100_000)
  for name, content in (('cut.gz', whole[:len(whole) // 2]), ('not.gz', b'plain text\n')):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f'{name}: damaged gzip'):
      _documents(tmp_path / name)


def test_a_document_without_end_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(corpus, '_LONGEST_DOCUMENT', 3 << 20)
  (tmp_path / 'a.txt').write_text('Short.\n\n' + 'A line of a book.\n' * 300_000)
  with pytest.raises(UserError, match='a.txt: the document that begins at line 3 is longer'):
    _documents(tmp_path / 'a.txt')


@pytest.mark.parametrize('name, message', [
    ('wiki_00', 'wiki_00 has JSON lines, and its name does not end in .jsonl: rename the files, or '
                'give data.format: jsonl, or text to read them as they are'),
    ('a.csv', 'a.csv is a table, not text: convert it to JSON lines, or give data.format'),
    ('A.CSV', 'A.CSV is a table, not text'), ('a.tsv.gz', 'a.tsv.gz is a table, not text')])
def test_a_file_that_is_not_text_is_refused_unless_the_format_is_given(tmp_path, name, message):
  """WikiExtractor --json writes files without an ending."""
  line = b'{"id": "1", "text": "A text."}\n'
  (tmp_path / name).write_bytes(gzip.compress(line) if name.endswith('.gz') else line)
  with pytest.raises(UserError, match=message):
    _documents(tmp_path / name)
  assert _documents(tmp_path / name, 'text') == [line.decode().strip()]
  assert _documents(tmp_path / name, 'jsonl') == ['A text.']
  (tmp_path / 'b.txt').write_text('{A text} in braces.\n')
  assert _documents(tmp_path / 'b.txt') == ['{A text} in braces.']


def test_wrong_sources_are_refused(tmp_path):
  with pytest.raises(UserError, match='matches no file'):
    _documents('/nowhere/*.txt')
  with pytest.raises(UserError, match='is a folder without manifest.json'):
    _documents(tmp_path)
  with pytest.raises(UserError, match="data.format='xml' is unknown"):
    _documents(tmp_path, 'xml')


def test_tfds_errors(poems, monkeypatch):
  monkeypatch.setenv('TFDS_DATA_DIR', str(poems))
  read = lambda column: sorted(corpus.tfds_documents('poems', column))
  assert read('text')[:2] == ['Poem 0 is red.\nIt is short.', 'Poem 1 is red.\nIt is short.']
  with pytest.raises(UserError, match="no column 'body'.*id, text"):
    read('body')
  with pytest.raises(UserError, match='no_such_set'):
    list(corpus.tfds_documents('no_such_set', 'text'))
  info = next(poems.rglob('dataset_info.json'))  # as most data sets are stored
  whole = info.read_text()
  info.write_text(whole.replace('array_record', 'tfrecord'))
  try:
    with pytest.raises(UserError, match='tfds:poems cannot be read: .*file_format=array_record'):
      read('text')
  finally:
    info.write_text(whole)


@pytest.mark.parametrize('retries, kept', [(10, 5), (0, 0)])
def test_a_failed_download_is_given_up_within_seconds(monkeypatch, retries, kept):
  monkeypatch.setattr(downloader, 'MAX_RETRIES', retries)
  tfds_reader._set_up_downloads()
  waits, retry = [], urllib3.Retry(downloader.MAX_RETRIES, backoff_factor=0.2)  # as tfds makes it
  assert retry.total == kept
  while retry.total:
    retry = retry.increment('GET', '/x', error=urllib3.exceptions.ProtocolError())
    waits.append(retry.get_backoff_time())
  assert sum(waits) < 7


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
  paragraphs = [p for d in docstrings for p in builtin.paragraphs(d)]
  assert paragraphs == ['First paragraph that says quite enough to be kept here.',
                        'Return the numpy.mean of all the values that were given.']
  assert not builtin.is_prose('x = [1, 2, 3]; y = f(x) + g(x) * 2')
  source.write_text('def broken(')
  assert builtin.module_docstrings(source) == []


def test_the_first_words():
  documents = ['one two\nthree', ' four  five ', 'six']
  for words, expected in ((2, ['one two']), (3, ['one two\nthree']),
                          (4, ['one two\nthree', ' four']),
                          (5, ['one two\nthree', ' four  five']),
                          (6, ['one two\nthree', ' four  five ', 'six'])):
    assert list(corpus.first_words(documents, words)) == expected
  with pytest.raises(UserError, match='data.words=7: the corpus has only 6 words'):
    list(corpus.first_words(documents, 7))
