r"""DeBERTa v3 base (12 x 768) and its generator (6 x 768): replaced token detection.

  python -m bert_jax.main --config=configs/deberta_v3_base.py --workdir=runs/deberta \
      --config.data.source='corpus/*.txt.gz'

He et al. 2021 (arXiv:2111.09543), the setup of section 3 on Wikipedia and books.
Hardware: a TPU slice. `optimizer.accumulation` splits the 2,048 rows into microbatches.
Not run yet.
"""

from bert_jax import config
from bert_jax.model.deberta import DebertaConfig


def get_config():
  """125,000 steps of 2,048 rows of 512, in bfloat16 (float32 on a CPU)."""
  c = config.pretraining(DebertaConfig(dtype='auto'))
  c.objective, c.data.sequences = 'replaced_tokens_gdes', 'full_sentences'
  c.data.tokenizer, c.data.lowercase = 'sentencepiece', False
  c.data.heldout = 0.005
  # Every predicted token becomes [MASK], as in microsoft/DeBERTa's rtd_task.py.
  c.masking.replace_mask, c.masking.replace_random = 1.0, 0.0
  c.train_steps, c.batch_size, c.max_len, c.phases = 125_000, 2048, 512, ()
  c.optimizer.learning_rate, c.optimizer.eps = 5e-4, 1e-6
  return c
