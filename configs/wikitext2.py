r"""Tiny BERT on WikiText-2 in its raw format: ` = Title = ` headings, spaced tokens.

  python -m bert_jax.main --config=configs/wikitext2.py --workdir=runs/wikitext2 \
      --config.data.source='wikitext-2-raw/wiki.train.raw'

Hardware: a laptop CPU. Not run yet.
"""

from bert_jax import config


def get_config():
  """About ten epochs, with a vocabulary trained on the corpus."""
  c = config.pretraining('tiny')
  c.model.vocab_size = 8192
  c.model.dropout = c.model.attention_dropout = 0.0
  c.model.initializer_range = 0.08
  c.model.scan_unroll = 2
  c.data.format = 'wikitext'
  c.train_steps = 6000
  c.max_len, c.batch_size, c.phases = 64, 64, ()  # short rows, as in configs/tiny.py
  c.optimizer.learning_rate = 2e-3
  c.optimizer.warmup_steps = 300
  c.log_every, c.eval_every, c.checkpoint_every = 50, 1000, 1000
  return c
