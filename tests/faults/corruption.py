"""Damages checkpoints in a random place, then restores them."""

import contextlib
import functools
import io
import pathlib
import random
import shutil
import tempfile

from etils import epath
import jax

from bert_jax.errors import UserError
from bert_jax.model.bert_config import BertConfig
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.training import checkpoint, fingerprint
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import state as state_lib
from tests.faults.runs import Bench, Trial
from tests.training.test_state import make_task

STEPS = (10, 20, 30)
WAYS = ('flip', 'flip', 'flip', 'truncate', 'empty', 'remove', 'swap')


@functools.cache
def _make_checkpoints(folder: pathlib.Path):
  """Checkpoints of three states; the shapes; the fingerprints of each."""
  config = BertConfig(vocab_size=200, hidden_size=32, num_layers=2, num_heads=4,
                      intermediate_size=64, max_positions=32)
  optimizer = optimizer_lib.make_optimizer(
      optimizer_lib.OptimizerConfig(learning_rate=1e-3, warmup_steps=0), 40)
  mesh = mesh_lib.make_mesh(1, -1, 1)
  init, abstract = state_lib.make_init(make_task(config), optimizer, mesh, 'fsdp')
  shutil.rmtree(folder, ignore_errors=True)
  saved, known = checkpoint.Checkpoints(epath.Path(folder), 3), {}
  for step in STEPS:
    state = init(state_lib.root_key(step))
    state = state._replace(
        step=state.step + step, opt_state=jax.tree.map(
            lambda x: x + 1 if x.dtype == 'int32' else jax.random.normal(
                jax.random.key(step), x.shape), state.opt_state))
    state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, abstract)
    saved.save(state, step)
    known[step] = fingerprint.of(state)
  saved.close()
  return abstract, known


def _damage(rng: random.Random, folder: pathlib.Path, way: str) -> str:
  files = [path for path in sorted(folder.rglob('*')) if path.is_file() and path.stat().st_size]
  # Half of the time by size, as a disk damages files, and else every file alike.
  weights = [path.stat().st_size for path in files] if rng.random() < 0.5 else None
  path = rng.choices(files, weights)[0]
  content = bytearray(path.read_bytes())
  if way == 'flip':
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
  elif way == 'truncate':
    del content[rng.randrange(len(content)):]
  elif way == 'empty':
    content.clear()
  elif way == 'swap':
    other = folder.parent / str(rng.choice(STEPS[:-1]))
    same = other / path.relative_to(folder)
    # Data files have random names: take one of the same folder, by size.
    candidates = [same] if same.exists() else sorted(
        (p for p in same.parent.iterdir() if p.is_file()) if same.parent.exists() else (),
        key=lambda p: abs(p.stat().st_size - len(content)))[:1]
    if not candidates:
      return ''
    content = bytearray(candidates[0].read_bytes())
  path.unlink() if way == 'remove' else path.write_bytes(content)
  return str(path.relative_to(folder))


def corrupt(bench: Bench, number: int) -> Trial:
  """Damages the newest checkpoint: restoring detects it or gives the same bits."""
  rng, way = random.Random(f'corrupt {number}'), WAYS[number % len(WAYS)]
  abstract, known = _make_checkpoints(bench.folder / 'to corrupt')
  with tempfile.TemporaryDirectory() as temporary:
    workdir = pathlib.Path(temporary) / 'run'
    shutil.copytree(bench.folder / 'to corrupt', workdir)
    where = _damage(rng, workdir / f'checkpoints/{STEPS[-1]}', way)
    output = io.StringIO()
    try:
      with contextlib.redirect_stdout(output), contextlib.closing(
          checkpoint.Checkpoints(epath.Path(workdir), 3)) as saved:
        state, step = saved.restore(abstract)
      fingerprints = fingerprint.of(state)
    except UserError as e:
      return Trial('refused', False, f'{way} {where}: {e}')
    except Exception as e:  # anything else is a finding
      return Trial('crashed', False, f'{way} {where}: {type(e).__name__}: {e}'[:300])
    if fingerprints != known[step]:
      return Trial('WRONG PARAMETERS', False, f'{way} {where}')
    if step == STEPS[-1]:
      return Trial('harmless', True, f'{way} {where}')
    named = f'checkpoints/{STEPS[-1]}: ' in output.getvalue()
    aside = (workdir / f'damaged/checkpoints-{STEPS[-1]}').exists()
    return Trial('detected', step == STEPS[-2] and named and aside,
                 f'{way} {where}: {output.getvalue().split(": ", 1)[-1].strip()[:150]}')
