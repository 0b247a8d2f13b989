r"""ModernBERT-base (22 x 768): rotary positions, GeGLU, local attention, 30% masked.

  python -m bert_jax.main --config=configs/modern_base.py --workdir=runs/modern \
      --config.data.source='corpus/*.txt.gz'

Warner et al. 2024 (arXiv:2412.13663), table 3, with the batch size warmup in four steps.
Three things differ from the paper: the learning rate decays as 1 - sqrt at the end of
this run instead of in a separate run, the attention output has no dropout (0.1 in the
paper), and the batch size warmup takes 110 billion tokens (50 in the authors' config). For
rows of 8,192 tokens add --config.max_len=8192 --config.model.global_theta=160000. Hardware:
a TPU slice. Not run yet.
"""

from bert_jax import config
from bert_jax.model.modern import ModernConfig


def get_config():
  """1.7T tokens in rows of 1,024, in bfloat16 (float32 on a CPU)."""
  c = config.pretraining(ModernConfig(dtype='auto', classifier_pooling='mean',
                                      global_theta=10_000.0))
  c.data.sequences = 'full_sentences'
  c.data.tokenizer, c.data.lowercase = 'bpe', False
  c.data.heldout = 0.005
  c.masking.rate = 0.3
  c.phases = ((20_000, 1024, 768), (20_000, 1024, 1536), (20_000, 1024, 3072),
              (340_000, 1024, 4608))
  c.train_steps = sum(steps for steps, _, _ in c.phases)
  c.max_len, c.batch_size = 1024, 4608
  # The warmup reads three billion tokens.
  c.optimizer.name, c.optimizer.clip_norm = 'stable_adamw', 0.0
  c.optimizer.learning_rate, c.optimizer.warmup_steps = 8e-4, 3815
  c.optimizer.decay, c.optimizer.decay_ratio = '1-sqrt', 0.1
  c.optimizer.b2, c.optimizer.eps = 0.98, 1e-6
  # The paper's 1e-5 is the decay per step at the peak. Ours is multiplied by the learning
  # rate.
  c.optimizer.weight_decay = 1e-5 / 8e-4
  return c
