"""How a step scales with devices: simulated ones here, and chips by the TPU compiler.

  python -m benchmarks.scaling

Simulated devices share the machine's cores, so the same rows on 1, 2, 4 and 8 of them
would take the same time if splitting cost nothing. Each chip has --rows rows. The network
time of the first slice of each generation does not count. The times of chips are rooflines
(`bert_jax.plan`). In the best case the network time overlaps with computation, in the
worst case it comes after it. No TPU is needed.
"""

import json
import subprocess
import sys
import tempfile

from absl import app, flags
from etils import epath

from benchmarks import turns
from bert_jax.parallel import topology
from bert_jax.runtime import console

_CONFIG = flags.DEFINE_string('config', 'configs/large.py', 'What the chips train.')
_TOPOLOGIES = flags.DEFINE_list(
    'topologies', ['v5e:1x1', 'v5e:2x2', 'v5e:4x4', 'v5e:8x8', 'v5e:16x16', 'v5p:2x2x1',
                   'v5p:8x8x16'], 'TPU slices, the smallest of each generation first.')
_ROWS = flags.DEFINE_integer('rows', 16, 'Rows on each chip.')
_LENGTH = flags.DEFINE_integer('length', 512, 'Tokens in a row.')
_ROUNDS = flags.DEFINE_integer('rounds', 5, 'Turns of each number of simulated devices.')
_FAKE = (1, 2, 4, 8)


def _fake(folder: epath.Path) -> list[list[str]]:
  """Times steps of tiny, with 32 rows of 128 of the built-in text, in turns."""
  run = folder / 'run.json'
  run.write_text(json.dumps({'size': 'tiny', 'workdir': str(folder), 'config': {
      'phases': (), 'max_len': 128, 'batch_size': 32, 'train_steps': 100_000,
      'model.vocab_size': 8192}}))
  command = [sys.executable, '-m', 'benchmarks.train_steps', f'--run={run}']
  sides = [turns.Side(command, 1, JAX_PLATFORMS='cpu', JAX_NUM_CPU_DEVICES=str(n)).ready()
           for n in _FAKE]
  for _ in range(_ROUNDS.value):
    for side in sides:
      side.run(10)
  for side in sides:
    side.close()
  return [['simulated devices', 'ms per step', 'relative to one']] + [
      [str(n), f'{1e3 * side.median:.0f}', f'{side.median / sides[0].median:.2f}']
      for n, side in zip(_FAKE, sides)]


def _plan(name: str, chips: int, folder: epath.Path) -> dict:
  """Returns the estimate of a step."""
  out = folder / 'plan.json'
  subprocess.run(
      [sys.executable, '-m', 'bert_jax.plan', f'--config={_CONFIG.value}', f'--topology={name}',
       '--config.phases=()', f'--config.max_len={_LENGTH.value}', '--config.train_steps=1000',
       f'--config.batch_size={_ROWS.value * chips}', f'--out={out}', '--overwrite'],
      check=True, stdout=subprocess.DEVNULL)
  return json.loads(out.read_text())[name]['phases'][0]


def _chips(folder: epath.Path) -> list[list[str]]:
  rows, alone = [['slice', 'chips', 'ms a step', 'network, ms', 'worst case, ms', 'MFU',
                  'efficiency at best', 'at worst']], {}
  for name in _TOPOLOGIES.value:
    plan = _plan(name, len(topology.get(name)), folder)
    seconds = plan['seconds']
    busy = max(seconds['compute'], seconds['memory'])
    first = alone.setdefault(name.partition(':')[0], busy)
    rows.append([name, str(plan['chips']), f'{1e3 * plan["step_seconds"]:.1f}',
                 f'{1e3 * seconds["network"]:.1f}',
                 f'{1e3 * (busy + seconds["network"]):.1f}', f'{plan["mfu"]:.1%}',
                 f'{first / plan["step_seconds"]:.1%}',
                 f'{first / (busy + seconds["network"]):.1%}'])
    print(rows[-1], file=sys.stderr, flush=True)
  return rows


def main(_):
  """Prints two tables."""
  with tempfile.TemporaryDirectory() as folder:
    print(console.markdown_table(_fake(epath.Path(folder))) + '\n', flush=True)
    print(console.markdown_table(_chips(epath.Path(folder))))


if __name__ == '__main__':
  app.run(main)
