"""Does packing change what is learned? Tiny BERT on packed and unpacked rows, the same real tokens.

  python -m benchmarks.packing --source='corpus/*.txt.gz' --workdir=runs/packing

Both sides see `--tokens` real tokens, about as many in each step; both are then evaluated on the
same unpacked held-out rows with the same masks. Takes over an hour on 2 CPU cores.

Both start from one model that has left the plateau of the token frequencies. A model this small
leaves it half-way through 10 million tokens, at a step that depends on the seed: from fresh weights
the seeds of one side differ by 0.2 nat, which hides whatever packing does.
"""

import dataclasses
import json
import os
import runpy

from absl import app
from absl import flags
from etils import epath
from flax import linen as nn
import jax
import numpy as np

from bert_jax import config as config_lib
from bert_jax import run
from bert_jax.data import dataset
from bert_jax.data import prepare
from bert_jax.data.phases import Phases
from bert_jax.data.rows import RowSource
from bert_jax.data.windows import Layout
from bert_jax.objectives import catalogue
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.tasks.pretraining import Pretraining
from bert_jax.training import checkpoint

_SOURCE = flags.DEFINE_string('source', None, 'Glob of text files.', required=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for records and runs.', required=True)
_TOKENS = flags.DEFINE_integer('tokens', 10_000_000, 'Real tokens of each run.')
_SEEDS = flags.DEFINE_integer('seeds', 3, 'Runs of each side.')
_ROWS = 32  # packed rows in a step


def _config(records: str, pack: bool, seed: int, corpus: dataset.Corpus, start: str = ''):
  c = runpy.run_path('configs/tiny.py')['get_config']()
  fill = {p: RowSource(corpus.train, Layout.create(c.max_len, p, 'next_sentence'), seed,
                       corpus.tokenizer).sample().fill for p in (True, False)}
  c.data.source, c.data.pack, c.seed, c.init_from = records, pack, seed, start
  c.batch_size = _ROWS if pack else round(_ROWS * fill[True] / fill[False])
  c.train_steps = round(_TOKENS.value / (c.batch_size * c.max_len * fill[pack]))
  c.optimizer.warmup_steps = 300
  c.log_every, c.eval_every, c.checkpoint_every = 100, c.train_steps, c.train_steps
  return c


def _evaluate(workdir: str, config, corpus: dataset.Corpus) -> dict[str, float]:
  """Held-out losses of a finished run on unpacked rows."""
  c = config
  model_config = dataclasses.replace(config_lib.bert_config(c.model),
                                     vocab_size=corpus.tokenizer.vocab_size)
  task = Pretraining.create(
      catalogue.create('', 'next_sentence', model_config), MaskingConfig(**c.masking), corpus,
      Phases.create((), c.train_steps, c.max_len, 64), seed=0, eval_batches=0, pack=False)
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  params, _ = checkpoint.restore_params(epath.Path(workdir), nn.unbox(shapes))
  loss = jax.jit(lambda params, batch: task.loss(params, None, batch, None))
  return task.evaluate(lambda batch: loss(params, batch), c.train_steps)


def main(_):
  """Trains, evaluates, prints a table."""
  records = os.path.join(_WORKDIR.value, 'records')
  if not os.path.exists(os.path.join(records, 'manifest.json')):
    prepare.prepare(prepare.Settings(source=_SOURCE.value, vocab_size=8192), records)
  corpus = dataset.open_records(epath.Path(records))
  start = os.path.join(_WORKDIR.value, 'start')
  run.run(_config(records, True, 0, corpus), start)
  found = {True: [], False: []}
  for seed in range(1, _SEEDS.value + 1):
    for pack in (True, False):
      workdir = os.path.join(_WORKDIR.value, f'{"packed" if pack else "unpacked"}-{seed}')
      config = _config(records, pack, seed, corpus, start)
      run.run(config, workdir)
      metrics = _evaluate(workdir, config, corpus)
      found[pack].append(metrics['mlm_loss'])
      print(json.dumps({'packed': pack, 'seed': seed, 'steps': config.train_steps,
                        'rows': config.batch_size, **metrics}), flush=True)
  means = {pack: float(np.mean(losses)) for pack, losses in found.items()}
  print(f'held-out MLM loss, mean of {_SEEDS.value} seeds: packed {means[True]:.4f}, unpacked '
        f'{means[False]:.4f}, difference {means[True] - means[False]:+.4f} nat')


if __name__ == '__main__':
  app.run(main)
