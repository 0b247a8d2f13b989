"""Trains a model: resolves the config, resumes the run in the workdir, and trains."""

from collections.abc import Iterator, Mapping
import functools
import hashlib
import importlib.metadata
import json
import pathlib
import secrets
import shlex
import sys
import time
from typing import Any

from etils import epath
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict, FrozenConfigDict

from bert_jax import config as config_lib
from bert_jax.config_fields import Field
from bert_jax.data import loader
from bert_jax.errors import require
from bert_jax.model import attention_kernels
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.parallel import sharding
from bert_jax.runs import drift, finetune, frozen_base, initial, resolve
from bert_jax.runtime import (
  console,
  host,
  lock,
  platforms,
  pool,
  processes,
  sealed,
  storage,
)
from bert_jax.training import checkpoint, integrity, loop
from bert_jax.training import state as state_lib
from bert_jax.training.job import Job

_SHARED_SECONDS = 10
# Without a run.json, these files belong to another program or to a model.
_FOREIGN = ('metrics.jsonl', 'config.json', 'bert.json', 'modules.json',
            'bert_config.json')
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint')


@pool.without_main_module()
def run(config: ConfigDict, workdir: str, given: Mapping[str, Any] = {}):
  """Trains the model of `config` in `workdir`, or resumes the run there.

  Args:
    config: the config, which is not modified.
    workdir: a folder, local or gs://.
    given: the fields of the command line, with their values in the config file; each must
      have an effect.

  Raises:
    UserError: a mistake in the config, the data or the workdir.
  """
  require(bool(workdir), '--workdir is empty: give the folder of the run')
  storage.check('--workdir', workdir)
  workdir = epath.Path(workdir).expanduser()
  asked = resolve.checked(config, given)
  config = asked.config
  on_cpu = config.platform == 'cpu' or (
      config.platform == 'auto' and not host.has_accelerator())
  # This must precede the threads of JAX, so JAX cannot yet say which platform it uses.
  if on_cpu:
    host.keep_freed_memory()
  with processes.together(config.platform):
    platforms.select_platform(config.platform)
    platforms.keep_compiled()
    _agree(config, workdir)
    with lock.held(workdir):
      try:
        config = _train(asked, workdir)
      except KeyboardInterrupt as e:
        steps = integrity.steps(workdir / 'checkpoints')
        raise KeyboardInterrupt(
            f'the newest checkpoint is at step {max(steps)}, run the same command to '
            'resume' if steps else
            f'{workdir} has no checkpoint yet, the same command starts over') from e
      if config.task != 'pretrain':
        finetune.finish(config, workdir)


def _agree(config: FrozenConfigDict, workdir: epath.Path):
  """Raises UserError if the processes of the run differ in config, versions or code."""
  if jax.process_count() == 1:
    return
  # Different programs would hang in the first collective, without an error.
  source = hashlib.blake2b(digest_size=8)
  for path in sorted(pathlib.Path(__file__).parents[1].rglob('*.py')):
    source.update(path.read_bytes())
  # One field per line, so that the message can show the line that differs.
  processes.agree('version', json.dumps(
      _versions() | {'bert_jax': source.hexdigest()}, indent=1))
  processes.agree('config', json.dumps(
      {'workdir': str(workdir), **config.to_dict()}, indent=1, default=str))


def _require_shared(workdir: epath.Path):
  """Raises UserError if hosts have different folders of this name, as on their own disks.

  Each process would save its part of a checkpoint where the others cannot read it.
  """
  if jax.process_count() == 1:
    return
  token, content = workdir / '.shared', processes.from_first('token', secrets.token_hex(8))
  if not jax.process_index():
    token.write_text(content)
  processes.barrier()
  is_shared = False
  for _ in range(_SHARED_SECONDS):  # a network disk may show a new file late
    is_shared = token.exists() and token.read_text() == content
    if is_shared:
      break
    time.sleep(1)
  missing = [i for i, lacks in enumerate(processes.gathered(not is_shared)) if lacks]
  if not jax.process_index():
    token.unlink()
  processes.barrier()  # the others would list the token as a file of the run
  require(not missing,
          f'--workdir={workdir} is another folder on the host of process '
          f'{", ".join(map(str, missing))} than on the first host: give a folder on a shared '
          'disk, or a bucket')


def _versions() -> dict[str, str]:
  return {name: importlib.metadata.version(name) for name in _PACKAGES}


def _train(asked: resolve.Asked, path: epath.Path) -> FrozenConfigDict:
  """Resolves the config and trains; all processes call this. Returns the final config."""
  mesh = mesh_lib.make_mesh(**asked.config.mesh)
  storage.make_writable(path, f'--workdir={path}', jax.process_index())
  _require_shared(path)
  workdir = storage.Folder(path, checkpoint.APART, jax.process_index())
  workdir.fetch()
  run_file = workdir.local / 'run.json'
  run_json = sealed.read(run_file) if run_file.exists() else {}
  earlier = run_json.get('config', {})
  # Another task could not even read the fields of this run.
  task = earlier.get('task', asked.config.task)
  require(task == asked.config.task,
          f'{path} holds a run with task={task} (now {asked.config.task}): that is '
          'another run, use another --workdir')
  has_started = bool(integrity.steps(path / 'checkpoints'))
  require(not has_started or run_json,
          f'{path} holds checkpoints but not the run.json with their config: restore the '
          'file, or use another --workdir')
  # A run would cut off the metrics of another program, or hide a model.
  foreign = [name for name in _FOREIGN if not run_json and (path / name).exists()]
  require(not foreign,
          f'--workdir={path} holds {", ".join(foreign)} and no run.json, so it is not the '
          'folder of a run: give a new folder')
  damaged = path / 'damaged'
  require(has_started or not storage.matching(damaged, 'checkpoints-*'),
          f'all checkpoints of {path} are damaged, see {damaged}: start over with another '
          '--workdir')
  config, job, notes = resolve.resolve(asked, mesh, workdir, earlier, has_started)

  # ---- An earlier run in this workdir --------------------------------------------------
  # Without a checkpoint the run starts over, and every field may differ: for example a
  # batch size that fits into the memory.
  if not (has_started or integrity.steps(path / 'best')):
    run_json = {}
  changes = _changes(workdir, run_json, config, job, mesh)
  checkpoints = _checkpoints(path, config, job)

  # ---- Training ------------------------------------------------------------------------
  if not jax.process_index():
    _write_run(workdir.local, config, job, run_json)
  # Before the first checkpoint: from then on a resumed run needs the base.
  frozen_base.save(job, path)
  workdir.push()
  console.print_summary(_summary(config, job, mesh, workdir))
  notes = [*notes, *job.notes, *loader.notes(config.data.loader_workers)]
  if not config.keep_best and (kept := integrity.steps(path / 'best')):
    notes.append(f'{path}/best still has step {kept[-1]}, which predict, convert and '
                 'evaluate use, and this run has no keep_best: delete the folder to use '
                 'the newest checkpoint')
  console.print_summary([*(('note', note) for note in notes),
                         *(('changed', str(change)) for change in changes)])

  loop.train(job, config, mesh, workdir, checkpoints,
             initial=functools.partial(_initial_params, config=config, job=job))
  return config


def _checkpoints(path: epath.Path, config: FrozenConfigDict,
                 job: Job) -> checkpoint.Checkpoints:
  """The checkpoints of the workdir; raises UserError if they belong to a longer run."""
  checkpoints = checkpoint.Checkpoints(
      path, keep=config.keep_checkpoints, best=config.keep_best,
      best_is_lowest=config.keep_best in job.data.lower_is_better,
      every=config.keep_every)
  newest = checkpoints.latest() or 0
  require(newest <= job.train_steps,
          f'{path} holds a run of {newest} steps, more than train_steps='
          f'{job.train_steps}: use another --workdir')
  return checkpoints


def _initial_params(params: Any, config: FrozenConfigDict, job: Job) -> Any:
  """Replaces random parameters with the initial parameters of the run."""
  if job.start:
    params = initial.from_model(params, job.start, config.init_from or config.teacher,
                                config.get('reinit_layers', 0))
  elif config.get('teacher'):
    console.print_summary([
        ('student', 'starts from random values: the teacher has another kind or size')])
  if config.embedding_init:
    params = initial.from_word_vectors(params, config.embedding_init, job.tokenizer)
  return params


def _changes(workdir: storage.Folder, run_json: Mapping[str, Any],
             config: FrozenConfigDict, job: Job, mesh: Mesh) -> list[drift.Change]:
  """The fields that differ from the run in the workdir.

  Raises UserError if they make it another run.
  """
  if not run_json:
    return []
  require(run_json['records'] == job.data_digest,
          f'{workdir} was trained on other rows (their digest was '
          f'{run_json["records"]}, now it is {job.data_digest}): use another --workdir')
  differences = drift.changes(run_json['config'], config.to_dict())
  table = config_lib.fields(config.task)
  of_optimizer = [x.name for x in differences if x.name.startswith('optimizer.')]
  if of_optimizer:
    _, abstract, _ = state_lib.make_programs(job.task, config, mesh, job.train_steps)
    # Another optimizer may have moments that the checkpoints lack: no flag allows it.
    if not checkpoint.fits(workdir.path, abstract):
      table = {**table, **dict.fromkeys(of_optimizer, Field(None))}
  return drift.check(str(workdir), differences, table, config.allow_schedule_change)


def _write_run(workdir: epath.Path, config: FrozenConfigDict, job: Job,
               run_json: Mapping[str, Any]):
  """Writes run.json and the tokenizer, which `predict` needs besides a checkpoint."""
  tokenizer = workdir / 'tokenizer'
  if not tokenizer.exists() or run_json.get('tokenizer') != sealed.digests(tokenizer):
    job.tokenizer.save(tokenizer)
  command = shlex.join(['python', *sys.orig_argv[1:]])
  content = {'command': command, 'config': config.to_dict(), 'records': job.data_digest,
             'versions': _versions(), 'tokenizer': sealed.digests(tokenizer), **job.facts}
  storage.write_whole(workdir / 'run.json',
                      json.dumps(sealed.seal(content), indent=2) + '\n')


def _summary(config: FrozenConfigDict, job: Job, mesh: Mesh,
             workdir: storage.Folder) -> Iterator[tuple[str, str]]:
  """Yields (name, value) lines about the run, to print before it starts."""
  c = job.task.model.config
  yield 'model', (f'{c.architecture}, {job.num_parameters:,} parameters: {c.num_layers} '
                  f'layers of {c.hidden_size}, {c.dtype}')
  if job.base:
    yield 'lora', job.lora_line
  yield 'mesh', (f'{mesh.size} {mesh.devices.flat[0].device_kind}: '
                 + ', '.join(f'{axis} {size}' for axis, size in mesh.shape.items())
                 + f'; sharding {config.sharding}')
  with sharding.in_context(mesh, config.sharding):
    paths = attention_kernels.describe(
        c, job.lengths, special=config_lib.special_rows(config))
  yield 'attention', paths
  yield from job.data.describe()
  yield 'steps', job.steps_line
  yield 'workdir', str(workdir)
  if workdir.local != workdir.path:
    yield 'kept here', str(workdir.local)
