r"""DistilBERT (6 x 768), which learns from a BERT of the same width and vocabulary.

  python -m bert_jax.main --config=configs/distilbert_base.py --workdir=runs/distilled \
      --config.teacher=runs/base --config.data.source='corpus/*.txt.gz'

Sanh et al. 2019 (arXiv:1910.01108). The student uses the teacher's vocabulary, and starts
from every second layer of the teacher. The optimizer is that of the authors'
`distillation/train.py` and `distiller.py`. Hardware: a TPU slice or GPUs. Not run yet.
"""

from bert_jax import config
from bert_jax.model.distilbert import DistilBertConfig


def get_config():
  """6,000 steps of 4,096 rows of 512 (about 3 epochs), in bfloat16 (CPU: float32)."""
  c = config.pretraining(DistilBertConfig(dtype='auto'))
  c.objective = 'distillation'
  c.data.sequences = 'full_sentences'
  c.data.heldout = 0.005
  c.train_steps, c.batch_size, c.max_len, c.phases = 6_000, 4096, 512, ()
  c.optimizer.learning_rate, c.optimizer.b2, c.optimizer.eps = 5e-4, 0.98, 1e-6
  c.optimizer.warmup_steps = 300
  c.optimizer.weight_decay, c.optimizer.clip_norm = 0.0, 5.0
  return c
