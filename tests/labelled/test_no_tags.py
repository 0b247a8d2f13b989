"""Comments, headers, swapped columns and tags of another scheme never become classes."""


import json

import pytest

from bert_jax.errors import UserError
from bert_jax.tasks.token_classification import TokenFiles
from tests.labelled.test_no_labels import config


def tagged(path, split='train', **fields):
  """([(words, tags)], notes) of a file of token classification."""
  notes = []
  sentences = TokenFiles.read(
      str(path), config('token_classification', **fields).data, split, notes)
  return [(s.words, s.tags) for s in sentences], notes


NOSTA = {'text_column': '1', 'label_column': '2'}
# The beginning of a file as its makers publish it, the columns, the sentences, the comments.
COMMENTS = {
    'GermEval 2014': (
        '#\thttp://a.example/x\t[2010-02-02]\n1\tIn\tO\tO\n2\tBonn\tB-LOC\tO\n\n'
        '#\thttp://a.example/y\t[2010-02-03]\n1\t#\tO\tO\n2\tBonn\tB-LOC\tO\n', NOSTA,
        [('In', 'Bonn'), ('#', 'Bonn')], 2),
    'as many fields as the words': (
        '#\thttp://a.example/x\t[2010-02-02]\n1\tBonn\tB-LOC\n2\tis\tO\n', NOSTA,
        [('Bonn', 'is')], 1),
    'without numbers': (
        '#\thttp://a.example/x\t[2010-02-02]\nBonn\tNE\tB-LOC\n#\t$(\tO\n', {},
        [('Bonn', '#')], 1),
    'MultiCoNER': (
        '# id 52f7\tdomain=en\nin _ _ O\nbonn _ _ B-LOC\n\n# id 52f8\tdomain=en\n# _ _ O\n', {},
        [('in', 'bonn'), ('#',)], 2),
    'CoNLL-2012': (
        '#begin document (x/00); part 000\nx 0 In IN O\nx 1 Bonn NNP B-LOC\n\n#end document\n',
        {'text_column': '2'}, [('In', 'Bonn')], 0),
    'CoNLL-U': ('# text = In Bonn\n1\tIn\tO\n2\tBonn\tB-LOC\n', NOSTA, [('In', 'Bonn')], 0),
    'hashtags': ('#bonn #\nis O\n\n#yolo #\n', {}, [('#bonn', 'is'), ('#yolo',)], 0),
    'a lone sign': ('# SYM\n\nis O\n1 SYM\n', {}, [('#',), ('is', '1')], 0),
}


@pytest.mark.parametrize('name', COMMENTS)
def test_comments_of_conll_files(tmp_path, name):
  """A line that begins with # is a comment, or a word with a tag that other words have."""
  content, fields, words, comments = COMMENTS[name]
  path = tmp_path / 'a.conll'
  path.write_text(content)
  sentences, notes = tagged(path, **fields)
  assert [s[0] for s in sentences] == words
  assert {tag for s in sentences for tag in s[1]} <= {'O', 'B-LOC', 'SYM', '#'}
  assert len(notes) == bool(comments) and all(x.startswith(f'{comments} lines of') for x in notes)
  if fields or name == 'as many fields as the words':  # without tags, only the form marks a comment
    assert [s[0] for s in tagged(path, 'test', **fields)[0]] == words


def test_a_sign_that_is_its_own_tag_is_a_word(tmp_path):
  """The Penn Treebank tags the sign # as #."""
  (tmp_path / 'a.conll').write_text('#\t#\n10\tCD\n\nis\tVBZ\n#\t#\n')
  assert [s[0] for s in tagged(tmp_path / 'a.conll')[0]] == [('#', '10'), ('is', '#')]


def test_comments_of_a_file_with_only_o_tags_are_left_out(tmp_path):
  content = '# id 0-abc domain=en\nin _ _ O\nbonn _ _ O\n\n# _ _ O\nyolo _ _ O\n'
  (tmp_path / 'a.conll').write_text(content)
  for split in ('train', 'test'):
    assert [s[0] for s in tagged(tmp_path / 'a.conll', split)[0]] == [('in', 'bonn'), ('#', 'yolo')]


def test_a_sign_is_a_word_if_data_labels_names_its_tag(tmp_path):
  (tmp_path / 'a.conll').write_text('# B-SIGN\nis O\n')
  assert tagged(tmp_path / 'a.conll')[0] == [(('is',), ('O',))]
  assert tagged(tmp_path / 'a.conll', labels=('O', 'B-SIGN'))[0] == [(('#', 'is'), ('B-SIGN', 'O'))]


@pytest.mark.parametrize('content, message', [
    ('is O\nNew York B-LOC\n', 'line 2: 3 fields, line 1 of the same sentence has 2'),
    ('is O\n\na x O\nb O\n', 'line 4: 2 fields, line 3'),
    ('word\ttag\nis\tO\n', 'line 1: .* are names of columns'),
    ('is O\n\nToken POS ner_tags\na x O\n', 'line 3: .* are names of columns'),
    ('is O\nBonn 2010-02-02\n', "line 2: the tag '2010-02-02' is a date"),
    ('is O\nBonn _\n', "line 2: the tag '_' stands for a missing label"),
    ('is O\nBonn None\n', "line 2: the tag 'None' stands for"),
    ('is O\nBonn nan\n', "line 2: the tag 'nan' stands for"),
    ('is O\nBonn -100\n', "line 2: the tag '-100' stands for"),
    ('is O\nBonn http://a.example\n', 'is an address')])
def test_values_that_are_not_tags_are_refused(tmp_path, content, message):
  (tmp_path / 'a.conll').write_text(content)
  with pytest.raises(UserError, match=message) as e:
    tagged(tmp_path / 'a.conll')
  if 'line 2: the tag' in str(e.value):
    tag = content.split()[-1]
    assert tagged(tmp_path / 'a.conll', labels=('O', tag))[0] == [(('is', 'Bonn'), ('O', tag))]
    (tmp_path / 'a.jsonl').write_text(json.dumps({'0': ['is', 'Bonn'], '-1': ['O', tag]}))
    with pytest.raises(UserError, match=message.removeprefix('line 2: ')):
      tagged(tmp_path / 'a.jsonl')


BIO = 'in O\nBonn B-LOC\n\nAnn B-PER\nLee I-PER\n'
PLAIN = 'in O\nBonn LOC\n\nAnn PER\nLee PER\n'
NO_SCHEME = "is not O or a letter, '-' and a label, as most tags of this file"


@pytest.mark.parametrize('content, line, message', [
    ('Token NER-Tag\n' + BIO, 1, 'are names of columns'),
    ('TOKEN  TAG\n' + BIO, 1, 'are names of columns'),
    ('Token Entity\n' + PLAIN, 1, 'are names of columns'),
    (f'{PLAIN}\nWord Ner_Label\n{PLAIN}\nWord Ner_Label\n', 7, 'are names of columns'),
    ('Wort Etikett\n' + BIO, 1, f"the tag 'Etikett' {NO_SCHEME}"),
    (BIO + 'B-PER John\n', 6, f"the tag 'John' {NO_SCHEME}"),
    (BIO + 'O John\n', 6, f"the tag 'John' {NO_SCHEME}"),
    (BIO + 'he o\n', 6, f"the tag 'o' {NO_SCHEME}"),
    (BIO + 'he B\n', 6, f"the tag 'B' {NO_SCHEME}"),
    (PLAIN + 'PER John\n', 6, "the tag 'John' is next to the text 'PER', which is a label in")])
def test_headers_and_swapped_columns_are_refused(tmp_path, content, line, message):
  """A value that is not a tag never becomes a class, unless data.labels names it."""
  path = tmp_path / 'a.conll'
  path.write_text(content)
  with pytest.raises(UserError, match=f'line {line}: .*{message}.*: (leave|fix) the line') as e:
    tagged(path)
  assert str(e.value).endswith(', or name every tag in data.labels')
  lines = [x.split() for x in content.splitlines() if x]
  labels = tuple(dict.fromkeys(x[1] for x in lines))
  assert sum(len(words) for words, _ in tagged(path, labels=labels)[0]) == len(lines)
  if 'are names' not in message:
    (tmp_path / 'a.jsonl').write_text(''.join(
        json.dumps({'0': [x], '-1': [y]}) + '\n' for x, y in lines))
    with pytest.raises(UserError, match=message):
      tagged(tmp_path / 'a.jsonl')


def test_a_header_is_recognized_by_the_columns_that_are_read(tmp_path):
  (tmp_path / 'a.conll').write_text('Id Word Tag Source\n1 Bonn B-LOC web\n2 is O web\n')
  with pytest.raises(UserError, match='line 1: .* are names of columns'):
    tagged(tmp_path / 'a.conll', text_column='1', label_column='2')


@pytest.mark.parametrize('content', [
    'a B\nb M\nc E\nd S\n',  # word segmentation
    'Text ENTITY\nis O\nParis ENTITY\n',  # a word that could be the name of a column
    'my D\nword N\n@a @\n, ,\n: ,\nO !\n',  # parts of speech of tweets, of which O is one
    'NOUN PROPN\na DET\nman NOUN\nX PROPN\n', "'s POS\nform NN\ntext NN\n",
    'in O\nBonn S-LOC\nto O-DIR\n', 'x NN-1\ny VB\n', 'in 1-A\nb B-A\nc X\nd X\n'])
def test_ordinary_tags_are_accepted(tmp_path, content):
  (tmp_path / 'a.conll').write_text(content)
  assert len(tagged(tmp_path / 'a.conll')[0][0][0]) == content.count('\n')


def test_a_word_may_contain_white_space(tmp_path):
  """French writes 10 000 with a no-break space: it is one word, and shifts no column."""
  (tmp_path / 'a.conll').write_text('10\u00a0000 NUM O\n\u3000\neuros NOUN B-UNIT\n')
  assert tagged(tmp_path / 'a.conll')[0] == [(('10\u00a0000',), ('O',)), (('euros',), ('B-UNIT',))]
