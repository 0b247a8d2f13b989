"""DeBERTa v3 base (12 x 768) and its generator (6 x 768): which tokens were replaced?

  python -m bert_jax.main --config=configs/deberta_v3_base.py --workdir=runs/deberta \\
      --config.data.source='corpus/*.txt.gz'

He et al. 2021 (arXiv:2111.09543), section 4.1 and table 7: 500k steps of 8,192 rows of 512 on 160 GB of
text, 128k entries. Hardware: 64 chips; the paper takes 64 V100. Not run yet.
"""

from bert_jax import config
from bert_jax.model.deberta import DebertaConfig


def get_config():
  """500k steps of 8,192 rows of 512, in bfloat16 (a CPU: float32)."""
  c = config.pretraining(DebertaConfig(dtype='auto'))
  c.objective, c.data.sequences = 'replaced_tokens_gdes', 'full_sentences'
  c.data.tokenizer, c.data.lowercase = 'sentencepiece', False
  c.data.heldout = 0.001
  c.masking.replace_mask, c.masking.replace_random = 1.0, 0.0
  c.train_steps, c.batch_size, c.max_len, c.phases = 500_000, 8192, 512, ()
  c.optimizer.learning_rate, c.optimizer.eps = 6e-4, 1e-6
  c.optimizer.b2, c.optimizer.warmup_steps = 0.98, 10_000
  return c
