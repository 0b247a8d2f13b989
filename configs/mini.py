r"""Mini BERT (4 x 256) on your own text: an afternoon on a laptop, minutes on a GPU.

  python -m bert_jax.main --config=configs/mini.py --workdir=runs/mini \
      --config.data.source='corpus/*.txt.gz'

Not run yet.
"""

from bert_jax import config


def get_config():
  """10,000 steps of 64 rows of 128."""
  c = config.pretraining('mini')
  c.model.vocab_size = 16384
  # A CPU is faster without a loop over layers, and four layers still compile fast.
  c.model.scan_unroll = 4
  c.train_steps = 10_000
  c.max_len, c.batch_size, c.phases = 128, 64, ()
  c.optimizer.learning_rate = 1e-3
  c.optimizer.warmup_steps = 500
  c.log_every, c.eval_every, c.checkpoint_every = 50, 1000, 1000
  return c
