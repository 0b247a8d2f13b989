r"""ELECTRA-small (12 x 256) and its generator (12 x 64): replaced token detection.

  python -m bert_jax.main --config=configs/electra_small.py --workdir=runs/electra \
      --config.data.source='corpus/*.txt.gz'

Clark et al. 2020 (arXiv:2003.10555), table 6. Hardware: one GPU or TPU chip. The paper's
run takes 4 days on a V100. Not run yet.
"""

from bert_jax import config
from bert_jax.model.electra import ElectraConfig


def get_config():
  """1M steps of 128 rows of 128, in bfloat16 (float32 on a CPU)."""
  c = config.pretraining(ElectraConfig(
      hidden_size=256, num_heads=4, intermediate_size=1024, embedding_size=128,
      generator_size=0.25, dtype='auto'))
  c.data.sequences = 'full_sentences'
  c.data.heldout = 0.005
  c.masking.replace_mask, c.masking.replace_random = 0.85, 0.0
  c.train_steps, c.batch_size, c.max_len, c.phases = 1_000_000, 128, 128, ()
  c.optimizer.learning_rate, c.optimizer.eps = 5e-4, 1e-6
  return c
