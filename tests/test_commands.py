"""The commands as users type them: exit statuses, one-line errors, kill and resume."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from etils import epath
import jax
import numpy as np
import pytest

import bert_jax
from bert_jax.training import checkpoint, integrity
from tests import conftest, made_tasks, typed

ROOT = pathlib.Path(__file__).parent.parent
CONFIG = 'tests/tiny.py'


def command(module, *flags, devices=1):
  env = {**os.environ, 'PYTHONPATH': str(ROOT), 'PYTHONUNBUFFERED': '1',
         'XLA_FLAGS': conftest.xla_flags(devices)}
  return dict(args=[sys.executable, '-m', f'bert_jax.{module}', *flags], cwd=ROOT, env=env,
              text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run(module, *flags, **kwargs):
  return subprocess.run(**command(module, *flags), **kwargs)


@pytest.fixture(scope='module')
def run_typed(tmp_path_factory):
  """`run` in processes that have imported everything already."""
  error = tmp_path_factory.mktemp('typed') / 'stderr'
  with typed.server() as start:
    def run(module, *flags, input=''):
      status = start(module, list(flags), ROOT, error, stdin=input,
                     environment={'XLA_FLAGS': conftest.xla_flags(1)})
      return subprocess.CompletedProcess(
          flags, status, pathlib.Path(f'{error}.out').read_text(), error.read_text())

    yield run


def train(source, workdir, *flags):
  return ('main', f'--config={CONFIG}', f'--workdir={os.path.relpath(workdir, ROOT)}',
          f'--config.data.source={source}', *flags)


def assert_mistake(done, message):
  """Exit 2 and one line on standard error."""
  assert done.returncode == 2, done.stderr
  assert len(done.stderr.splitlines()) == 1, done.stderr
  assert done.stderr.startswith('bert_jax: ') and message in done.stderr, done.stderr


LONG = ('--config.train_steps=120', '--config.checkpoint_every=25', '--config.log_every=5',
        '--config.data.heldout=0.1', '--config.eval_every=60', '--config.log_batch_digest=True')
LONGER = (*LONG, '--config.train_steps=4000')  # tests stop it before its end


def final_bits(workdir):
  """The parameters and moments of the newest checkpoint, as bytes."""
  with checkpoint.ocp.CheckpointManager(workdir / 'checkpoints',
                                        item_names=('params', 'optimizer')) as manager:
    step = manager.latest_step()
    state = manager.restore(step, args=checkpoint.ocp.args.Composite(
        params=checkpoint.ocp.args.StandardRestore(),
        optimizer=checkpoint.ocp.args.StandardRestore()))
  return step, [np.asarray(x).tobytes() for x in jax.tree.leaves((state['params'],
                                                                  state['optimizer']))]


def metrics(workdir):
  """The lines of metrics.jsonl without the times."""
  return [{k: v for k, v in json.loads(line).items() if k not in ('tokens_per_second', 'data_wait')}
          for line in (workdir / 'metrics.jsonl').read_text().splitlines()]


def wait_for_step(workdir, step):
  path = workdir / 'metrics.jsonl'
  for _ in range(4000):  # 200 s: a busy machine starts slowly
    if path.exists():
      last = [json.loads(x)['step'] for x in path.read_text().splitlines() if x.endswith('}')]
      if last and last[-1] >= step:
        return
    time.sleep(0.05)
  raise AssertionError('the run did not come so far')


@pytest.fixture(scope='module')
def alone(tmp_path_factory, corpus_file):
  """The workdir of 120 undisturbed steps."""
  folder = tmp_path_factory.mktemp('alone') / 'run'
  done = run(*train(corpus_file, folder, *LONG))
  assert done.returncode == 0, done.stderr
  return folder


@pytest.mark.slow
def test_of_two_runs_in_one_workdir_one_trains_and_one_is_refused(tmp_path, alone, corpus_file):
  running = [subprocess.Popen(**command(*train(corpus_file, tmp_path / 'run', *LONG)))
             for _ in range(2)]
  errors = [process.communicate(timeout=300)[1] for process in running]
  assert sorted(process.returncode for process in running) == [0, 2], errors
  loser = next(i for i in (0, 1) if running[i].returncode == 2)
  assert len(errors[loser].splitlines()) == 1, errors[loser]
  assert f'run is in use by process {running[1 - loser].pid} on ' in errors[loser]
  assert final_bits(tmp_path / 'run') == final_bits(alone)
  assert metrics(tmp_path / 'run') == metrics(alone)
  assert (tmp_path / 'run/.lock').read_text() == ''


def test_a_killed_and_resumed_run_ends_with_the_same_bits(tmp_path, alone, corpus_file):
  killed = subprocess.Popen(**command(*train(corpus_file, tmp_path / 'killed', *LONG)))
  wait_for_step(tmp_path / 'killed', 65)
  killed.send_signal(signal.SIGKILL)
  killed.communicate()
  saved = checkpoint.Checkpoints(epath.Path(tmp_path / 'killed'), 3)
  assert saved.latest() is not None and saved.latest() < 120
  saved.close()
  assert 'pid' in (tmp_path / 'killed/.lock').read_text()  # the kernel released the lock
  resumed = run(*train(corpus_file, tmp_path / 'killed', *LONG))
  assert resumed.returncode == 0, resumed.stderr
  assert 'from step' in resumed.stdout
  (step, bits), (step_alone, bits_alone) = (final_bits(d) for d in (tmp_path / 'killed', alone))
  assert step == step_alone == 120
  assert bits == bits_alone
  # Resuming cut metrics.jsonl back to the checkpoint: each logged step has one line.
  lines = metrics(tmp_path / 'killed')
  assert lines == metrics(alone) and len([x for x in lines if 'loss' in x]) == 24
  digests = [d for x in lines for d in x.get('batch_digests', ())]
  assert len(set(digests)) == len(digests) == 120


def test_sigterm_saves_a_checkpoint_and_exits_with_75(tmp_path, corpus_file):
  process = subprocess.Popen(**command(*train(corpus_file, tmp_path / 'run', *LONGER)))
  wait_for_step(tmp_path / 'run', 60)
  process.send_signal(signal.SIGTERM)
  _, err = process.communicate(timeout=200)
  assert process.returncode == 75 and 'stopped by SIGTERM after step' in err, err
  step = int(err.split('after step ')[1].split()[0])
  saved = checkpoint.Checkpoints(epath.Path(tmp_path / 'run'), 3)
  assert saved.latest() == step
  saved.close()


@pytest.mark.medium
def test_sigterm_saves_a_checkpoint_after_stdout_is_closed(tmp_path, corpus_file):
  """In `main | tee log`, tee gets the same signal and ends first."""
  arguments = command(*train(corpus_file, tmp_path / 'run', *LONGER, '--config.log_every=1'))
  process = subprocess.Popen(**arguments | {'stdout': subprocess.PIPE})
  next(line for line in process.stdout if line.startswith('step '))
  process.stdout.close()
  wait_for_step(tmp_path / 'run', 60)
  process.send_signal(signal.SIGTERM)
  err = process.stderr.read()
  assert process.wait(timeout=200) == 75 and 'stopped by SIGTERM after step' in err, err
  assert max(integrity.steps(epath.Path(tmp_path / 'run/checkpoints'))) >= 60


@pytest.mark.medium
def test_ctrl_c_names_the_newest_checkpoint(tmp_path, corpus_file):
  process = subprocess.Popen(**command(*train(corpus_file, tmp_path / 'run', *LONGER)))
  wait_for_step(tmp_path / 'run', 60)
  process.send_signal(signal.SIGINT)
  _, err = process.communicate(timeout=200)
  newest = max(integrity.steps(epath.Path(tmp_path / 'run/checkpoints')))
  assert (process.returncode, err) == (
      130, f'bert_jax: interrupted: the newest checkpoint is at step {newest}, run the same '
           'command to resume\n')


@pytest.mark.parametrize('flag, message', [
    ('--config.batch_siz=8', 'did you mean --config.batch_size?'),
    ('--config.learning_rate=1', 'did you mean --config.optimizer.learning_rate?'),
    ('--config.optimiser.b1=0.5', 'did you mean --config.optimizer.b1?'),
    ('--config.batch_size=many', 'many'),
    ('--config.train_steps=1.5', '1.5'),
    ('--config.max_len=128', 'above model.max_positions=64'),
    ('--config.data.vocab=/nowhere/vocab.txt', '/nowhere/vocab.txt'),
    ('--cnofig=x', 'cnofig'),
    ('stray', "unexpected argument 'stray'"),
])
def test_a_wrong_flag_prints_one_line_and_exits_with_2(run_typed, tmp_path, corpus_file, flag,
                                                       message):
  done = run_typed(*train(corpus_file, tmp_path / 'run', flag))
  assert_mistake(done, message)
  assert not (tmp_path / 'run/checkpoints').exists()


def test_main_needs_a_config_and_a_workdir(run_typed, tmp_path):
  assert_mistake(run_typed('main'), 'give both --config')
  done = run_typed('main', '--config=configs/nowhere.py', '--workdir=x')
  assert_mistake(done, 'configs/nowhere.py')


@pytest.fixture(scope='module')
def workdir(run_typed, tmp_path_factory, corpus_file):
  folder = tmp_path_factory.mktemp('predict') / 'run'
  done = run_typed(*train(corpus_file, folder))
  assert done.returncode == 0, done.stderr
  return folder


@pytest.mark.medium
def test_predict_gives_the_answers_of_the_python_interface(run_typed, workdir, tmp_path):
  def predict(task, text):
    done = run_typed('predict', f'--task={task}', f'--model={workdir}', input=text)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]

  bert = bert_jax.from_pretrained(str(workdir))
  answers = predict('fill_mask', '{"text": "The [MASK] runs."}\n\n{"text": "A [MASK]."}\n')
  assert len(answers) == 2
  assert answers[0]['masks'][0]['candidates'][0]['token'] == (
      bert.fill_mask('The [MASK] runs.')[0]['candidates'][0]['token'])
  answers = predict('next_sentence', '{"text": "A tree.", "text_pair": "The king."}')
  assert answers[0]['is_next'] == pytest.approx(bert.next_sentence([('A tree.', 'The king.')])[0])
  answers = predict('score', '{"text": "The king runs."}')
  assert answers[0]['pseudo_perplexity'] == pytest.approx(
      bert.score('The king runs.')['pseudo_perplexity'], rel=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize('text, message', [
    ('', 'holds no example'),
    ('{"text": "[MASK]"}\nnot json\n', 'line 2: not JSON'),
    ('{"txt": "[MASK]"}\n', "line 1: needs a JSON object with the text 'text'"),
    ('{"text": 3}\n', 'line 1: needs'),
    ('[1]\n', 'line 1: needs'),
    ('{"text": "no mask"}\n', 'line 1: no [MASK]'),
])
def test_predict_on_wrong_input_leaves_the_output_alone(run_typed, workdir, tmp_path, text,
                                                        message):
  (tmp_path / 'in.jsonl').write_text(text)
  (tmp_path / 'out.jsonl').write_text('before')
  done = run_typed('predict', '--task=fill_mask', f'--model={workdir}',
                   f'--input={tmp_path}/in.jsonl', f'--output={tmp_path}/out.jsonl', '--strict',
                   '--overwrite')
  assert_mistake(done, message)
  assert (tmp_path / 'out.jsonl').read_text() == 'before'
  assert sorted(p.name for p in tmp_path.iterdir()) == ['in.jsonl', 'out.jsonl']


def test_predict_needs_a_task_and_a_model(run_typed, workdir, tmp_path):
  done = run_typed('predict', '--task=translate', '--model=x')
  assert_mistake(done, 'next_sentence, score, embed')
  assert_mistake(run_typed('predict', '--task=score'), 'give --model')
  assert_mistake(run_typed('predict', '--task=score', f'--model={tmp_path}'), 'holds no model')


@pytest.mark.slow
def test_a_run_resumes_after_a_full_disk(tmp_path, corpus_file):
  disk = tmp_path / 'disk'
  disk.mkdir()
  mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=1500k', 'tmpfs', str(disk)],
                           capture_output=True)
  if mounted.returncode:
    pytest.skip('needs the right to mount a tmpfs')
  try:
    flags = ('--config.checkpoint_every=1', '--config.keep_checkpoints=12')
    done = run(*train(corpus_file, disk / 'run', *flags))
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert len(done.stderr.splitlines()) == 1 and 'the disk is full' in done.stderr, done.stderr
    step, _ = final_bits(disk / 'run')  # the last complete checkpoint can be read
    assert 1 <= step < 12
    subprocess.run(['mount', '-o', 'remount,size=20m', str(disk)], check=True)
    assert run(*train(corpus_file, disk / 'run', *flags)).returncode == 0  # the run resumes
  finally:
    subprocess.run(['umount', str(disk)])


def test_predict_ends_quietly_when_its_output_is_closed(tmp_path):
  """As in `predict | head -1`: no traceback, and the status of SIGPIPE."""
  folder = made_tasks.model(tmp_path / 'model')
  (tmp_path / 'in.jsonl').write_text(3000 * '{"text": "w1"}\n')
  with subprocess.Popen(**command('predict', '--task=embed', f'--model={folder}',
                                  f'--input={tmp_path}/in.jsonl')) as process:
    assert process.stdout.readline().startswith('{"embedding": ')
    process.stdout.close()
    assert process.wait() == 141
    assert 'Traceback' not in process.stderr.read()
