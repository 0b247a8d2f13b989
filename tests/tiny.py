"""A config that trains in seconds: 2 layers of 32, rows of 32. Set data.source.

Nothing is held out: no evaluation compiles.
"""

from bert_jax import config


def get_config():
  c = config.pretraining('tiny')
  c.model.update(dict(hidden_size=32, num_heads=4, intermediate_size=64, max_positions=64,
                      vocab_size=200))
  c.update(dict(train_steps=12, batch_size=8, max_len=32, phases=(), log_every=2, eval_every=6,
                checkpoint_every=4, eval_batches=2))
  c.data.heldout = 0.0
  c.optimizer.learning_rate, c.optimizer.warmup_steps = 1e-3, 4
  return c
