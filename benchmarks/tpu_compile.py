"""Compiles BERT-large's training step for a TPU, and compares it with transformers' Flax.

  python -m benchmarks.tpu_compile --peer_python=PEER/bin/python

No TPU is needed. PEER is an environment as described in `benchmarks/flax_bert_tpu.py`.
Both sides compile a step of 32 rows of 128 per chip, data parallel, in bfloat16 with
dropout 0.1. bert_jax is compiled unrolled with whole parameters, like the peer. It is
also compiled with the sharding of configs/large.py, unrolled and as a scan over layers,
which is its default. Both keep the matrix products for the backward pass. The step of
bert_jax also draws the masks, predicts only the masked positions, and trains on sentence
pairs. The compiler counts the FLOPs of a loop once, so the scan has no FLOPs here.
"""

import json
import runpy
import subprocess
from typing import Any

from absl import app, flags

from bert_jax import config as config_lib
from bert_jax import config_fields
from bert_jax.data.phases import Phase
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.parallel import topology
from bert_jax.planning import programs, traffic

_TOPOLOGY = flags.DEFINE_string('topology', 'v5e:4x4', 'TPU slice.')
_ROWS = flags.DEFINE_integer('rows', 32, 'Rows per chip.')
_LENGTH = flags.DEFINE_integer('length', 128, 'Tokens in a row.')
_PEER = flags.DEFINE_string('peer_python', None, "The peer's Python; none = only bert_jax.")


def _ours(chips: int, overrides: dict[str, Any]) -> dict[str, Any]:
  config = runpy.run_path('configs/large.py')['get_config']()
  config.update_from_flattened_dict(overrides)
  mesh = mesh_lib.make_mesh(devices=topology.get(_TOPOLOGY.value))
  config = config_fields.changed(config, config_lib.dtype_on(config, mesh))
  work = programs.pretraining(config, Phase(1, _LENGTH.value, _ROWS.value * chips))
  figures = programs.train_step(work, config, mesh)
  moved = traffic.total(traffic.operations(figures.program.as_text()))
  return {'seconds': figures.seconds, 'flops': figures.flops, 'traffic': moved,
          'temporaries': figures.memory['temporaries']}


def _peers(chips: int) -> dict[str, Any]:
  done = subprocess.run(
      [_PEER.value, '-m', 'benchmarks.flax_bert_tpu', f'--topology={_TOPOLOGY.value}',
       f'--rows={_ROWS.value * chips}', f'--length={_LENGTH.value}'], check=True, text=True,
      stdout=subprocess.PIPE)
  return json.loads(done.stdout.strip().rpartition('\n')[2])


def _cell(figures: dict[str, Any], peer: dict[str, Any] | None, key: str, unit: float,
          form: str) -> str:
  """Formats a figure and its ratio to the peer."""
  if figures[key] is None:
    return '-'
  ratio = f' ({figures[key] / peer[key]:.2f})' if peer and figures is not peer else ''
  return f'{figures[key] / unit:{form}}{ratio}'


def main(_):
  """Compiles all variants and prints a table with ratios to the peer."""
  chips = len(topology.get(_TOPOLOGY.value))
  sides = {
      "transformers' Flax BERT": (lambda: _peers(chips)) if _PEER.value else None,
      'bert_jax, unrolled': lambda: _ours(chips, {'model.scan_unroll': 24, 'sharding': 'dp'}),
      'bert_jax, configs/large.py unrolled': lambda: _ours(chips, {'model.scan_unroll': 24}),
      'bert_jax, configs/large.py': lambda: _ours(chips, {}) | {'flops': None},
  }
  print('| | seconds to compile | TFLOP | GB of memory traffic | GiB of temporaries |\n'
        '| --- | --- | --- | --- | --- |', flush=True)
  peer = None
  for name, side in sides.items():
    if not side:
      continue
    figures = side()
    peer = peer or (figures if _PEER.value else None)
    cells = [_cell(figures, peer, *column) for column in (
        ('seconds', 1, '.0f'), ('flops', 1e12, '.2f'), ('traffic', 1e9, '.1f'),
        ('temporaries', 2**30, '.2f'))]
    print(f'| {name} | {" | ".join(cells)} |', flush=True)


if __name__ == '__main__':
  app.run(main)
