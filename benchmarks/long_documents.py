"""Compares the values of data.long on reviews of more than 512 tokens.

  python -m benchmarks.long_documents --train=imdb/train.tsv.gz --eval=imdb/test.tsv.gz \
      --model=MODEL --workdir=runs/long

The files have the columns label and text. The benchmark draws the same number of reviews
of each label, and prints the table of launch/sweep.py. The same command resumes. A step
has 4 microbatches, because the chunks of 16 long reviews do not fit into 24 GB at once.
"""

import csv
import pathlib
import subprocess
import sys

from absl import app, flags
from etils import epath
import numpy as np

from benchmarks.calls import keep_flags
from bert_jax.data import inputs
from bert_jax.interop import load as load_lib
from bert_jax.labelled import table

_FILES = {'train': flags.DEFINE_string('train', None, 'tsv to train on.', required=True),
          'eval': flags.DEFINE_string('eval', None, 'tsv to evaluate.', required=True)}
_COUNTS = {'train': flags.DEFINE_integer('count', 400, 'Reviews to train on.'),
           'eval': flags.DEFINE_integer('eval_count', 400, 'Reviews to evaluate.')}
_MODEL = flags.DEFINE_string('model', None, 'What to start from.', required=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for the runs.', required=True)
_EPOCHS = flags.DEFINE_float('epochs', 3, 'Passes over the reviews.')
_RATE = flags.DEFINE_float('learning_rate', 1e-4, 'Peak learning rate.')
_LONGEST = 510  # tokens without [CLS] and [SEP]


def _write(path: epath.Path, source: str, count: int):
  """Writes `count` random long reviews, half of them for each label."""
  tokenizer = load_lib.load(_MODEL.value).tokenizer
  rows = [(row['label'], row['text'].replace('<br />', ' '))
          for row in table.read(source, 'auto', '')]
  drawn = {}
  for i in np.random.default_rng(0).permutation(len(rows)):
    label, text = rows[i]
    if len(drawn.setdefault(label, [])) < count // 2 and len(text) > 3 * _LONGEST and (
        len(tokenizer.encode_batch([text])[0]) > _LONGEST):
      drawn[label].append(text)
  with path.open('w') as file:
    writer = csv.writer(file, delimiter='\t', quoting=csv.QUOTE_NONE, escapechar=None,
                        quotechar=None)
    writer.writerow(['label', 'text'])
    writer.writerows((label, text) for label, texts in drawn.items() for text in texts)


def main(_):
  """Draws the reviews and starts the sweep."""
  workdir = epath.Path(_WORKDIR.value)
  keep_flags(pathlib.Path(workdir), 'train', 'eval', 'model', 'count', 'eval_count', 'epochs',
             'learning_rate')
  for split, source in _FILES.items():
    if not (workdir / f'{split}.tsv').exists():
      _write(workdir / f'{split}.tsv', source.value, _COUNTS[split].value)
  ways = ','.join(inputs.LONG)
  sys.exit(subprocess.run([
      sys.executable, 'launch/sweep.py', '--config=configs/long_documents.py',
      f'--workdir={workdir}', f'--sweep=data.long={ways}', f'--config.init_from={_MODEL.value}',
      f'--config.train_epochs={_EPOCHS.value}',
      f'--config.optimizer.learning_rate={_RATE.value}', '--config.optimizer.accumulation=4',
      f'--config.data.train={(workdir / "train.tsv").resolve()}',
      f'--config.data.eval={(workdir / "eval.tsv").resolve()}']).returncode)


if __name__ == '__main__':
  app.run(main)
