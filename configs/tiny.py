"""Tiny BERT (2 x 128) on text that every installation has: the first run on a laptop.

  python -m bert_jax.main --config=configs/tiny.py --workdir=runs/tiny

Ran on 2 CPU cores: 8 minutes with the install. Held-out MLM loss 4.28 (the token
frequencies alone give 6.46), NSP accuracy 0.70.
"""

from bert_jax import config


def get_config():
  """About 4 epochs of the built-in corpus, with a vocabulary of 8,192 trained on it."""
  c = config.pretraining('tiny')
  c.model.vocab_size = 8192
  # A model this small does not overfit in a few epochs, so it needs no dropout. It learns
  # faster from larger initial weights.
  c.model.dropout = c.model.attention_dropout = 0.0
  c.model.initializer_range = 0.08
  c.model.scan_unroll = 2
  c.train_steps = 2000
  # On short rows, the loss of a model this small falls much sooner below the loss of the
  # token frequencies alone.
  c.max_len, c.batch_size, c.phases = 64, 64, ()
  c.optimizer.learning_rate = 2e-3
  c.optimizer.warmup_steps = 100
  c.log_every, c.eval_every, c.checkpoint_every = 25, 500, 500
  return c
