"""Pretraining steps in turns with the peers, compared with the limit of the machine.

  python -m benchmarks.train --text='corpus/*.txt.gz' --vocab=vocab.txt --workdir=runs/train \
      --flax_python=FLAX/bin/python --keras_python=KERAS/bin/python

All sides train on masked LM and sentence pairs (KerasHub: masked LM only) of the same
text, with AdamW and dropout 0.1. bert_jax packs its rows and masks them on the device.
The peers get one pair per row, masked in advance, and compute logits at all positions, as
their users run them (KerasHub and torch_packed: at the masked positions). torch_full and
torch_bf16_full do the same on bert_jax's own rows, with the same ids and labels, as if a
row were one pair. These rows are full except for the last few positions, so the ratio
does not depend on padding. torch_packed uses these rows and keeps their pairs apart. Only
real tokens count, not padding. Each side is a separate process that waits while the
others run. On a GPU, all sides compile at once, and a turn is timed as a whole, because a
training loop does not wait for each step. The figures are medians of the steps, or turns,
of all rounds. Each round also measures the limits: a large matrix product and a large
copy. `benchmarks/peers.py` describes the environments of the peers. Appends to
WORKDIR/train.jsonl and prints a table. With --modules, WORKDIR/SIZE-LENGTH/SIDE.txt lists
the time of each module of bert_jax.
"""

import json
import os
import platform
import statistics
import sys
from typing import Any

from absl import app, flags
from etils import epath
import jax
import numpy as np

from benchmarks import limits, train_steps, turns
from bert_jax import config as config_lib
from bert_jax.model import architectures
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.runtime import host

_TEXT = flags.DEFINE_string('text', None, 'Glob of text files, or token records.', required=True)
_VOCAB = flags.DEFINE_string('vocab', '', 'vocab.txt of 30,522 entries; records have their own.')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for rows and figures.', required=True)
_SIZES = flags.DEFINE_list('sizes', ['tiny', 'base'], 'Models.')
_LENGTHS = flags.DEFINE_list('lengths', ['128'], 'Tokens in a row.')
_BATCH = flags.DEFINE_integer('batch', 8, 'Rows per step.')
_DTYPE = flags.DEFINE_string('dtype', 'float32', 'Of bert_jax: float32, bfloat16.')
_SIDES = flags.DEFINE_list('sides', ['torch', 'torch_full', 'torch_bf16', 'torch_bf16_full', 'flax',
                                     'keras'], 'Peers; also torch_compile, torch_packed, and '
                           'variants of bert_jax: scan, xla, cudnn, triton, deterministic, '
                           'deterministic_cublas.')
_ATTENTION_DROPOUT = flags.DEFINE_float('attention_dropout', 0.1, 'Of bert_jax and torch.')
_UNROLL = flags.DEFINE_integer('scan_unroll', 0, 'Layers in each iteration of the scan; 0 = all.')
_ROUNDS = flags.DEFINE_integer('rounds', 5, 'Turns of each side.')
_STEPS = flags.DEFINE_integer('steps', 4, 'Counted steps per turn.')
_MODULES = flags.DEFINE_bool('modules', False, 'Also list the time of modules.')
_PYTHONS = {
    'flax': flags.DEFINE_string('flax_python', None, 'With transformers 4.57.1, jax and flax.'),
    'keras': flags.DEFINE_string('keras_python', None, 'With keras-hub and jax.')}


# Fields of the variants of bert_jax. cuDNN computes no attention dropout. The side triton
# runs without it too, to compare the two.
_VARIANTS = {
    'bert_jax': {}, 'scan': {'model.scan_unroll': 1}, 'xla': {'model.attention': 'xla'},
    'triton': {'model.attention': 'triton', 'model.attention_dropout': 0.0},
    'cudnn': {'model.attention': 'cudnn', 'model.attention_dropout': 0.0},
    'deterministic': {}, 'deterministic_cublas': {}}
# Compiler flags of the variants that add in a fixed order.
_FLAGS = {'deterministic': '--xla_gpu_deterministic_ops=true',
          # The flag above also stops the tuning of Triton's products, so cuBLAS takes them.
          'deterministic_cublas':
              '--xla_gpu_deterministic_ops=true --xla_gpu_enable_triton_gemm=false'}


def _write_rows(job: Any, path: epath.Path) -> float:
  """Writes masked rows for the peers; returns the real tokens per step."""
  mask, batches, real_tokens = jax.jit(job.task.mask), [], 0
  for step in range(turns.BATCHES):
    rows = job.data.rows(step)
    masked, tokens = jax.device_get(mask(jax.random.key(step), rows)), rows.tokens
    labels = np.full(tokens.ids.shape, -100)
    np.put_along_axis(labels, np.where(masked.weights > 0, masked.positions, 0),
                      np.where(masked.weights > 0, masked.targets, -100), axis=1)
    real = tokens.text_ids > 0
    real_tokens += real.sum() / turns.BATCHES
    batches.append({
        'ids': masked.ids.astype(int), 'segments': tokens.type_ids.astype(int),
        'mask': real.astype(int), 'labels': labels, 'positions': tokens.positions.astype(int),
        'nsp': rows.labels[:, 0].astype(int), 'pairs': tokens.text_ids.astype(int),
        'cls': rows.starts.astype(int),
        'nsp_of_pairs': np.where(rows.pair_weights > 0, rows.labels, -100).astype(int)})
  np.savez(path, **{name: np.stack([batch[name] for batch in batches]) for name in batches[0]})
  return float(real_tokens)


def _start(size: str, length: int, workdir: epath.Path) -> dict[str, turns.Side]:
  """Starts all sides; on a GPU without waiting for their first steps."""
  fields = {
      'model.vocab_size': 30_522, 'model.dtype': _DTYPE.value, 'phases': (),
      'train_steps': 100_000, 'max_len': length, 'batch_size': _BATCH.value,
      'data.source': _TEXT.value, 'data.vocab': _VOCAB.value,
      'model.attention_dropout': _ATTENTION_DROPOUT.value}
  if _UNROLL.value:
    fields['model.scan_unroll'] = _UNROLL.value
  run = {'size': size, 'workdir': str(workdir), 'config': fields}
  rows, tokens = {}, {}
  for name, pack in (('packed', True), ('padded', False)):
    rows[name] = workdir / f'{name}.npz'
    tokens[name] = _write_rows(train_steps.make_job(run, pack, mesh_lib.make_mesh())[1], rows[name])
  layers, width = config_lib.SIZES[size]
  device = 'cpu' if jax.default_backend() == 'cpu' else 'cuda'
  sides = {}
  for side in ['bert_jax', *_SIDES.value]:
    env = {}
    if side in _VARIANTS:
      name, path = 'packed', workdir / f'{side}.json'
      path.write_text(json.dumps(run | {'config': fields | _VARIANTS[side]}))
      command = [sys.executable, '-m', 'benchmarks.train_steps', f'--run={path}']
      if _MODULES.value:
        command.append(f'--profile={workdir / side}.txt')
      if side in _FLAGS:
        env['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {_FLAGS[side]}'
    else:
      name = 'packed' if side.endswith(('_full', '_packed')) else 'padded'
      python = _PYTHONS[side].value if side in _PYTHONS else sys.executable
      command = [python, '-m', 'benchmarks.peers', f'--side={side}', f'--rows={rows[name]}',
                 f'--sizes={layers},{width},{width // 64}', f'--device={device}',
                 f'--attention_dropout={_ATTENTION_DROPOUT.value}']
    sides[side] = turns.Side(command, tokens[name], **env)
    if device == 'cpu':  # they would share the cores
      sides[side].ready()
  return sides


def _limits() -> tuple[float, float]:
  """Returns FLOP/s of a matrix product in our dtype, and bytes/s of a large copy."""
  n, size = (2048, 2**28) if jax.default_backend() == 'cpu' else (8192, 2**31)
  return limits.multiply_flops(n, _DTYPE.value), limits.copy_bandwidth(size)


def _measure(size: str, length: int, workdir: epath.Path) -> list[dict[str, Any]]:
  """Runs the rounds; returns one line for each side."""
  workdir.mkdir(parents=True, exist_ok=True)
  sides, measured = _start(size, length, workdir), []
  try:
    if jax.default_backend() != 'cpu':
      for name, side in sides.items():
        seconds = side.ready().start
        print(f'{size}, {length}: {name} starts in {seconds:.0f} s', flush=True)
    with turns.alone():
      for _ in range(_ROUNDS.value):
        measured.append(_limits())
        print(f'{size}, {length}: a product makes {measured[-1][0]:.3g} FLOP/s', flush=True)
        for name, side in sides.items():
          side.run(_STEPS.value)
          print(f'{size}, {length}: {name} {1e3 * side.median:.1f} ms', flush=True)
      for side in sides.values():
        side.close()
  except RuntimeError:  # a side has ended: the others must not compile any longer
    for side in sides.values():
      side.kill()
    raise
  flops, bandwidth = map(statistics.median, zip(*measured))
  each = architectures.make_config(config_lib.model(size)).flops_per_token(length, 0.15)
  return [{'size': size, 'length': length, 'batch': _BATCH.value, 'side': name,
           'tokens_per_second': side.tokens_per_second,
           'ratio': sides['bert_jax'].tokens_per_second / side.tokens_per_second,
           'share': each * side.tokens_per_second / flops, 'start': side.start,
           'memory': side.memory, 'versions': side.versions, 'product_flops': flops,
           'copy_bytes': bandwidth, 'seconds': side.seconds} for name, side in sides.items()]


def _machine() -> str:
  kind = jax.devices()[0].device_kind
  return f'{host.cores()} cores, {platform.machine()}' if kind == 'cpu' else kind


def main(_):
  """Measures every size and length, and prints a table."""
  for side in set(_SIDES.value) & _PYTHONS.keys():
    if not _PYTHONS[side].value:
      raise app.UsageError(f'--sides={side} needs --{side}_python, or leave it out of --sides')
  turns.busy()
  workdir, lines = epath.Path(_WORKDIR.value), []
  for size in _SIZES.value:
    for length in map(int, _LENGTHS.value):
      lines += _measure(size, length, workdir / f'{size}-{length}')
  with (workdir / 'train.jsonl').open('a') as file:
    file.writelines(json.dumps(line | {'machine': _machine()}) + '\n' for line in lines)
  print(f'{_machine()}; a matrix product makes {lines[0]["product_flops"] / 1e9:,.0f} GFLOP/s, a '
        f'copy {lines[0]["copy_bytes"] / 1e9:,.0f} GB/s\n')
  print('| model | side | tokens/s | bert_jax is faster by | share of the product | memory, GB | '
        'start, s | versions |\n' + '| --- ' * 8 + '|')
  for x in lines:
    print(f'| {x["size"]}, {x["length"]} | {x["side"]} | {x["tokens_per_second"]:,.0f} | '
          f'{x["ratio"]:.2f} | {x["share"]:.0%} | {x["memory"] / 1e9:.1f} | {x["start"]:.0f} | '
          f'{x["versions"]} |')


if __name__ == '__main__':
  app.run(main)
