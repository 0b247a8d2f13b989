r"""ALBERT-base (12 x 768, shared layers): sentence order, n-grams, SentencePiece, LAMB.

  python -m bert_jax.main --config=configs/albert_base.py --workdir=runs/albert \
      --config.data.source='corpus/*.txt.gz'

Lan et al. 2020 (arXiv:1909.11942), section 4.1, without dropout as in version 2 of the
model. Hardware: a TPU slice. Not run yet.
"""

from bert_jax import config
from bert_jax.model.albert import AlbertConfig


def get_config():
  """125,000 steps of 4,096 rows of 512, in bfloat16 (float32 on a CPU)."""
  c = config.pretraining(AlbertConfig(
      vocab_size=30_000, activation='gelu_tanh', dropout=0.0, attention_dropout=0.0,
      dtype='auto'))
  c.data.sequences = 'sentence_order'
  c.data.tokenizer = 'sentencepiece'
  c.data.heldout = 0.005
  c.masking.unit = 'ngram'
  c.train_steps, c.batch_size, c.max_len, c.phases = 125_000, 4096, 512, ()
  c.optimizer.name, c.optimizer.learning_rate = 'lamb', 1.76e-3
  c.optimizer.warmup_steps, c.optimizer.eps = 3125, 1e-6
  return c
