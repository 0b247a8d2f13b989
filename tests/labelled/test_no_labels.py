"""A value that is not a label is an error, and never a class, unless the user names it."""

import json
import re
import shlex

import pytest

from bert_jax import config as config_lib
from bert_jax.commands import config_flag
from bert_jax.errors import UserError
from bert_jax.labelled import choices, glue, no_labels, squad, table, texts
from bert_jax.tasks.reranking import RerankingFiles
from bert_jax.tasks.sequence_classification import SequenceFiles


def config(task='sequence_classification', **fields):
  c = config_lib.finetuning(task)
  with c.unlocked():
    c.data.update(fields)
  return c


def train(path, **fields):
  """(the examples, the notes) of a training file of sequence classification."""
  c, notes = config(train=str(path), **fields), []
  examples = SequenceFiles.read(str(path), c.data, 'train', notes)
  SequenceFiles.check_training(c, examples)
  notes += texts.check_labels(examples, texts.columns(c.data))
  return examples, notes


def override(message: str) -> dict[str, tuple]:
  """The field that a message offers, as a shell and the command line read it."""
  given = re.search(r'--config\.data\.(\w+)=(.*?)(?:, or |$)', message)
  value, = shlex.split(given[2])
  return {given[1]: config_flag.TupleParser().parse(value)}


NO_LABELS = ('NaN', 'nan', 'None', 'null', 'NULL', 'NA', 'N/A', '#N/A', '<NA>', '-', '?', '_', '--',
             '2010-02-02', '[2010-02-02]', '02.02.2010', '2/2/10', '2010-02-02T10:00:00Z',
             'http://a.example/x', '-1', 'inf')


@pytest.mark.parametrize('value', NO_LABELS)
@pytest.mark.parametrize('name', ['a.csv', 'a.tsv', 'a.jsonl'])
def test_a_value_that_is_not_a_label_is_refused(tmp_path, name, value):
  """The error names the line; its remedies leave the row out, or make the value a class."""
  rows = [('one', '0'), ('two', value), ('three', '1'), ('four', '0')]
  lines = {'csv': ['text,label', *map(','.join, rows)],
           'tsv': ['text\tlabel', *map('\t'.join, rows)],
           'jsonl': [json.dumps({'text': a, 'label': b}) for a, b in rows]}[name[2:]]
  (tmp_path / name).write_text('\n'.join(lines) + '\n')
  line = 2 if name == 'a.jsonl' else 3
  with pytest.raises(UserError, match=f'line {line}: the label') as e:
    train(tmp_path / name)
  examples, notes = train(tmp_path / name, **override(str(e.value)))
  assert [x.text for x in examples] == ['one', 'three', 'four']
  assert notes[0].startswith('1 of 4 rows')
  examples, _ = train(tmp_path / name, labels=('0', '1', value))
  assert [x.label for x in examples] == ['0', value, '1', '0']


@pytest.mark.parametrize('value, written', [(float('nan'), 'nan'), (None, 'null'),
                                            (float('inf'), 'inf')])
def test_missing_values_of_json_are_refused(tmp_path, value, written):
  rows = [{'text': t, 'label': x} for t, x in (('a', 'yes'), ('b', value), ('c', 'no'))]
  (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  with pytest.raises(UserError, match=f"line 2: the label '{written}' stands for") as e:
    train(tmp_path / 'a.jsonl')
  assert [x.text for x in train(tmp_path / 'a.jsonl', **override(str(e.value)))[0]] == ['a', 'c']
  for x in rows:
    x['label'] = [x['label']]
  (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  with pytest.raises(UserError, match=f"line 2: the label '{written}' stands for") as e:
    train(tmp_path / 'a.jsonl', problem='multi_label')
  rest, _ = train(tmp_path / 'a.jsonl', problem='multi_label', **override(str(e.value)))
  assert [x.label for x in rest] == [('yes',), ('no',)]


def test_an_empty_label_is_refused(tmp_path):
  (tmp_path / 'a.csv').write_text('text,label\na,yes\nb,\nc, \nd,no\n')
  with pytest.raises(UserError, match="line 3: 'label' is empty") as e:
    train(tmp_path / 'a.csv')
  examples, _ = train(tmp_path / 'a.csv', **override(str(e.value)))
  assert [x.text for x in examples] == ['a', 'd']


@pytest.mark.parametrize('labels, message', [
    (('0', '1', '1.0'), "line 4: the labels '1' and '1.0' are the same number"),
    (('1', '01', '2'), "line 3: the labels '1' and '01' are the same number"),
    (('yes', 'no', '0.4'), "line 4: the label '0.4' is a number, others are names"),
    (('0.0', '1.0', '-1.0'), "line 4: the label '-1.0' next to 0 often stands for")])
def test_doubtful_numbers_as_labels_are_refused(tmp_path, labels, message):
  (tmp_path / 'a.tsv').write_text('text\tlabel\n' + ''.join(f'x\t{x}\n' for x in labels))
  with pytest.raises(UserError, match=message):
    train(tmp_path / 'a.tsv')
  assert len(train(tmp_path / 'a.tsv', labels=labels)[0]) == 3


@pytest.mark.parametrize('labels', [
    ('-1', '1'), ('-2', '-1', '0', '1'), ('1.5', '2.0'), ('🙂', '🙁'), ('a.b', 'c/d'), ('Na', 'Ne'),
    ('1', '2', '3'), ('yes', 'no', '3'), ('+', '++'), ('v1.2.3', 'v2'), ('03', '12')])
def test_ordinary_labels_are_accepted(tmp_path, labels):
  (tmp_path / 'a.tsv').write_text('text\tlabel\n' + ''.join(f'x\t{x}\n' for x in labels * 2))
  examples, notes = train(tmp_path / 'a.tsv')
  assert {x.label for x in examples} == set(labels) and not notes


@pytest.mark.parametrize('value', ['-1', '0.4', '', 'nan', 'yes', '2', '1_0', 'None'])
@pytest.mark.parametrize('kind', ['csv', 'jsonl'])
def test_label_columns_accept_only_0_and_1(tmp_path, kind, value):
  """Jigsaw's test labels have -1, civil comments fractions."""
  rows = [('a', '1', '0'), ('b', value, value), ('c', '0.0', 'True')]
  path = tmp_path / f'a.{kind}'
  path.write_text('text,rude,spam\n' + '\n'.join(map(','.join, rows)) if kind == 'csv' else
                  '\n'.join(json.dumps(dict(zip(('text', 'rude', 'spam'), row))) for row in rows))
  fields = {'problem': 'multi_label', 'label_column': 'rude,spam'}
  with pytest.raises(UserError, match=f"line {3 if kind == 'csv' else 2}: 'rude' is "
                                      f"{value!r}, not 0 or 1") as e:
    train(path, **fields)
  examples, notes = train(path, **fields, **override(str(e.value)))
  assert [(x.text, x.label) for x in examples] == [('a', ('rude',)), ('c', ('spam',))]
  assert notes[0].startswith('1 of 3 rows')


def test_label_columns_of_json_are_read_or_refused(tmp_path):
  """Numbers and booleans; null; columns within objects; a repeated name."""
  rows = [{'text': 'a', 'of': {'x': True, 'y': 0}}, {'text': 'b', 'of': {'x': 0.0, 'y': 1}}]
  path = tmp_path / 'a.jsonl'
  path.write_text('\n'.join(map(json.dumps, rows)))
  fields = {'problem': 'multi_label', 'label_column': 'of.x,of.y'}
  assert [x.label for x in train(path, **fields)[0]] == [('of.x',), ('of.y',)]
  path.write_text(json.dumps({'text': 'a', 'x': 0, 'y': 0.5}))
  with pytest.raises(UserError, match="'y' is 0.5, not 0 or 1"):
    train(path, problem='multi_label', label_column='x,y')
  path.write_text(json.dumps({'text': 'a', 'x': 0, 'y': None}))
  with pytest.raises(UserError, match="'y' is None, not 0 or 1"):
    train(path, problem='multi_label', label_column='x,y')
  with pytest.raises(UserError, match="label_column=x,x: 'x' is empty or repeated"):
    train(path, problem='multi_label', label_column='x,x')


@pytest.mark.parametrize('value', ['nan', 'inf', '-Infinity', '', 'None', '1_000', '3,5',
                                   '2010-02-02', float('nan'), True, None, [1]])
def test_a_regression_refuses_values_that_are_not_numbers(tmp_path, value):
  (tmp_path / 'a.jsonl').write_text(json.dumps({'text': 'x', 'label': value}))
  with pytest.raises(UserError, match='line 1: .*(not a (finite )?number|'
                                      "no column 'label' in this line)"):
    train(tmp_path / 'a.jsonl', problem='regression')


def test_scores_outside_the_range_of_sts_b_are_refused(tmp_path):
  head = 'sentence1\tsentence2\tscore\n'
  (tmp_path / 'a.tsv').write_text(head + 'a\tb\t5.0\na\tb\t-1\n')
  with pytest.raises(UserError, match=r"line 3: 'score' is -1, which is not in \[0, 5\]"):
    train(tmp_path / 'a.tsv', format='glue/stsb')
  assert glue.TASKS['glue/stsb'].submission == 'STS-B.tsv'


@pytest.mark.parametrize('line, message', [
    ('text,label,source', 'line 3 repeats the names of the columns in line 1'),
    ('\ufefftext,label,source', 'line 3 repeats the names of the columns'),
    ('label,text,source', 'line 3 repeats the names of the columns'),
    ('good text,web', "line 3: 2 fields for 3 columns: no column 'source' in this line"),
    ('# a comment', "line 3: 1 fields for 3 columns: no column 'label' in this line"),
    ('good, bad,yes,web', 'line 3: 4 fields for 3 columns')])
def test_table_lines_that_are_not_rows_are_refused(tmp_path, line, message):
  """For every task that reads tables: a shifted column would be read as another."""
  for name, separator in (('a.csv', ','), ('a.tsv', '\t')):
    content = f'text,label,source\nx,no,web\n{line}\ny,yes,web\n'.replace(',', separator)
    (tmp_path / name).write_text(content)
    for read in (lambda path: train(path), lambda path: list(table.read(str(path), 'auto', 'x'))):
      with pytest.raises(UserError, match=message):
        read(tmp_path / name)


@pytest.mark.parametrize('line', ['Text,Label,Source', 'TEXT, LABEL ,SOURCE', 'label,Text,source',
                                  '"text_",lab-el,source'])
def test_a_repeated_header_in_another_spelling_is_refused(tmp_path, line):
  """Such a row is refused for every task that reads tables."""
  (tmp_path / 'a.csv').write_text(f'text,label,source\nx,no,web\n{line}\ny,yes,web\n')
  for read in (train, lambda path: list(table.read(str(path), 'auto', 'x'))):
    with pytest.raises(UserError, match='line 3 repeats the names of the columns in line 1'):
      read(tmp_path / 'a.csv')


@pytest.mark.parametrize('head, rows, message', [
    ('text,label', ['a,no', 'Sentence,Label', 'b,yes'], "line 3: the label 'Label' is the name"),
    ('text,label', ['a,no', 'Text,gold_label', 'b,yes', 'c,no', 'Text,gold_label'],
     "line 3: the label 'gold_label' is the name of a column"),
    ('words,label', ['a,no', 'Tweet,LABEL', 'b,yes'], "line 3: the label 'LABEL' is the name"),
    ('text,tone', ['a,no', 'Tweet,Tone', 'b,yes'], "line 3: the label 'Tone' is the name"),
    ('text,label', ['a,no', 'b,yes', 'no,c', 'd,no'],
     "line 4: the label 'c' is next to the text 'no', which is a label in other rows")])
def test_rows_that_are_headers_or_swapped_are_refused(tmp_path, head, rows, message):
  """The remedies leave the row out, or make the value a class; in JSON lines too."""
  path, columns = tmp_path / 'a.csv', head.split(',')
  path.write_text('\n'.join([head, *rows]))
  fields = dict(zip(('text_column', 'label_column'), columns))
  with pytest.raises(UserError, match=message) as e:
    train(path, **fields)
  remedy = override(str(e.value))
  examples, _ = train(path, **fields, **remedy)
  assert [x.text for x in examples] == [text for text, label in (row.split(',') for row in rows)
                                        if label not in remedy['skip_labels']]
  labels = tuple(dict.fromkeys(row.split(',')[1] for row in rows))
  assert len(train(path, **fields, labels=labels)[0]) == len(rows)
  path = tmp_path / 'a.jsonl'
  path.write_text('\n'.join(json.dumps(dict(zip(columns, row.split(',')))) for row in rows))
  line = int(message[5]) - 1  # JSON lines have no header
  with pytest.raises(UserError, match=f'line {line}{message[6:]}'):
    train(path, **fields)


@pytest.mark.parametrize('head, rows', [
    ('text,spam', ['a,spam', 'b,ham']),  # a class has the name of the column
    ('text,toxic', ['a,toxic', 'b,no', 'c,toxic', 'text,mild']),
    ('text,label', ['no,no', 'yes,no', 'b,yes', 'c,yes']),  # a text has the name of a class
    ('text,label', ['label,x', 'text,y', 'Label: a,x', 'y,x'])])
def test_texts_and_labels_that_look_like_headers_are_accepted(tmp_path, head, rows):
  (tmp_path / 'a.csv').write_text('\n'.join([head, *rows]))
  assert len(train(tmp_path / 'a.csv', label_column=head.split(',')[1])[0]) == len(rows)


def test_a_repeated_column_is_refused_only_if_it_is_read(tmp_path):
  (tmp_path / 'a.tsv').write_text('text\tlabel\tlabel\tid\tid\nx\tyes\tno\t1\t1\n')
  with pytest.raises(UserError, match="line 2: there are several columns 'label'"):
    train(tmp_path / 'a.tsv')
  (tmp_path / 'a.tsv').write_text('text\tlabel\tid\tid\nx\tyes\t1\t1\ny\tno\t1\t1\n')
  assert [x.label for x in train(tmp_path / 'a.tsv')[0]] == ['yes', 'no']


def test_a_file_without_any_label_is_refused(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text('{"text": "x", "label": []}\n' * 3)
  with pytest.raises(UserError, match='a.jsonl, line 1 and all other rows have no label'):
    train(path, problem='multi_label')
  path.write_text(path.read_text() + '{"text": "x", "label": ["rude"]}\n')
  assert [x.label for x in train(path, problem='multi_label')[0]] == [(), (), (), ('rude',)]


def test_a_different_label_in_every_row_is_refused(tmp_path):
  (tmp_path / 'a.tsv').write_text('text\tid\n' + ''.join(f'x\tq{i}\n' for i in range(40)))
  with pytest.raises(UserError, match='each of the 40 rows has a different label, such as .q0.'):
    train(tmp_path / 'a.tsv', label_column='id')
  assert train(tmp_path / 'a.tsv', label_column='id', labels=tuple(f'q{i}' for i in range(40)))


def test_doubtful_labels_are_noted(tmp_path):
  rows = [*['a\tpos'] * 20, *['a\tneg'] * 20, 'a\tPos', 'a\t y ', 'a\tpos']
  (tmp_path / 'a.tsv').write_text('text\tlabel\n' + '\n'.join(rows))
  examples, notes = train(tmp_path / 'a.tsv')
  assert sum(x.label == 'pos' for x in examples) == 21
  assert notes == [f"the labels 'pos' and 'Pos' ({tmp_path}/a.tsv, line 42) differ only in "
                   'case, and are two classes']
  assert no_labels.doubtful({'a': 'line 1', 'b': 'line 9', 'c': 'line 7'},
                            {'a': 30, 'b': 1, 'c': 30}) == [
      "1 of 3 labels have one row each: 'b' (line 9)"]


# ---- other tasks --------------------------------------------------------------------------------


@pytest.mark.parametrize('grade, loss, message', [
    (-1, 'binary', "line 2: 'label' is -1: a grade is 0"),
    (-1, 'graded', "line 2: 'label' is -1: a grade is 0"),
    (0.4, 'binary', 'line 1: a grade lies between 0 and 1, and data.loss=binary'),
    (float('nan'), 'listwise', "line 2: 'label' is nan, not a finite number"),
    ('None', 'graded', "line 2: 'label' is 'None', not a number"),
    (0.4, 'graded', ''), (0.4, 'listwise', ''), (False, 'binary', '')])
def test_grades(tmp_path, grade, loss, message):
  rows = [{'query': 'q', 'document': 'a', 'label': True},
          {'query': 'q', 'document': 'b', 'label': grade}]
  path = tmp_path / 'a.jsonl'
  path.write_text('\n'.join(map(json.dumps, rows)))
  c = config('reranking', train=str(path), loss=loss)

  def read():
    groups = RerankingFiles.read(str(path), c.data, 'train', [])
    RerankingFiles.check_training(c, groups)
    return groups

  if message:
    with pytest.raises(UserError, match=message):
      read()
  else:
    assert read()[0].grades == [1.0, float(grade)]


def test_choices_are_named_by_their_own_labels(tmp_path):
  """ARC numbers its choices from 1 in some lines: the answer 1 is the first choice."""
  def read(key, labels):
    (tmp_path / 'a.jsonl').write_text(json.dumps({'answerKey': key, 'question': {
        'stem': 'A', 'choices': [{'label': x, 'text': f'x{x}'} for x in labels]}}))
    data = config('multiple_choice', format='commonsenseqa').data
    return [e.label for e in choices.read(str(tmp_path / 'a.jsonl'), data)]

  assert read('1', '1234') == [0] and read('4', '1234') == [3] and read('C', 'ABC') == [2]
  for key in ('0', 'A', ''):
    with pytest.raises(UserError, match='none of the 4 choices: give one of 1, 2, 3, 4'):
      read(key, '1234')


@pytest.mark.parametrize('changed, message', [
    ({'is_impossible': 'false'}, "is_impossible is 'false', not true or false"),
    ({'answers': [{'text': '', 'answer_start': 0}]}, "the question '1' has an empty answer"),
    ({'answers': [{'text': ' ', 'answer_start': 3}]}, "the question '1' has an empty answer"),
    ({'answers': [{'text': None, 'answer_start': 0}]}, 'an answer is not a string')])
def test_invalid_answers_are_refused(tmp_path, changed, message):
  qa = {'id': '1', 'question': '?', 'answers': [{'text': 'b', 'answer_start': 2}], **changed}
  path = tmp_path / 'a.json'
  path.write_text(json.dumps({'data': [{'paragraphs': [{'context': 'a b', 'qas': [qa]}]}]}))
  with pytest.raises(UserError, match=message):
    squad.read(str(path))


def test_an_answer_with_a_negative_start_is_out_of_place(tmp_path):
  """Python counts a start of -1 from the end."""
  assert not squad.Question('1', '?', 'a b', ('b',), (-1,)).in_place
  assert squad.Question('1', '?', 'a b', ('b',), (2,)).in_place
