r"""RoBERTa-base (12 x 768): full sentences without NSP, a byte-level BPE, large batches.

  python -m bert_jax.main --config=configs/roberta_base.py --workdir=runs/roberta \
      --config.data.source='corpus/*.txt.gz'

Liu et al. 2019 (arXiv:1907.11692), table 9. Every epoch draws new masks, as all runs of
bert_jax do. Hardware: a TPU slice. `optimizer.accumulation` splits the 8,192 rows into
microbatches. Not run yet.
"""

from bert_jax import config
from bert_jax.model.bert_config import BertConfig


def get_config():
  """500,000 steps of 8,192 rows of 512, in bfloat16 (float32 on a CPU)."""
  c = config.pretraining(BertConfig(
      architecture='roberta', vocab_size=50_265, type_vocab_size=1, layer_norm_eps=1e-5,
      dtype='auto'))
  c.data.sequences = 'full_sentences'
  c.data.tokenizer, c.data.lowercase = 'bpe', False
  c.data.heldout = 0.005
  c.train_steps, c.batch_size, c.max_len, c.phases = 500_000, 8192, 512, ()
  c.optimizer.learning_rate, c.optimizer.warmup_steps = 6e-4, 24_000
  c.optimizer.b2, c.optimizer.eps, c.optimizer.clip_norm = 0.98, 1e-6, 0.0
  return c
