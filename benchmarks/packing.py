"""Do packing and short pairs change what a tiny BERT learns from the same real tokens?

  python -m benchmarks.packing --source='corpus/*.txt.gz' --workdir=runs/packing

The sides are packed rows and rows of one pair each, both with a tenth of the pairs short,
as published, and packed rows with half of the pairs short. Each side sees `--tokens` real
tokens, with about the same number per step. All are then evaluated on the same held-out
rows of one long pair, with the same masks. It takes about three hours on 2 CPU cores.

All sides start from one model that has left the plateau of the token frequencies:
configs/tiny.py after 2,000 steps on rows of 64. On rows of 128 a model this small leaves
the plateau late, at a step that depends on the seed. From random weights the seeds of one
side differ by 0.2 nats.
"""

import dataclasses
import json
import os
import pathlib
import runpy

from absl import app, flags
from etils import epath
from flax import linen as nn
import jax
from ml_collections import ConfigDict
import numpy as np

from benchmarks.calls import keep_flags
from bert_jax.data import dataset, preparation
from bert_jax.data import pairs as pairs_lib
from bert_jax.data.pairs import RowLayout
from bert_jax.data.phases import Phases
from bert_jax.data.rows import RowSource
from bert_jax.model import architectures
from bert_jax.objectives import objectives
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.runs import pretrain, run
from bert_jax.tasks.pretraining import Pretraining
from bert_jax.tasks.pretraining_data import PretrainingData
from bert_jax.training import checkpoint

_SOURCE = flags.DEFINE_string('source', None, 'Glob of text files.', required=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for records and runs.', required=True)
_TOKENS = flags.DEFINE_integer('tokens', 10_000_000, 'Real tokens of each run.')
_SEEDS = flags.DEFINE_integer('seeds', 3, 'Runs of each side.')
_START_STEPS = 2000  # of the shared first part, on the rows of configs/tiny.py
_LENGTH, _ROWS = 128, 32  # tokens in a row, and packed rows in a step
_LONG = 0.8  # a pair of the evaluation fills at least this fraction of its row
# (packed, fraction of short pairs)
_SIDES = {'packed': (True, 0.1), 'unpacked': (False, 0.1), 'packed, half short': (True, 0.5)}


def _fill(corpus: dataset.Corpus, max_len: int, pack: bool) -> float:
  layout = RowLayout.create(max_len, pack, 'next_sentence')
  return RowSource(corpus.train, layout, 0, corpus.tokenizer).sample().fill


def _config(records: str, side: str, seed: int, corpus: dataset.Corpus, start: str = ''):
  c = runpy.run_path('configs/tiny.py')['get_config']()
  c.max_len = _LENGTH
  pack, pairs_lib.SHORT_SHARE = _SIDES[side]
  fill = _fill(corpus, c.max_len, pack)
  c.data.source, c.data.pack, c.seed, c.init_from = records, pack, seed, start
  c.batch_size = _ROWS if pack else round(_ROWS * _fill(corpus, c.max_len, True) / fill)
  c.train_steps = round(_TOKENS.value / (c.batch_size * c.max_len * fill))
  c.optimizer.warmup_steps = min(300, c.train_steps // 4)
  c.log_every, c.eval_every, c.checkpoint_every = 100, c.train_steps, c.train_steps
  return c


def _evaluate(workdir: str, config, corpus: dataset.Corpus) -> dict[str, float]:
  """Returns the held-out losses of a finished run on rows of one long pair."""
  c = config
  model_config = dataclasses.replace(architectures.make_config(c.model),
                                     vocab_size=corpus.tokenizer.vocab_size)
  pairs_lib.SHORT_SHARE = 0.1
  masking_config = MaskingConfig(**c.masking)
  task = Pretraining(objectives.create('', 'next_sentence', model_config), masking_config,
                     pretrain.vocabulary(corpus, masking_config))
  unpacked = ConfigDict({'pack': False, 'sequences': 'next_sentence',
                         'negatives': 'other_document'})
  data = PretrainingData.create(task, corpus, Phases.create((), c.train_steps, c.max_len, 64),
                                unpacked, seed=0, eval_batches=0)
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  params, _ = checkpoint.restore_params(epath.Path(workdir), nn.unbox(shapes))
  loss = jax.jit(lambda params, batch: task.loss(params, None, batch, None))
  rows = data.eval_rows[0].batch(0, data.eval_rows[0].rows)
  long = (rows.pair_weights[:, 0] > 0) & ((rows.tokens.text_ids > 0).mean(1) >= _LONG)
  sums = {}
  for part in np.array_split(np.flatnonzero(long), long.sum() // 64 + 1):
    batch = jax.tree.map(lambda x: x[part], rows)
    for name, metric in jax.device_get(loss(params, batch)).items():
      sums[name] = np.add(sums.get(name, (0.0, 0.0)), metric)
  return {name: float(total / count) for name, (total, count) in sums.items() if name != 'tokens'}


def main(_):
  """Trains, evaluates, and prints a table."""
  keep_flags(pathlib.Path(_WORKDIR.value), 'source', 'tokens')
  records = os.path.join(_WORKDIR.value, 'records')
  if not os.path.exists(os.path.join(records, 'manifest.json')):
    preparation.prepare(preparation.Settings(source=_SOURCE.value, vocab_size=8192), records)
  corpus = dataset.open_records(epath.Path(records))
  start = os.path.join(_WORKDIR.value, 'start')
  config = runpy.run_path('configs/tiny.py')['get_config']()
  config.data.source, config.train_steps = records, _START_STEPS
  run.run(config, start)
  losses_of = {side: [] for side in _SIDES}
  for seed in range(1, _SEEDS.value + 1):
    for side in _SIDES:
      workdir = os.path.join(_WORKDIR.value, f'{side.replace(", ", "-").replace(" ", "-")}-{seed}')
      config = _config(records, side, seed, corpus, start)
      run.run(config, workdir)
      metrics = _evaluate(workdir, config, corpus)
      losses_of[side].append(metrics['mlm_loss'])
      print(json.dumps({'side': side, 'seed': seed, 'steps': config.train_steps,
                        'rows': config.batch_size, **metrics}), flush=True)
  for side, losses in losses_of.items():
    print(f'{side}: held-out MLM loss on long pairs {np.mean(losses):.4f}, seeds '
          f'{min(losses):.4f} to {max(losses):.4f}')


if __name__ == '__main__':
  app.run(main)
