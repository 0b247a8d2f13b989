r"""Medium BERT (8 x 512) on your own text: one accelerator, a day.

  python -m bert_jax.main --config=configs/medium.py --workdir=runs/medium \
      --config.data.source='corpus/*.txt.gz'

Not run yet.
"""

from bert_jax import config


def get_config():
  """200,000 steps of 256 rows, with 128 tokens for 90% of the steps, then 512."""
  c = config.pretraining('medium')
  c.train_steps = 200_000
  c.phases = ((180_000, 128, 256), (20_000, 512, 256))
  c.optimizer.learning_rate = 3e-4
  return c
