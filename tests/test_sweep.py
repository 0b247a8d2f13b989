"""launch/sweep.py: combinations, tables, and resuming."""

import csv
import functools
import itertools
import json
import pathlib
import runpy
import signal
import statistics
import subprocess
import sys

from ml_collections import ConfigDict
import pytest

from bert_jax.errors import UserError
from tests import made_tasks, test_commands

ROOT = pathlib.Path(__file__).parent.parent
SWEEP = runpy.run_path(str(ROOT / 'launch/sweep.py'), run_name='sweep')


def result(score, **values):
  return SWEEP['Result'](values, 'accuracy', score, {'accuracy': score, 'loss': 0.5},
                         'done' if score is not None else 'exit status 2: no file')


def test_swept_values_are_parsed():
  assert SWEEP['parse'](['seed=0,1', 'phases=((1,2,3),(4,5,6)),()', 'data.labels=[1,2],[3]']) == {
      'seed': ['0', '1'], 'phases': ['((1,2,3),(4,5,6))', '()'], 'data.labels': ['[1,2]', '[3]']}
  for wrong, message in (([], 'give at least one'), (['seed'], 'is not FIELD'),
                         (['seed='], 'is not FIELD'), (['seed=1', 'seed=2'], 'is swept twice')):
    with pytest.raises(UserError, match=message):
      SWEEP['parse'](wrong)


def test_tables_rank_the_runs_and_average_over_seeds(tmp_path):
  results = [result(0.7, rate='1e-5', seed='0'), result(0.9, rate='1e-5', seed='1'),
             result(0.8, rate='2e-5', seed='0'), result(0.86, rate='2e-5', seed='1'),
             result(None, rate='3e-5', seed='0')]
  text = SWEEP['write_tables'](tmp_path, results)
  rows = list(csv.reader((tmp_path / 'sweep.csv').open()))
  assert rows[0] == ['rate', 'seed', 'accuracy', 'loss', 'status']
  assert [row[2] for row in rows[1:]] == ['0.9000', '0.8600', '0.8000', '0.7000', 'None']
  assert rows[-1][-1] == 'exit status 2: no file'
  seeds = text.split('\n\n')[1]
  assert seeds.splitlines()[2:] == [
      f'| 2e-5 | 0.8300 | {statistics.stdev([0.8, 0.86]):.4f} | 2 |',
      f'| 1e-5 | 0.8000 | {statistics.stdev([0.7, 0.9]):.4f} | 2 |']
  SWEEP['draw'](tmp_path, results)
  assert (tmp_path / 'sweep.png').stat().st_size > 5000


@pytest.mark.parametrize('metric, values', [('accuracy', (0.9, 0.7)), ('loss', (0.2, 0.4))])
def test_a_score_comes_from_the_last_evaluation(tmp_path, metric, values):
  (tmp_path / 'run.json').write_text(json.dumps({'config': {'keep_best': metric}}))
  (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in (
      {'step': 1, f'eval_{metric}': values[0]}, {'step': 2, f'eval_{metric}': values[1]},
      {'step': 2, 'loss': 0.1})))
  last = SWEEP['read_result'](tmp_path, {'seed': '0'}, 'done')
  assert last.score == values[1] and last.scores == {'step': 2, metric: values[1]}


@pytest.mark.parametrize('description, best', [
    ({'best_is_lowest': True}, 10.0), ({'best_is_lowest': False}, 12.0), ({}, 12.0)])
def test_the_kept_checkpoints_tell_whether_low_scores_are_better(tmp_path, description, best):
  results = []
  for value in (12.0, 10.0, 11.0):
    kept = tmp_path / f'{value}/best/2/fingerprints'
    kept.mkdir(parents=True)
    (kept / 'metadata').write_text(json.dumps(description))
    (kept.parents[2] / 'run.json').write_text('{"config": {"keep_best": "perplexity"}}')
    (kept.parents[2] / 'metrics.jsonl').write_text(f'{{"step": 2, "eval_perplexity": {value}}}\n')
    results.append(SWEEP['read_result'](kept.parents[2], {'seed': str(value)}, 'done'))
  assert SWEEP['ranked'](results)[0].score == best


def test_without_a_kept_checkpoint_the_lowest_loss_is_best(tmp_path):
  (tmp_path / 'run.json').write_text('{"config": {}}')
  (tmp_path / 'metrics.jsonl').write_text('{"step": 2, "eval_loss": 0.5}\n')
  assert SWEEP['read_result'](tmp_path, {}, 'done').lower_is_better


@pytest.mark.medium
def test_a_sweep_continues_after_a_failed_run_and_names_it(tmp_path):
  files = made_tasks.files('sequence_classification', tmp_path, 20, 8)
  fields = {'init_from': made_tasks.model(tmp_path / 'model'), 'batch_size': 8, 'max_len': 32,
            'train_epochs': 0, 'train_steps': 2, **files}
  command = [sys.executable, 'launch/sweep.py', '--config=configs/sequence_classification.py',
             f'--workdir={tmp_path}/sweep', '--sweep=seed=0',
             '--sweep=data.text_column=text,body', '--parallel=2',
             *(f'--config.{name}={value}' for name, value in fields.items())]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 1, done.stderr
  assert '1 of 2 runs failed' in done.stderr and 'Traceback' not in done.stderr
  assert "no column 'body'" in done.stdout
  rows = list(csv.reader((tmp_path / 'sweep/sweep.csv').open()))
  assert rows[1][-1] == 'done' and len(rows) == 3
  metrics, = (tmp_path / 'sweep').glob('*/metrics.jsonl')
  before = metrics.read_text()
  subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert metrics.read_text() == before  # the finished run does not run again
  assert rows[1][2] == f'{json.loads(before.splitlines()[-1])["eval_accuracy"]:.4f}'


def test_a_truncated_metrics_file_is_read(tmp_path):
  (tmp_path / 'run.json').write_text(json.dumps({'config': {'keep_best': 'accuracy'}}))
  (tmp_path / 'metrics.jsonl').write_text('{"step": 1, "eval_accuracy": 0.5}\n{"step": 2, "eval_ac')
  assert SWEEP['read_result'](tmp_path, {'seed': '0'}, 'done').score == 0.5


@pytest.mark.medium
@pytest.mark.parametrize('number, status', [
    (signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)])
def test_a_stopped_sweep_stops_its_runs(tmp_path, number, status, corpus_file):
  command = [sys.executable, 'launch/sweep.py', '--config', 'tests/tiny.py', '--sweep=seed=0,1',
             f'--workdir={tmp_path}/sweep', f'--config.data.source={corpus_file}',
             '--config.train_steps=100000', '--config.log_every=5']
  running = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
  first = tmp_path / 'sweep/seed=0'
  test_commands.wait_for_step(first, 1)
  running.send_signal(number)
  _, error = running.communicate(timeout=60)
  assert running.returncode == status and len(error.splitlines()) == 1, error
  assert 'stopped by SIGTERM after step' in (first / 'log.txt').read_text()
  assert not (tmp_path / 'sweep/seed=1').exists()
  assert not subprocess.run(['pgrep', '-f', f'{tmp_path}/sweep'], capture_output=True).stdout


@pytest.mark.parametrize('sweeps, given, told', [
    (['seed=0,1'], {}, ''),
    (['seed=0,0'], {}, 'seed=0 and seed=0 are the same run: give it once'),
    (['optimizer.learning_rate=1e-4,2e-4,0.0001'], {}, 'optimizer.learning_rate=1e-4 and optimizer.'
     'learning_rate=0.0001 are the same run'),
    (['seed=0,1', 'trackers=tensorboard,(tensorboard)'], {}, 'seed=0, trackers=tensorboard and '
     'seed=0, trackers=(tensorboard) are the same run'),
    (['data.source=a/b,a_b'], {}, 'data.source=a/b and data.source=a_b would share the folder '
     'source=a_b: rename the file that one of them names'),
    (['optimizer.learning_rat=1e-4,2e-4'], {}, 'unknown config field --config.optimizer.'
     'learning_rat: did you mean --config.optimizer.learning_rate?'),
    (['model=1,2'], {}, '--config.model is a group'),
    (['seed=0,a'], {}, "flag --config.seed=a: invalid literal for int() with base 10: 'a'"),
    (['phases=(1,2,(3'], {}, '--config.phases=(1,2,(3: (1,2,(3 is not a list'),
    (['seed=0,1'], {'seed': 3}, '--config.seed is given and swept: give it once'),
    # ---- values that a run refuses: a sweep checks them like a run ------------------------------
    (['seed=0,1', 'data.negatives=same_document,near'], {}, "--sweep: seed=0, data.negatives=near: "
     "data.negatives='near' is unknown: use other_document, similar_style, same_document"),
    (['optimizer.name=adamw,adamm'], {}, "optimizer.name=adamm: optimizer.name='adamm' is unknown"),
    (['optimizer.warmup_steps=10,50'], {'train_steps': 20}, 'optimizer.warmup_steps=50: optimizer.'
     'warmup_steps=50 leaves nothing of the 20'),
    (['train_steps=0,20'], {}, 'train_steps=0: the run has no length'),
    (['sharding=fsdp,ddp'], {}, "sharding=ddp: sharding='ddp' is unknown"),
    (['masking.ngram_max=2,3'], {}, 'masking.ngram_max=2: --config.masking.ngram_max has no effect '
     'here: it is for masking.unit=ngram'),
    (['profile_steps=(3,2)'], {}, 'profile_steps=(3,2): profile_steps=3,2: the last step')])
def test_sweeps_that_cannot_run_are_refused(sweeps, given, told):
  swept = SWEEP['parse'](sweeps)
  combinations = [dict(zip(swept, values)) for values in itertools.product(*swept.values())]
  check = functools.partial(SWEEP['check'], str(ROOT / 'configs/tiny.py'), given)
  if not told:
    check(combinations)
    return
  with pytest.raises(UserError) as error:
    check(combinations)
  assert told in str(error.value)


@pytest.mark.parametrize('field, old', [('init_from', 'model'), ('data.eval', 'dev.tsv')])
def test_a_sweep_refuses_runs_of_another_model_or_file(tmp_path, field, old):
  """A resumed run may change these fields, but its scores would stay in the table."""
  asked = ConfigDict({'init_from': 'model', 'data': {'eval': './dev.tsv'}})
  check = functools.partial(SWEEP['check_earlier'], tmp_path)
  check(asked)  # no run yet
  (tmp_path / 'run.json').write_text(json.dumps(
      {'config': {'init_from': 'model', 'data': {'eval': 'dev.tsv'}}}))
  check(asked)
  asked.update_from_flattened_dict({field: 'other'})
  with pytest.raises(UserError, match=f'--config.{field}=other: {tmp_path} has a run with '
                                      f'{field}={old}. Give another --workdir'):
    check(asked)


def test_long_folder_names_are_shortened_and_stay_distinct():
  values = [{'data.source': f'{"long/" * 60}{name}'} for name in 'ab']
  names = [SWEEP['folder_name'](x) for x in values]
  assert len(set(names)) == 2 and all(len(name) <= 255 for name in names)


@pytest.mark.medium
def test_mistakes_are_refused(tmp_path):
  done = subprocess.run([sys.executable, 'launch/sweep.py', '--workdir=x', '--sweep=seed=1'],
                        cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 2 and done.stderr.startswith('bert_jax: give --config=FILE')
  done = subprocess.run([sys.executable, 'launch/sweep.py', '--workdir=x', '--config=tiny',
                         '--seed=1', '--sweep=seed=1'], cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 2 and "unexpected argument '--seed=1'" in done.stderr
  done = subprocess.run([sys.executable, 'launch/sweep.py', '--workdir=gs://b/x', '--config=tiny',
                         '--sweep=seed=1'], cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 2 and '--workdir=gs://b/x: a sweep compares' in done.stderr
  done = subprocess.run([sys.executable, 'launch/sweep.py', f'--workdir={tmp_path}/new',
                         '--config=tiny', '--sweep=sed=0,1'], cwd=ROOT, capture_output=True,
                        text=True)
  assert (done.returncode, done.stderr) == (
      2, 'bert_jax: unknown config field --config.sed: did you mean --config.seed?\n')
  assert not (tmp_path / 'new').exists()
  (tmp_path / 'file').touch()
  # Root may write to any folder except the kernel's.
  for workdir, reason in ((tmp_path / 'file', 'File exists'),
                          ('/proc', 'No such file or directory')):
    done = subprocess.run([sys.executable, 'launch/sweep.py', f'--workdir={workdir}',
                           '--config=tiny', '--sweep=seed=0,1'], cwd=ROOT, capture_output=True,
                          text=True)
    assert (done.returncode, done.stderr) == (
        2, f'bert_jax: --workdir={workdir} cannot be written: {reason}\n')


def test_a_value_that_the_task_refuses_is_an_error(tmp_path):
  given = {'data.train': 'train.tsv', 'init_from': 'model'}
  check = functools.partial(
      SWEEP['check'], str(ROOT / 'configs/sequence_classification.py'), given)
  with pytest.raises(UserError, match="^--sweep: data.long=tali: data.long='tali' is unknown: use"):
    check([{'data.long': 'tail'}, {'data.long': 'tali'}])
  check([{'data.long': 'tail'}, {'data.long': 'head_tail'}])
