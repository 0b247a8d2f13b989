"""Tables, GLUE, CoNLL, SQuAD and choices: the examples, and the messages about mistakes."""

import gzip
import json

import pytest

from bert_jax import config as config_lib
from bert_jax.errors import UserError
from bert_jax.labelled import choices, conll, glue, squad, table, texts
from bert_jax.tasks import metrics
from bert_jax.tasks.question_answering import QuestionFiles
from bert_jax.tasks.sequence_classification import SequenceFiles


def data(task, **fields):
  c = config_lib.finetuning(task)
  with c.unlocked():
    c.data.update(fields)
  return c.data


def read_texts(path, labelled=True, **fields):
  d = data('sequence_classification', **fields)
  return list(texts.read(str(path), d.format, texts.columns(d), 'train', labelled))


def test_csv_has_quotes_and_tsv_has_none(tmp_path):
  (tmp_path / 'a.csv').write_text('label,text\n1,"one, ""two""\nlines"\n')
  (tmp_path / 'a.tsv').write_text('text\tlabel\n"one\t1\n')
  example, = read_texts(tmp_path / 'a.csv')
  assert (example.text, example.label) == ('one, "two"\nlines', '1')
  example, = read_texts(tmp_path / 'a.tsv')
  assert (example.text, example.label) == ('"one', '1')
  (tmp_path / 'b.csv').write_text('label,text\n1,x,,\n')  # as spreadsheets pad a line
  example, = read_texts(tmp_path / 'b.csv')
  assert (example.text, example.label) == ('x', '1')


def test_jsonl_gzipped_with_nested_columns(tmp_path):
  line = json.dumps({'review': {'body': 'good', 'of': 'film'}, 'stars': 5})
  (tmp_path / 'a.jsonl.gz').write_bytes(gzip.compress(('\ufeff' + line + '\n\n').encode()))
  example, = read_texts(tmp_path / 'a.jsonl.gz', text_column='review.body',
                        text_pair_column='review.of', label_column='stars')
  assert example[1:] == ('good', 'film', '5')


def test_half_of_a_surrogate_pair_is_replaced(tmp_path):
  (tmp_path / 'a.jsonl').write_text(r'{"text": "a \ud800 b", "label": "\udfff"}')
  example, = read_texts(tmp_path / 'a.jsonl')
  assert (example.text, example.label) == ('a \ufffd b', '\ufffd')
  (tmp_path / 'a.json').write_text(json.dumps({'data': [{'paragraphs': [{'context': 'a \ud800 b',
      'qas': [{'id': '1', 'question': '?', 'answers': [{'text': 'b', 'answer_start': 4}]}]}]}]}))
  question, = squad.read(str(tmp_path / 'a.json'))
  assert question.context == 'a \ufffd b' and question.in_place


@pytest.mark.parametrize('name, content, fields, message', [
    ('a.tsv', 'sentence\tlabel\nx\t1\n', {},
     "line 2: no column 'text': the columns are 'sentence'"),
    ('a.tsv', 'text\tlabel\nx\n', {}, "line 2: 1 fields for 2 columns: no column 'label'"),
    ('a.tsv', 'text\tlabel\nx\ty\t1\n', {}, 'line 2: 3 fields for 2 columns'),
    ('a.csv', 'text,label\nx, y,1\n', {}, 'line 2: 3 fields for 2 columns'),
    ('a.csv', 'text,label\nx,1\n"y,1\nz,1\n', {}, 'line 3: unexpected end of data: is a quote'),
    ('a.jsonl', '{"text": "x", "label": ["a"]}', {}, r"'label' is \['a'\], not one label"),
    ('a.tsv', 'text\tlabel\nx\t\n', {}, "line 2: 'label' is empty"),
    ('a.jsonl', '{"text": "x", "label": 1}\n[1]\n', {}, 'line 2: not a JSON object'),
    ('a.jsonl', '{"text": 3, "label": 1}\n', {}, "'text' is 3, not text"),
    ('a.jsonl', '{"text": \n', {}, 'line 1: not JSON'),
    ('a.txt', 'x\n', {}, 'set data.format'),
    ('a.tsv', 'text\tlabel\nx\t1\n', {'format': 'xml'},
     'use auto, csv, tsv, jsonl, glue/TASK'),
    ('a.tsv', 'text\tlabel\nx\t1\n', {'format': 'glue/xx'}, 'the GLUE tasks are glue/cola'),
    ('a.tsv', 'text\tlabel\nx\t1\n', {'problem': 'any'}, 'use single_label'),
    ('a.tsv', 'text\tlabel\nx\thigh\n', {'problem': 'regression'}, "'high', not a number"),
    ('a.tsv', 'text\tlabel\nx\tnan\n', {'problem': 'regression'}, "'label' is nan"),
    ('a.jsonl', '{"text": "x", "label": 1' + 400 * '0' + '}', {'problem': 'regression'},
     'not a number'),
    ('a.jsonl', '{"text": "x", "label": null}', {'problem': 'regression'},
     "no column 'label' in this line"),
    ('a.tsv', 'text\tlabel\nx\thigh\n', {'problem': 'multi_label'}, 'not a list of labels'),
])
def test_tables_that_cannot_be_used(tmp_path, name, content, fields, message):
  (tmp_path / name).write_text(content)
  with pytest.raises(UserError, match=message):
    read_texts(tmp_path / name, **fields)


def test_missing_files_and_invalid_utf8_are_refused(tmp_path):
  with pytest.raises(UserError, match='cannot be read: No such file'):
    read_texts(tmp_path / 'a.tsv')
  (tmp_path / 'a.tsv').write_bytes(b'text\tlabel\n\xff\t1\n')
  with pytest.raises(UserError, match='invalid UTF-8 at byte 11'):
    read_texts(tmp_path / 'a.tsv')


def test_several_labels(tmp_path):
  (tmp_path / 'a.csv').write_text('text,rude,spam\nx,1,0\ny,0,0\nz,1,1\n')
  fields = {'problem': 'multi_label', 'label_column': 'rude,spam'}
  examples = read_texts(tmp_path / 'a.csv', **fields)
  assert [e.label for e in examples] == [('rude',), (), ('rude', 'spam')]
  columns = texts.columns(data('sequence_classification', **fields))
  assert texts.label_names(examples, columns) == ('rude', 'spam')
  (tmp_path / 'a.jsonl').write_text(
      '{"text": "x", "label": ["b", "a"]}\n{"text": "y", "label": []}')
  examples = read_texts(tmp_path / 'a.jsonl', problem='multi_label')
  columns = texts.columns(data('sequence_classification', problem='multi_label'))
  assert texts.label_names(examples, columns) == ('a', 'b')


def test_labels_are_in_numerical_order():
  columns = texts.columns(data('sequence_classification'))
  examples = [texts.TextExample('', 'x', None, label) for label in ('10', '9', '1', '01')]
  assert texts.label_names(examples, columns) == ('01', '1', '9', '10')


# One line of each file of the benchmark: train or development, and test.
GLUE = {
    'glue/cola': ('gj04\t0\t*\tIt bit.\n', 'index\tsentence\n0\tIt bit.\n', 'unacceptable'),
    'glue/sst2': ('sentence\tlabel\nfine \t1\n', 'index\tsentence\n0\tfine\n', 'positive'),
    'glue/mrpc': ('Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\t"A" b\tC\n',
                  'index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t7\t8\tA\tB\n', 'equivalent'),
    'glue/stsb': ('index\tgenre\tsentence1\tsentence2\tscore\n0\tx\tA\tB\t3.8\n',
                  'index\tgenre\tsentence1\tsentence2\n0\tx\tA\tB\n', 3.8),
    'glue/qqp': ('id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\tA?\tB?\t0\n9\t9\n',
                 'id\tquestion1\tquestion2\n0\tA?\tB?\n', 'not_duplicate'),
    'glue/mnli': ('index\tsentence1\tsentence2\tlabel1\tgold_label\n0\tA\tB\tneutral\tneutral\n',
                  'index\tsentence1\tsentence2\n0\tA\tB\n', 'neutral'),
    'glue/qnli': ('index\tquestion\tsentence\tlabel\n0\tA?\tB\tnot_entailment\n',
                  'index\tquestion\tsentence\n0\tA?\tB\n', 'not_entailment'),
    'glue/rte': ('index\tsentence1\tsentence2\tlabel\n0\tA\tB\tentailment\n',
                 'index\tsentence1\tsentence2\n0\tA\tB\n', 'entailment'),
    'glue/wnli': ('index\tsentence1\tsentence2\tlabel\n0\tA\tB\t1\n',
                  'index\tsentence1\tsentence2\n0\tA\tB\n', 'entailment'),
}


@pytest.mark.parametrize('name', GLUE)
def test_glue_files(tmp_path, name):
  train, test, label = GLUE[name]
  (tmp_path / 'train.tsv').write_text(train)
  (tmp_path / 'test.tsv').write_text(test)
  example, = read_texts(tmp_path / 'train.tsv', format=name)
  assert example.label == label
  assert (example.text_pair is None) == (name in ('glue/cola', 'glue/sst2'))
  if name == 'glue/mrpc':
    assert (example.text, example.text_pair) == ('"A" b', 'C')
  unlabelled, = read_texts(tmp_path / 'test.tsv', labelled=False, format=name)
  assert unlabelled.label is None and unlabelled.text


def test_a_short_line_of_a_glue_file_is_left_out_or_refused(tmp_path):
  """A run leaves the line out and counts it; a submission needs a prediction for each line."""
  path, fields = tmp_path / 'rte.tsv', data('sequence_classification', format='glue/rte')
  lines = [('index', 'sentence1', 'sentence2', 'label'), ('0', 'a', 'b', 'entailment'),
           ('1', 'c'), ('2', 'd', 'e', 'not_entailment'), ('3',)]
  path.write_text('\n'.join(map('\t'.join, lines)))
  for split in ('train', 'validation'):
    notes = []
    assert [e.text for e in SequenceFiles.read(str(path), fields, split, notes)] == ['a', 'd']
    assert notes == [f'2 lines lack a text and are left out, such as {path}, line 3']
  with pytest.raises(UserError) as e:
    SequenceFiles.read(str(path), fields, 'test', [])
  assert str(e.value) == (f"{path}, line 3: no column 'sentence2' in this line: complete it, "
                          'because a submission has a prediction for each line')
  path.write_text('\n'.join('\t'.join(line[:3]) for line in (*lines[:2], lines[3])))
  notes = []
  assert [e.text for e in SequenceFiles.read(str(path), fields, 'test', notes)] == ['a', 'd']
  assert not notes


def test_glue_submissions():
  tasks = glue.TASKS
  assert glue.submission(tasks['glue/cola'], [0, 1]) == 'index\tprediction\n0\t0\n1\t1\n'
  assert glue.submission(tasks['glue/rte'], [1, 0]) == (
      'index\tprediction\n0\tnot_entailment\n1\tentailment\n')
  assert glue.submission(tasks['glue/stsb'], [5.2, -1, 2.0]) == (
      'index\tprediction\n0\t5.000\n1\t0.000\n2\t2.000\n')
  assert glue.submission_name(tasks['glue/mnli'], 'x/test_matched.tsv') == 'MNLI-m.tsv'
  assert glue.submission_name(tasks['glue/mnli'], 'x/test_mismatched.tsv') == 'MNLI-mm.tsv'
  assert glue.submission_name(tasks['glue/sst2'], 'test.tsv') == 'SST-2.tsv'


def test_tensorflow_datasets(tmp_path, monkeypatch):
  import tensorflow_datasets as tfds

  class Pairs(tfds.core.GeneratorBasedBuilder):
    """Like glue/mrpc of tensorflow-datasets."""

    VERSION = tfds.core.Version('1.0.0')

    def _info(self):
      return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(
          {'sentence1': tfds.features.Text(), 'sentence2': tfds.features.Text(),
           'label': tfds.features.ClassLabel(names=['not_equivalent', 'equivalent'])}))

    def _split_generators(self, dl_manager):
      return {'train': self._generate_examples(3), 'test': self._generate_examples(1)}

    def _generate_examples(self, count):
      for i in range(count):
        yield i, {'sentence1': f'A{i}', 'sentence2': f'B{i}',
                  'label': i % 2 if count > 1 else -1}

  Pairs(data_dir=tmp_path, file_format='array_record').download_and_prepare()
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))
  examples = read_texts('tfds:pairs', format='glue/mrpc')
  assert sorted((e.text, e.text_pair, e.label) for e in examples) == [
      ('A0', 'B0', 'not_equivalent'), ('A1', 'B1', 'equivalent'), ('A2', 'B2', 'not_equivalent')]
  examples = read_texts('tfds:pairs@train', text_column='sentence1')
  assert {e.label for e in examples} == {'not_equivalent', 'equivalent'}
  rows = list(table.read_tfds('pairs@test', 'train'))
  assert [row.values['label'] for row in rows] == [None]


# ---- words and tags -----------------------------------------------------------------------------


def read_tagged(path, labelled=True, **fields):
  return [s[1:] for s in conll.read(str(path), data('token_classification', **fields), labelled)]


def test_conll_files(tmp_path):
  path = tmp_path / 'a.conll'
  path.write_text('-DOCSTART- O\n\nEU NNP B-ORG\nis VBZ O\n\n\n# SYM O\n\n')
  assert read_tagged(path) == [(('EU', 'is'), ('B-ORG', 'O')), (('#',), ('O',))]
  path.write_text('# text = 同样 的 词\n1\t同样\tO\t-\n2\t北京\tB-LOC\t-\r\n')
  assert read_tagged(path, text_column='1', label_column='2') == [
      (('同样', '北京'), ('O', 'B-LOC'))]
  path.write_text('EU b B-ORG\na\tb O\nis b O\n')  # a tab between spaces counts as a space
  assert read_tagged(path, text_column='0', label_column='-1') == [
      (('EU', 'a', 'is'), ('B-ORG', 'O', 'O'))]
  rest = '\t_' * 6
  path.write_text(f'# text = du vin\n1-2\tdu\t_\t_{rest}\n1\tde\t_\tADP{rest}\n'
                  f'2\tle\t_\tDET{rest}\n2.1\tx\t_\tX{rest}\n3\tvin\t_\tNOUN{rest}\n')
  assert read_tagged(path, text_column='1', label_column='3') == [
      (('de', 'le', 'vin'), ('ADP', 'DET', 'NOUN'))]
  path.write_text('EU NNP I-NP B-ORG\n.\n')  # a test file may have words alone
  assert read_tagged(path, labelled=False) == [(('EU', '.'), ())]
  path = tmp_path / 'a.jsonl'
  path.write_text('{"words": ["EU"], "tags": ["B-ORG"]}\n')
  assert read_tagged(path, text_column='words', label_column='tags') == [(('EU',), ('B-ORG',))]


@pytest.mark.parametrize('name, content, fields, message', [
    ('a.conll', 'EU B-ORG\nis\n', {}, r"line 2: 'is' has a word without a tag"),
    ('a.conll', 'EU\t\n', {}, 'line 1: an empty word or tag'),
    ('a.conll', 'EU B-ORG\n', {'label_column': 'tag'}, 'not the number of a column'),
    ('a.jsonl', '{"0": ["a", "b"], "-1": ["O"]}\n', {}, 'line 1: 2 words and 1 tags'),
    ('a.jsonl', '{"0": "a", "-1": ["O"]}\n', {}, "'0' is not a list of strings"),
    ('a.conll', 'EU O\n', {'format': 'xml'}, 'use auto, conll, jsonl'),
])
def test_tagged_files_that_cannot_be_used(tmp_path, name, content, fields, message):
  (tmp_path / name).write_text(content)
  with pytest.raises(UserError, match=message):
    read_tagged(tmp_path / name, **fields)


@pytest.mark.parametrize('tags, expected', [
    ('O B-A I-A O', [('A', 1, 2)]),
    ('I-A I-A O I-B', [('A', 0, 1), ('B', 3, 3)]),  # IOB1
    ('I-A B-A I-A', [('A', 0, 0), ('A', 1, 2)]),
    ('B-A I-B', [('A', 0, 0), ('B', 1, 1)]),
    ('B-A M-A E-A S-B S-B', [('A', 0, 2), ('B', 3, 3), ('B', 4, 4)]),  # BMES
    ('B-A E-A I-A', [('A', 0, 1), ('A', 2, 2)]),  # BIOES: nothing continues after an end
    ('S-A E-A', [('A', 0, 0), ('A', 1, 1)]),
    ('B-A I-A L-A U-B', [('A', 0, 2), ('B', 3, 3)]),  # BILOU
    ('B-x-y I-x-y', [('x-y', 0, 1)]),
    ('O', []),
    ('B', [('', 0, 0)]),
    ('NOUN NOUN B_X', [('NOUN', 0, 0), ('NOUN', 1, 1), ('B_X', 2, 2)]),  # parts of speech
])
def test_entities(tags, expected):
  assert [tuple(e) for e in conll.entities(tags.split())] == expected


def test_a_null_may_lie_inside_an_object():
  row = table.Row('a, line 1', {'meta': {'label': None, 'id': 3}, 'text': None})
  assert row.or_null('meta.label') is None and row.or_null('text') is None
  assert row.or_null('meta.id') == 3
  for column in ('meta.other', 'meta.id.x', 'label'):
    with pytest.raises(UserError, match='a, line 1: no column'):
      row.or_null(column)


def test_bare_letters_beside_plain_tags_are_labels():
  """Italian part-of-speech tags: S is a noun, E a preposition. Alone, S is a scheme."""
  tags = ['S', 'E', 'RD', 'S', 'O', 'B']
  assert conll.letters_are_plain(tags) and not conll.letters_are_plain(['B', 'M', 'E', 'S', 'O'])
  assert [tuple(e) for e in conll.entities(tags, plain_letters=True)] == [
      ('S', 0, 0), ('E', 1, 1), ('RD', 2, 2), ('S', 3, 3), ('B', 5, 5)]
  scores = metrics.entities([['S', 'E', 'RD', 'S']], [['E', 'E', 'RD', 'S']])
  assert (scores['precision'], scores['accuracy']) == (0.75, 0.75)


# ---- questions and choices ----------------------------------------------------------------------


def test_squad_files(tmp_path):
  path = tmp_path / 'a.json'
  qas = [{'id': '1', 'question': 'Who?', 'answers': [{'text': 'Ann', 'answer_start': 0}]},
         {'id': '2', 'question': 'Why?', 'answers': [], 'is_impossible': True},
         {'id': '3', 'question': 'Whom?', 'answers': [{'text': 'Bob', 'answer_start': 3}]}]
  paragraph = {'context': 'Ann sees Bob.', 'qas': qas}
  path.write_text(json.dumps({'data': [{'paragraphs': [paragraph]}]}))
  questions = squad.read(str(path))
  assert [(q.id, q.answers, q.in_place) for q in questions] == [
      ('1', ('Ann',), True), ('2', (), True), ('3', ('Bob',), False)]
  path.write_text(json.dumps({'data': [{'paragraphs': [{'context': 'x', 'qas': qas[:1] * 2}]}]}))
  with pytest.raises(UserError, match="the id '1' appears 2 times"):
    squad.read(str(path))
  endless = [qas[0] | {'answers': [{'text': 'Ann', 'answer_start': float('inf')}]}]
  unanswered = [{'id': '1', 'question': 'Who?'}]
  for articles in ([{}], *([{'paragraphs': [{'context': 'x', 'qas': q}]}]
                           for q in (endless, unanswered))):
    path.write_text(json.dumps({'data': articles}))
    with pytest.raises(UserError, match="not in SQuAD's format"):
      squad.read(str(path))


def test_questions_of_a_test_file_need_no_answers(tmp_path):
  path = tmp_path / 'a.json'
  path.write_text(json.dumps({'data': [{'paragraphs': [{'context': 'Ann sees Bob.', 'qas': [
      {'id': '1', 'question': 'Who?'}, {'id': '2', 'question': 'Whom?', 'answers': None}]}]}]}))
  fields = data('question_answering', test=str(path))
  assert QuestionFiles.test_examples(fields) == [
      ('1', 'Who?', 'Ann sees Bob.', (), ()), ('2', 'Whom?', 'Ann sees Bob.', (), ())]
  with pytest.raises(UserError) as e:
    QuestionFiles.read(str(path), fields, 'validation', [])
  assert str(e.value) == (f"{path} is not in SQuAD's format (data, paragraphs, qas): "
                          "KeyError 'answers'")


def read_choices(path, **fields):
  return [e[1:] for e in choices.read(str(path), data('multiple_choice', **fields))]


def test_choices(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text('{"text": "A", "choices": ["x", "y"], "label": 1}\n'
                  '{"text": "B", "choices": ["x", "y", "z"], "label": "C"}\n')
  assert read_choices(path) == [('A', ('x', 'y'), 1), ('B', ('x', 'y', 'z'), 2)]
  path.write_text(json.dumps({'answerKey': 'B', 'question': {'stem': 'A', 'choices': [
      {'label': 'A', 'text': 'x'}, {'label': 'B', 'text': 'y'}]}}))
  assert read_choices(path, format='commonsenseqa') == [('A', ('x', 'y'), 1)]
  path = tmp_path / 'a.csv'
  path.write_text('sent1,sent2,ending0,ending1,ending2,ending3,label\n"A, b.",He,a,b,c,d,3\n')
  assert read_choices(path, format='swag') == [('A, b.', ('He a', 'He b', 'He c', 'He d'), 3)]


@pytest.mark.parametrize('line, message', [
    ({'text': 'A', 'choices': ['x', 'y'], 'label': 2}, 'the label 2 is none of the 2 choices'),
    ({'text': 'A', 'choices': ['x'], 'label': 0}, 'at least two choices'),
    ({'text': 'A', 'label': 0}, "no column 'choices'"),
])
def test_choices_that_cannot_be_used(tmp_path, line, message):
  (tmp_path / 'a.jsonl').write_text(json.dumps(line))
  with pytest.raises(UserError, match=message):
    read_choices(tmp_path / 'a.jsonl')


def test_labels_on_only_some_choices_are_refused(tmp_path):
  path = tmp_path / 'a.jsonl'

  def read(*labels):
    named = [{'text': t} | ({'label': x} if x else {}) for t, x in zip('xyz', labels)]
    path.write_text(json.dumps({'answerKey': 'C', 'question': {'stem': 'S', 'choices': named}}))
    return read_choices(path, format='commonsenseqa')

  for labels in (('A', 'B', 'C'), ('', '', '')):
    assert read(*labels) == [('S', ('x', 'y', 'z'), 2)]
  with pytest.raises(UserError) as e:
    read('', 'B', 'C')
  assert str(e.value) == (
      f'{path}, line 1: only 2 of the 3 choices have a "label": give one to each choice')
