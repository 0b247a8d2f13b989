"""Compares the family: each member trains on the same 8 million tokens and is fine-tuned.

  python -m benchmarks.family --data=DATA --workdir=runs/family

DATA has the folders corpus_en_wikipedia and corpus_zh_wikipedia (*.txt.gz), sst2, mrpc
and zh_chnsenticorp. Every member uses its own config, with 4 layers of width 128
(DistilBERT: 2) and with the learning rate and the scale of the initial weights of
configs/tiny.py (ALBERT uses a learning rate for LAMB). Each member is fine-tuned, and so
is a twin with random parameters. The benchmark takes hours on a CPU; the same command
resumes. It prints two tables, English and Chinese, and writes them to WORKDIR/family.md.
"""

import csv
import pathlib
import statistics
from typing import NamedTuple

from absl import app, flags
from etils import epath

from benchmarks import calls
from bert_jax.reporting import metrics_log
from bert_jax.runtime import console

_DATA = flags.DEFINE_string('data', None, 'Folder of corpora and tasks.', required=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for the runs.', required=True)
_MEMBERS = flags.DEFINE_list('members', None, 'Some of the members; by default all.')
_STEPS = flags.DEFINE_integer('steps', 2000, 'Training steps; each has 32 rows of 128 tokens.')
_ROUNDS = flags.DEFINE_integer('rounds', 3, 'Short runs of each, in turns, that are timed.')
_SEEDS = flags.DEFINE_integer('seeds', 3, 'Fine-tuning runs of each model.')

_ENGLISH = ('sst2', 'mrpc')
_SIZE = {
    'phases': '()', 'batch_size': 32, 'max_len': 128, 'log_every': 50, 'eval_every': 500,
    'checkpoint_every': 500, 'model.dtype': 'float32', 'model.hidden_size': 128,
    'model.num_layers': 4, 'model.num_heads': 2, 'model.intermediate_size': 512,
    'model.dropout': 0.0, 'model.attention_dropout': 0.0, 'model.initializer_range': 0.08,
    'model.scan_unroll': 4, 'optimizer.learning_rate': 2e-3, 'optimizer.warmup_steps': 200}


class Member(NamedTuple):
  """One row of the table."""

  config: str
  records: str = 'wordpiece'
  overrides: dict[str, object] = {}
  score: str = 'mlm_loss'
  tasks: tuple[str, ...] = _ENGLISH


MEMBERS = {
    'BERT': Member('base'),
    'RoBERTa': Member('roberta_base', 'bpe'),
    'ALBERT': Member('albert_base', 'sentencepiece',
                     {'model.embedding_size': 64, 'optimizer.learning_rate': 5e-3}),
    # Heads of width 32, because its generator has a quarter of the heads.
    'ELECTRA': Member('electra_small', 'wordpiece',
                      {'model.num_heads': 4, 'model.embedding_size': 128}, 'rtd_accuracy'),
    # Its teacher is the BERT above.
    'DistilBERT': Member('distilbert_base', 'wordpiece',
                         {'model.num_layers': 2, 'model.scan_unroll': 2}),
    'ModernBERT': Member('modern_base', 'bpe',
                         {'model.intermediate_size': 192, 'model.local_window': 32,
                          'model.scan_unroll': 1}),
    'Chinese BERT': Member('chinese_base', 'chinese', tasks=('chnsenticorp',)),
}
_RECORDS = {  # arguments of `prepare`
    'wordpiece': ('corpus_en_wikipedia', '--vocab_size=8192'),
    'bpe': ('corpus_en_wikipedia', '--vocab_size=8192', '--tokenizer=bpe', '--nolowercase'),
    'sentencepiece': ('corpus_en_wikipedia', '--vocab_size=8192', '--tokenizer=sentencepiece'),
    'chinese': ('corpus_zh_wikipedia', '--vocab_size=8192', '--language=zh'),
}
_TASKS = {
    'sst2': ('sst2/train.tsv.gz', 'sst2/dev.tsv', 1.0, ['--config.data.format=glue/sst2']),
    'mrpc': ('mrpc/train.tsv', 'mrpc/dev.tsv', 3.0, ['--config.data.format=glue/mrpc']),
    'chnsenticorp': ('zh_chnsenticorp/train.tsv.gz', 'zh_chnsenticorp/dev.tsv', 3.0, []),
}


def _fields(overrides: dict[str, object]) -> list[str]:
  return [f'--config.{name}={value}' for name, value in overrides.items()]


def _metrics(workdir: epath.Path) -> list[dict[str, float]]:
  return metrics_log.read_metrics(workdir / 'metrics.jsonl') or [{}]


def _pretrain(name: str, suffix: str = '', **others) -> epath.Path:
  """Returns the workdir of a run of a member."""
  member, home = MEMBERS[name], epath.Path(_WORKDIR.value)
  records = home / f'records_{member.records}'
  workdir = home / (name.replace(' ', '_').lower() + suffix)
  if not (records / 'manifest.json').exists():
    corpus, *arguments = _RECORDS[member.records]
    calls.call('bert_jax.prepare', f'--input={_DATA.value}/{corpus}/*.txt.gz',
               f'--output={records}', *arguments)
  changes = _SIZE | member.overrides | {'train_steps': _STEPS.value, 'data.source': records}
  if name == 'DistilBERT':
    changes['teacher'] = home / 'bert'
  changes |= others
  done = workdir.exists() and _metrics(workdir)[-1]
  if done and done['step'] == changes['train_steps'] and 'eval_loss' in done:
    return workdir
  calls.call('bert_jax.main', f'--config=configs/{member.config}.py', f'--workdir={workdir}',
             *_fields(changes))
  return workdir


def _twin(name: str) -> epath.Path:
  """Makes random parameters: the learning rate of the one step is too small to matter."""
  return _pretrain(name, '_twin', **{
      'train_steps': 1, 'seed': 1, 'eval_batches': 1, 'optimizer.warmup_steps': 0,
      'optimizer.learning_rate': 1e-9})


def _speeds(names: list[str]) -> dict[str, float]:
  """Measures the real tokens per second of each member."""
  speeds = {name: [] for name in names}
  for i in range(_ROUNDS.value):
    for name in names:
      lines = _metrics(_pretrain(name, f'_speed{i}', **{
          'train_steps': 80, 'log_every': 20, 'optimizer.warmup_steps': 20, 'eval_batches': 1}))
      speeds[name] += [x['tokens_per_second'] for x in lines[1:] if 'tokens_per_second' in x]
  return {name: statistics.median(values) for name, values in speeds.items()}


def _finetune(task: str, models: list[epath.Path]) -> list[list[float]]:
  """Returns the scores of each model over the seeds."""
  train, evaluation, epochs, arguments = _TASKS[task]
  folder = epath.Path(f'{models[0]}_{task}')
  if not (folder / 'sweep.csv').exists():
    calls.call('launch.sweep', '--config=configs/sequence_classification.py',
               f'--workdir={folder}', f'--sweep=init_from={",".join(map(str, models))}',
               f'--sweep=seed={",".join(map(str, range(_SEEDS.value)))}', '--parallel=2',
               *arguments,
               *_fields({'data.train': f'{_DATA.value}/{train}',
                         'data.eval': f'{_DATA.value}/{evaluation}', 'train_epochs': epochs,
                         'optimizer.learning_rate': 3e-4, 'model.dropout': 0.1,
                         'model.scan_unroll': 1}))
  with (folder / 'sweep.csv').open() as file:
    rows = list(csv.DictReader(file))
  return [[float(row['accuracy']) for row in rows if row['init_from'] == str(model)]
          for model in models]


def _row(name: str, speed: float) -> list[str]:
  member = MEMBERS[name]
  workdir, twin = _pretrain(name), _twin(name)
  evaluated = [line for line in _metrics(workdir) if 'eval_loss' in line][-1]
  score = evaluated[f'eval_{member.score}']
  cells = [name, f'{member.score} {score:.3f}', f'{speed:,.0f}']
  for task in member.tasks:
    scores = _finetune(task, [workdir, twin])
    cells += [f'{100 * statistics.mean(values):.1f}' for values in scores]
    print(name, task, *scores, flush=True)
  return cells


def main(_):
  """Prints two tables: English and Chinese."""
  calls.keep_flags(pathlib.Path(_WORKDIR.value), 'data', 'steps', 'seeds')
  names, text = _MEMBERS.value or list(MEMBERS), ''
  for name in names:
    _pretrain(name)
  speeds = _speeds(names)
  for tasks in (_ENGLISH, ('chnsenticorp',)):
    columns = ['member', 'held out', 'tokens/s']
    columns += [cell for task in tasks for cell in (task, 'its random twin')]
    rows = [_row(name, speeds[name]) for name in names if MEMBERS[name].tasks == tasks]
    if rows:
      text += console.markdown_table([columns, *rows]) + '\n\n'
  (epath.Path(_WORKDIR.value) / 'family.md').write_text(text)
  print(text)


if __name__ == '__main__':
  app.run(main)
