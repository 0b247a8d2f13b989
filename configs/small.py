r"""Small BERT (4 x 512) on your own text: one accelerator, a few hours.

  python -m bert_jax.main --config=configs/small.py --workdir=runs/small \
      --config.data.source='corpus/*.txt.gz'

Not run yet.
"""

from bert_jax import config


def get_config():
  """100,000 steps of 128 rows, with 128 tokens for 90% of the steps, then 512."""
  c = config.pretraining('small')
  # A CPU is faster without a loop over layers, and four layers still compile fast.
  c.model.scan_unroll = 4
  c.train_steps = 100_000
  c.batch_size = 128
  c.phases = ((90_000, 128, 128), (10_000, 512, 128))
  c.optimizer.learning_rate = 5e-4
  c.optimizer.warmup_steps = 5_000
  c.eval_every = 5_000
  return c
