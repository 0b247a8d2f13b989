r"""Pretrains a published BERT further on your own text (Gururangan et al. 2020).

  python -m bert_jax.main --config=configs/continued.py --workdir=runs/mine \
      --config.init_from=MODEL --config.data.source='corpus/*.txt.gz'

MODEL is a Hugging Face folder or hub name, a checkpoint of bert_jax, or a workdir. The
run takes its sizes and vocabulary from the model. --config.add_tokens=words.txt adds the
words of your domain to the vocabulary. Then export the result: python -m bert_jax.convert
--to=huggingface.

Ran with all-MiniLM-L6-v2 (its MLM head is new) on 33 MB of textbooks: 12 minutes on 2 CPU
cores with --config.eval_batches=20. Held-out MLM loss 5.22 (the token frequencies alone
give 7.15).
"""

from bert_jax import config


def get_config():
  """150 steps of 32 rows of 128; increase both for more text or a larger model."""
  c = config.pretraining('base')
  config.unset_sizes(c.model)
  c.train_steps = 150
  c.max_len, c.batch_size, c.phases = 128, 32, ()
  c.optimizer.learning_rate = 5e-4
  c.optimizer.warmup_steps = 15
  c.log_every, c.eval_every, c.checkpoint_every = 10, 50, 50
  return c
