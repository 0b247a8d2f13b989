"""Checkpoints are verified: a run names damaged ones, sets them aside and skips them."""

import errno
import json
import logging
import shutil

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bert_jax.errors import UserError
from bert_jax.training import checkpoint, integrity
from bert_jax.training.state import TrainState
from tests import conftest


def state_of(step: int, width: int = 64) -> TrainState:
  kernel = np.random.default_rng(step).normal(size=(16, width)).astype(np.float32)
  params = {'layer': {'kernel': jnp.asarray(kernel), 'bias': jnp.full(width, float(step))}}
  mesh = conftest.sub_mesh(8, 1)
  everything = TrainState(jnp.int32(step), params, optax.adam(1e-3).init(params), {})
  return jax.device_put(everything, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


def abstract_of(state: TrainState):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


@pytest.fixture
def workdir(tmp_path):
  """A workdir with checkpoints of steps 2, 4 and 6; step 4 is also the best."""
  saved = checkpoint.Checkpoints(epath.Path(tmp_path), 3, 'f1')
  for step, score in ((2, 0.5), (4, 0.9), (6, 0.7)):
    saved.offer(state_of(step).params, step, {'f1': score})
    saved.save(state_of(step), step)
  saved.close()
  return tmp_path


def restore(workdir):
  saved = checkpoint.Checkpoints(epath.Path(workdir), 3, 'f1')
  restored = saved.restore(abstract_of(state_of(1)))
  saved.close()
  return restored


def data_file(folder):
  """The file from which orbax reads small parameters; each process leaves another copy."""
  return next((folder / 'params/d').iterdir())


def flip(path, where: float = 0.5, bit: int = 0):
  content = bytearray(path.read_bytes())
  content[int(where * len(content))] ^= 1 << bit
  path.write_bytes(content)


def test_a_sound_checkpoint_is_restored(workdir):
  state, step = restore(workdir)
  assert step == 6
  jax.tree.map(np.testing.assert_array_equal, state, state_of(6))


DAMAGE = {
    'a flipped bit': (lambda d: flip(data_file(d / '6')), 'fingerprint|cannot be read'),
    'an empty file': (lambda d: data_file(d / '6').write_bytes(b''), 'cannot be read'),
    'a missing file': (lambda d: data_file(d / '6').unlink(), 'cannot be read'),
    'no moments': (lambda d: shutil.rmtree(d / '6/optimizer'), 'cannot be read'),
    'another description': (lambda d: flip(d / '6' / integrity.FINGERPRINTS / 'metadata'),
                            'does not match its checksum|cannot be read'),
    'no description': (lambda d: shutil.rmtree(d / '6' / integrity.FINGERPRINTS), 'cannot be read'),
    'an older one': (lambda d: (shutil.rmtree(d / '6'), shutil.copytree(d / '4', d / '6')),
                     'the checkpoint of step 4'),
    'older parameters': (
        lambda d: (shutil.rmtree(d / '6/params'), shutil.copytree(d / '4/params', d / '6/params')),
        'params/layer/bias does not have the fingerprint'),
}


@pytest.mark.parametrize('kind', DAMAGE)
def test_the_newest_sound_checkpoint_is_restored(workdir, kind, capsys):
  damage, reason = DAMAGE[kind]
  damage(workdir / 'checkpoints')
  state, step = restore(workdir)
  assert step == 4
  jax.tree.map(np.testing.assert_array_equal, state, state_of(4))
  output = ' '.join(capsys.readouterr().out.split())
  assert f'damaged {workdir}/checkpoints/6: ' in output
  assert f'it is in {workdir}/damaged/checkpoints-6 now' in output
  assert any(word in output for word in reason.split('|'))
  assert sorted(p.name for p in (workdir / 'checkpoints').iterdir()) == ['2', '4']
  assert (workdir / 'damaged/checkpoints-6').is_dir()


def test_a_workdir_without_a_sound_checkpoint_is_refused(workdir):
  for step in (2, 4, 6):
    flip(data_file(workdir / f'checkpoints/{step}'))
  with pytest.raises(UserError, match='no checkpoint of .* is sound, all are in .*/damaged'):
    restore(workdir)
  assert len(list((workdir / 'damaged').iterdir())) == 3


def test_two_damaged_checkpoints_of_one_step_are_both_set_aside(workdir):
  for name in ('checkpoints-6', 'checkpoints-6-2'):
    flip(data_file(workdir / 'checkpoints/6'))
    assert restore(workdir)[1] == 4
    assert (workdir / 'damaged' / name).is_dir()
    again = checkpoint.Checkpoints(epath.Path(workdir), 3)
    again.save(state_of(6), 6)
    again.close()


def test_a_checkpoint_of_another_model_is_refused_but_not_set_aside(workdir):
  saved = checkpoint.Checkpoints(epath.Path(workdir), 3)
  with pytest.raises(UserError, match=r'checkpoints/6 does not fit this config: params/layer/bias '
                                      r"is \['float32', \[64\]\] in the checkpoint, and .* \[32"):
    saved.restore(abstract_of(state_of(1, width=32)))
  assert saved.latest() == 6 and not (workdir / 'damaged').exists()
  saved.close()


@pytest.mark.parametrize('error', [PermissionError(13, 'no'), OSError(errno.ESTALE, 'stale')])
def test_an_unreachable_description_is_not_damage(tmp_path, monkeypatch, error):
  (tmp_path / '4').mkdir()

  def refuse(*_):
    raise UserError('cannot be read') from error

  monkeypatch.setattr(integrity.sealed, 'read', refuse)
  with pytest.raises(OSError) as raised:
    integrity.description(epath.Path(tmp_path / '4'))
  assert raised.value is error


def test_a_busy_storage_is_not_damage(workdir, monkeypatch):
  def busy(*args, **kwargs):
    raise ValueError('UNAVAILABLE: try again later')
  monkeypatch.setattr(integrity.ocp.StandardCheckpointHandler, 'restore', busy)
  with pytest.raises(ValueError, match='UNAVAILABLE'):
    restore(workdir)
  assert not (workdir / 'damaged').exists()


def test_a_damaged_best_checkpoint_makes_room_for_another(workdir):
  flip(data_file(workdir / 'best/4'))
  assert restore(workdir)[1] == 6
  assert (workdir / 'damaged/best-4').is_dir() and not list((workdir / 'best').iterdir())
  saved = checkpoint.Checkpoints(epath.Path(workdir), 3, 'f1')
  saved.offer(state_of(8).params, 8, {'f1': 0.1})  # best/ is empty, so any score is the best
  saved.close()
  assert [p.name for p in (workdir / 'best').iterdir()] == ['8']


def test_unfinished_checkpoints_of_a_kill_are_deleted_without_a_warning(workdir, caplog):
  """A kill leaves a folder, and the resumed run may or may not write the same step again."""
  unfinished = [workdir / f'{folder}/{step}.orbax-checkpoint-tmp'
                for folder, step in (('checkpoints', 7), ('checkpoints', 8), ('best', 8))]
  for folder in unfinished:
    (folder / 'params').mkdir(parents=True)
    (folder / 'params/half').write_bytes(b'half')
  saved = checkpoint.Checkpoints(epath.Path(workdir), 3, 'f1')
  saved.save(state_of(8), 8)
  saved.offer(state_of(8).params, 8, {'f1': 1.0})
  saved.close()
  assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == []
  assert not any(folder.exists() for folder in unfinished)
  assert integrity.steps(epath.Path(workdir / 'checkpoints')) == [4, 6, 8]
  assert integrity.steps(epath.Path(workdir / 'best')) == [8]


def offered(workdir, step, score, metric='f1', judged_on=''):
  """The steps in best/ after a run offers this score of f1, loss or perplexity."""
  saved = checkpoint.Checkpoints(
      epath.Path(workdir), 3, metric, best_is_lowest=metric in ('loss', 'perplexity'))
  saved.offer(state_of(step).params, step, {metric: score}, judged_on)
  saved.close()
  return [int(p.name) for p in (workdir / 'best').iterdir()]


def test_a_repeated_step_updates_its_score(workdir):
  assert offered(workdir, 4, 0.9) == [4]
  assert offered(workdir, 4, 0.91) == [4]  # by rounding on another mesh
  assert integrity.description(epath.Path(workdir / 'best/4'))['score'] == 0.91
  assert offered(workdir, 2, 0.91) == [4] and offered(workdir, 2, 0.92) == [2]


def test_the_lowest_perplexity_is_kept(workdir):
  """Whether low is good comes from the task, not from a name that ends with loss."""
  assert offered(workdir, 8, 20.0, 'perplexity') == [8]  # it replaces an f1
  assert offered(workdir, 9, 12.5, 'perplexity') == [9]
  assert offered(workdir, 10, 13.0, 'perplexity') == [9]
  assert integrity.description(epath.Path(workdir / 'best/9'))['best_is_lowest'] is True


def test_scores_of_another_metric_or_other_rows_are_not_compared(workdir, capsys):
  assert offered(workdir, 8, -1.5, 'loss') == [8]
  assert offered(workdir, 9, -1.4, 'loss') == [8] and offered(workdir, 10, -1.6, 'loss') == [10]
  assert offered(workdir, 11, -1.0, 'loss', judged_on='rows of 16') == [11]
  assert offered(workdir, 12, -0.9, 'loss', judged_on='rows of 32') == [12]
  assert offered(workdir, 13, -0.8, 'loss', judged_on='rows of 32') == [12]
  assert capsys.readouterr().out.splitlines() == [
      f'  best            {line}: these are not compared' for line in (
          'step 8 (loss) replaces step 4 (f1)',
          'step 11 (loss on rows of 16) replaces step 10 (loss)',
          'step 12 (loss on rows of 32) replaces step 11 (loss on rows of 16)')]


def test_a_best_checkpoint_with_a_damaged_description_is_replaced(workdir):
  flip(workdir / 'best/4/fingerprints/metadata')
  assert offered(workdir, 8, 0.1) == [8]
  assert (workdir / 'damaged/best-4').is_dir()


def test_orbax_does_not_check_for_preemption(workdir, monkeypatch):
  monkeypatch.setattr(checkpoint.ocp.utils, 'reached_preemption', lambda step: 1 / 0)
  saved = checkpoint.Checkpoints(epath.Path(workdir), 3, 'f1')
  saved.offer(state_of(8).params, 8, {'f1': 0.95})
  saved.save(state_of(8), 8)
  saved.close()
  assert integrity.steps(epath.Path(workdir / 'checkpoints'))[-1] == 8


def test_a_load_uses_an_older_checkpoint_only_with_allow_older(workdir, capsys):
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state_of(1).params)
  folder = epath.Path(workdir)
  assert checkpoint.restore_params(folder, abstract)[1] == 4  # the best
  assert checkpoint.restore_params(folder, abstract, 2)[1] == 2
  with pytest.raises(UserError, match='no checkpoint of step 3, but best/4, checkpoints/6, '
                                      'checkpoints/4, checkpoints/2'):
    checkpoint.restore_params(folder, abstract, 3)
  flip(data_file(workdir / 'best/4'))
  with pytest.raises(UserError, match=f'{workdir}/best/4 is damaged: .*; the next sound one is '
                                      f'{workdir}/checkpoints/6: run main again.* --step=6 or '
                                      '--allow_older'):
    checkpoint.restore_params(folder, abstract)
  assert checkpoint.restore_params(folder, abstract, 4)[1] == 4  # exists twice
  params, step = checkpoint.restore_params(folder, abstract, allow_older=True)
  assert step == 6
  jax.tree.map(np.testing.assert_array_equal, params, state_of(6).params)
  assert 'best/4 is damaged: ' in (err := capsys.readouterr().err)
  assert err.endswith(f'; {workdir}/checkpoints/6 is used\n')
  flip(data_file(workdir / 'checkpoints/2'))
  with pytest.raises(UserError, match='no sound checkpoint of step 2: .*/2 is damaged: '):
    checkpoint.restore_params(folder, abstract, 2, allow_older=True)
  for step in (4, 6):
    flip(data_file(workdir / f'checkpoints/{step}'))
  with pytest.raises(UserError, match='no sound checkpoint: .*/4 is damaged: .*; .*/2 is damaged'):
    checkpoint.restore_params(folder, abstract, allow_older=True)
  assert not (workdir / 'damaged').exists()  # reading moves nothing


def test_a_load_misses_a_best_checkpoint_that_was_set_aside(workdir):
  """Otherwise the newest checkpoint would silently take its place."""
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state_of(1).params)
  flip(data_file(workdir / 'best/4'))
  assert restore(workdir)[1] == 6
  with pytest.raises(UserError, match='damaged/best-4 is damaged; the next sound one is .*/6'):
    checkpoint.restore_params(epath.Path(workdir), abstract)
  assert checkpoint.restore_params(epath.Path(workdir), abstract, allow_older=True)[1] == 6
  saved = checkpoint.Checkpoints(epath.Path(workdir), 3, 'f1')
  saved.offer(state_of(8).params, 8, {'f1': 0.1})
  saved.close()
  assert checkpoint.restore_params(epath.Path(workdir), abstract)[1] == 8


def test_a_load_continues_if_a_run_deletes_the_checkpoint(workdir, monkeypatch):
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state_of(1).params)
  shutil.rmtree(workdir / 'best')
  read = integrity.read

  def late(folder, shapes):
    if folder.name == '6':
      saved = checkpoint.Checkpoints(epath.Path(workdir), 1)
      saved.save(state_of(8), 8)
      saved.close()
    return read(folder, shapes)

  monkeypatch.setattr(integrity, 'read', late)
  params, step = checkpoint.restore_params(epath.Path(workdir), abstract)
  assert step == 8 and [p.name for p in (workdir / 'checkpoints').iterdir()] == ['8']
  jax.tree.map(np.testing.assert_array_equal, params, state_of(8).params)


def test_the_whole_of_a_checkpoint_is_checked_without_its_model(workdir):
  description = integrity.check(epath.Path(workdir / 'checkpoints/6'))
  assert {item: len(arrays) for item, arrays in description['arrays'].items()} == {
      'params': 2, 'optimizer': 6}
  flip(next((workdir / 'checkpoints/6/optimizer/d').iterdir()))
  with pytest.raises(integrity.Damaged, match='optimizer'):
    integrity.check(epath.Path(workdir / 'checkpoints/6'))


def test_replicas_share_the_writing_of_large_arrays_only(tmp_path, monkeypatch):
  shares, slice_in_dim = [], jax.lax.slice_in_dim
  monkeypatch.setattr(jax.lax, 'slice_in_dim', lambda x, **where: shares.append(
      (where['limit_index'] - where['start_index']) * x.nbytes // x.shape[where['axis']]
  ) or slice_in_dim(x, **where))
  saved = checkpoint.Checkpoints(epath.Path(tmp_path), 1)
  state = state_of(1, width=1 << 17)  # the kernel and its two moments have 8 MiB, the biases 0.5
  saved.save(state, 1)
  saved.wait()
  assert shares == [1 << 20] * 8 * 3
  jax.tree.map(np.testing.assert_array_equal, saved.restore(abstract_of(state))[0], state)
  saved.close()


def test_every_nth_checkpoint_is_kept(tmp_path):
  saved = checkpoint.Checkpoints(epath.Path(tmp_path), 2, every=4)
  for step in range(1, 11):
    saved.save(state_of(step), step)
  saved.close()
  assert sorted(int(p.name) for p in (tmp_path / 'checkpoints').iterdir()) == [4, 8, 9, 10]


def test_a_changed_description_is_damage(workdir):
  """A changed shape is damage, not another model."""
  path = workdir / 'checkpoints/6' / integrity.FINGERPRINTS / 'metadata'
  content = json.loads(path.read_text())
  content['arrays']['params']['layer/bias'][1] = [65]
  path.write_text(json.dumps(content))
  with pytest.raises(integrity.Damaged, match='does not match its checksum'):
    integrity.description(epath.Path(workdir / 'checkpoints/6'))


def test_an_error_waits_for_the_save_in_progress(tmp_path):
  saved = checkpoint.Checkpoints(epath.Path(tmp_path), 3)
  saved.save(state_of(2), 2)
  saved.settle(RuntimeError)
  assert integrity.steps(epath.Path(tmp_path / 'checkpoints')) == [2]
  saved.close()
