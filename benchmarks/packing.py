"""Does packing change what is learned? Tiny BERT on packed and unpacked rows, the same real tokens.

  python -m benchmarks.packing --source='corpus/*.txt.gz' --workdir=runs/packing

Both sides see `--tokens` real tokens, about as many in each step; both are then evaluated on the
same unpacked held-out rows with the same masks. Takes about an hour on 2 CPU cores.
"""

import json
import os
import runpy

from absl import app
from absl import flags
from etils import epath
import jax
import numpy as np

from bert_jax import run
from bert_jax.data import dataset
from bert_jax.data import prepare
from bert_jax.data.phases import Phases
from bert_jax.data.rows import RowSource
from bert_jax.data.windows import Layout
from bert_jax.model.config import BertConfig
from bert_jax.model.heads import BertForPreTraining
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.tasks.pretraining import Pretraining
from bert_jax.training import checkpoint

_SOURCE = flags.DEFINE_string('source', None, 'Glob of text files.', required=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for records and runs.', required=True)
_TOKENS = flags.DEFINE_integer('tokens', 10_000_000, 'Real tokens of each run.')
_SEEDS = flags.DEFINE_integer('seeds', 3, 'Runs of each side.')
_ROWS = 32  # packed rows in a step


def _config(records: str, pack: bool, seed: int, corpus: dataset.Corpus):
  c = runpy.run_path('configs/tiny.py')['get_config']()
  fill = {p: RowSource(corpus.train, Layout.create(c.max_len, p, 'next_sentence'), seed,
                       corpus.tokenizer).sample().fill for p in (True, False)}
  c.data.source, c.data.pack, c.seed = records, pack, seed
  c.batch_size = _ROWS if pack else round(_ROWS * fill[True] / fill[False])
  c.train_steps = round(_TOKENS.value / (c.batch_size * c.max_len * fill[pack]))
  c.optimizer.warmup_steps = 300
  c.log_every, c.eval_every, c.checkpoint_every = 100, c.train_steps, c.train_steps
  return c


def _evaluate(workdir: str, config, corpus: dataset.Corpus) -> dict[str, float]:
  """Held-out losses of a finished run on unpacked rows."""
  c = config
  model_config = BertConfig(**{**c.model, 'vocab_size': corpus.tokenizer.vocab_size})
  task = Pretraining.create(
      BertForPreTraining(model_config), MaskingConfig(**c.masking), corpus,
      Phases.create((), c.train_steps, c.max_len, 64), seed=0, eval_batches=0, pack=False)
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
                        jax.tree.map(lambda x: x.unbox(), shapes,
                                     is_leaf=lambda x: hasattr(x, 'unbox')))
  params, _ = checkpoint.restore_params(epath.Path(workdir), shapes)
  loss = jax.jit(lambda params, batch: task.loss(params, None, batch, None))
  return task.evaluate(lambda batch: loss(params, batch), c.train_steps)


def main(_):
  """Trains, evaluates, prints a table."""
  records = os.path.join(_WORKDIR.value, 'records')
  if not os.path.exists(os.path.join(records, 'manifest.json')):
    prepare.prepare(prepare.Settings(source=_SOURCE.value, vocab_size=8192), records)
  corpus = dataset.open_records(epath.Path(records))
  found = {True: [], False: []}
  for seed in range(_SEEDS.value):
    for pack in (True, False):
      workdir = os.path.join(_WORKDIR.value, f'{"packed" if pack else "unpacked"}-{seed}')
      config = _config(records, pack, seed, corpus)
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
