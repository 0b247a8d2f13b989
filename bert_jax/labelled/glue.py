"""Reads GLUE files and writes GLUE submissions.

Wang et al. 2019, https://arxiv.org/abs/1804.07461. The files are the tsv files of the
benchmark, without quoting. The training and development files of CoLA have no header.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import math

from etils import epath

from bert_jax.errors import require
from bert_jax.labelled import table

_NLI = ('entailment', 'not_entailment')
_MNLI = ('entailment', 'neutral', 'contradiction')


@dataclasses.dataclass(frozen=True)
class Columns:
  """The columns of a table that hold the texts and the labels."""

  text: str
  text_pair: str  # '' = none
  label: str  # a column, or comma-separated columns of 0 and 1, one for each label
  problem: str  # single_label, multi_label or regression
  labels: tuple[str, ...]  # () = all labels of the training file
  written: tuple[str, ...] = ()  # the value of each label in the files; () = its name
  # The range of the values of a regression.
  bounds: tuple[float, float] = dataclasses.field(default=(-math.inf, math.inf),
                                                  kw_only=True)


@dataclasses.dataclass(frozen=True)
class Glue(Columns):
  """A task of the benchmark."""

  submission: str = ''  # the name of the prediction file
  metric: str = 'accuracy'  # the score that selects the best checkpoint
  tfds: tuple[str, ...] = ()  # the text columns in tensorflow-datasets; () = same names


TASKS = {
    'glue/cola': Glue('sentence', '', 'label', 'single_label',
                      ('unacceptable', 'acceptable'), ('0', '1'), 'CoLA.tsv', 'matthews'),
    'glue/sst2': Glue('sentence', '', 'label', 'single_label', ('negative', 'positive'),
                      ('0', '1'), 'SST-2.tsv'),
    'glue/mrpc': Glue('#1 String', '#2 String', 'Quality', 'single_label',
                      ('not_equivalent', 'equivalent'), ('0', '1'), 'MRPC.tsv', 'f1',
                      ('sentence1', 'sentence2')),
    'glue/stsb': Glue('sentence1', 'sentence2', 'score', 'regression', (), (),
                      'STS-B.tsv', 'spearman', bounds=(0.0, 5.0)),
    'glue/qqp': Glue('question1', 'question2', 'is_duplicate', 'single_label',
                     ('not_duplicate', 'duplicate'), ('0', '1'), 'QQP.tsv', 'f1'),
    'glue/mnli': Glue('sentence1', 'sentence2', 'gold_label', 'single_label', _MNLI,
                      _MNLI, 'MNLI-m.tsv', tfds=('premise', 'hypothesis')),
    'glue/qnli': Glue('question', 'sentence', 'label', 'single_label', _NLI, _NLI,
                      'QNLI.tsv'),
    'glue/rte': Glue('sentence1', 'sentence2', 'label', 'single_label', _NLI, _NLI,
                     'RTE.tsv'),
    'glue/wnli': Glue('sentence1', 'sentence2', 'label', 'single_label',
                      ('not_entailment', 'entailment'), ('0', '1'), 'WNLI.tsv'),
}


def find(data_format: str) -> Glue:
  """Returns the task that `data.format` names; raises UserError if there is none."""
  require(data_format in TASKS,
          f'data.format={data_format!r} is unknown: the GLUE tasks are '
          f'{", ".join(TASKS)}')
  return TASKS[data_format]


def read(source: str, task: Glue, split: str,
         notes: list[str] | None = None) -> Iterator[table.Row]:
  """Yields the rows of a GLUE file or of tfds:glue/..., with the file's column names.

  Lines without a text are left out, as in the benchmark. QQP has a few such lines.
  `notes` gets a note with their number.

  Raises:
    UserError: a line of a test file has no text. A submission needs every line.
  """
  if source.startswith('tfds:'):
    yield from _from_tfds(source.removeprefix('tfds:'), task, split)
    return
  has_header = (task.submission != 'CoLA.tsv'
                or table.read_text(source).startswith('index\t'))
  names = None if has_header else ('source', 'label', 'mark', 'sentence')
  left_out = []
  for row in table.read_separated(source, 'tsv', names, whole=False):
    # In GLUE's short lines, missing values are None. A column that is missing everywhere
    # passes here, and raises UserError where it is read.
    missing = next((name for name in (task.text, task.text_pair)
                    if name and row.values.get(name, '') is None), None)
    if missing is None:
      yield row
      continue
    require(split != 'test',
            f'{row.where}: no column {missing!r} in this line: complete it, because a '
            'submission has a prediction for each line')
    left_out.append(row.where)
  if left_out and notes is not None:
    notes.append(f'{len(left_out):,} lines lack a text and are left out, such as '
                 f'{left_out[0]}')


def _from_tfds(name: str, task: Glue, split: str) -> Iterator[table.Row]:
  # MNLI has two test sets and two validation sets. The GLUE score uses the matched sets.
  is_matched = name.startswith('glue/mnli') and split != 'train'
  ours = [column for column in (task.text, task.text_pair) if column]
  rows = table.read_tfds(name, f'{split}_matched' if is_matched else split)
  if split == 'test':
    # tfds stores examples in the order of a hash. A submission has the file's order.
    rows = sorted(rows, key=lambda row: row.values['idx'])
    named, numbers = name.partition('@')[2], [int(row.values['idx']) for row in rows]
    require(named and not named.startswith('test') or numbers == list(range(len(rows))),
            f'{name} is a part of a test set, and a submission needs all of it')
  for row in rows:
    values = {column: row[theirs] for column, theirs in zip(ours, task.tfds or ours)}
    value = row.values.get('label')
    # Converts labels to their form in the files, which the reader of the rows expects.
    if value in task.labels:
      value = task.written[task.labels.index(value)]
    if value is not None:
      values[task.label] = value
    yield table.Row(row.where, values)


def submission_name(task: Glue, source: str) -> str:
  """Returns the name of the prediction file for a test file."""
  mismatched = task.submission == 'MNLI-m.tsv' and 'mismatched' in epath.Path(source).name
  return 'MNLI-mm.tsv' if mismatched else task.submission


def submission(task: Glue, predictions: Sequence[int] | Sequence[float]) -> str:
  """Returns the content of a prediction file.

  `predictions` are class indices; or for STS-B values, which are clipped to [0, 5].
  """
  lines = ['index\tprediction']
  for i, prediction in enumerate(predictions):
    # A regression predicts any number, but the benchmark accepts only [0, 5].
    shown = (task.written[int(prediction)] if task.labels else
             f'{min(max(prediction, 0), 5):.3f}')
    lines.append(f'{i}\t{shown}')
  return '\n'.join(lines) + '\n'
