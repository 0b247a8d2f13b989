"""The best encoder for a given time: a small ModernBERT with NorMuon, on at most 10M words.

  bash launch/speedrun.sh --text='corpus/*.txt.gz' --held_out='held_out/*.txt' --minutes=30

The script prepares the text, trains for the given minutes and scores the model.
docs/speedrun.md has the figures. On an accelerator the model is about as large as the
small GPT-BERT (12 layers of 384, Charpentier and Samuel 2024, arXiv:2410.24159). On a CPU
it has 4 layers of 256.
"""

from bert_jax import config
from bert_jax.model.modern import ModernConfig
from bert_jax.runtime import host


def get_config():
  """NorMuon, short convolutions, many masks, causal rows and short rows first."""
  on_cpu = not host.has_accelerator()
  layers, width, heads, rows = (4, 256, 4, 16) if on_cpu else (13, 384, 6, 256)
  c = config.pretraining(ModernConfig(
      vocab_size=8192, num_layers=layers, hidden_size=width, num_heads=heads,
      intermediate_size=3 * width // 2, max_positions=512, local_window=128, dtype='auto',
      classifier_pooling='mean', conv_reach=1, scan_unroll=layers,
      initializer_range=0.04))
  c.train_steps, c.train_minutes = 0, 30.0
  # Short rows first: attention costs less, and an early model learns mostly from
  # nearby tokens.
  c.phases = ((8, 64, 2 * rows), (2, 128, rows))  # shares of the steps
  c.data.sequences, c.data.heldout = 'full_sentences', 0.01
  # All predicted tokens become [MASK], as when the model is scored: a short run has no
  # time to learn the other replacements.
  c.masking.replace_mask, c.masking.replace_random = 1.0, 0.0
  # Many masks at first, because each one is a prediction to learn from; fewer at the end,
  # because the scores mask fewer tokens.
  c.masking.rate, c.masking.final_rate = 0.5, 0.3
  # At first, most rows predict next tokens: a causal row hides nothing on the left, so
  # the model learns short patterns sooner (docs/speedrun.md).
  c.masking.causal_rows, c.masking.causal_steps = 0.75, 0.125
  c.optimizer.name, c.optimizer.learning_rate = 'normuon', 4e-3
  c.optimizer.warmup_steps, c.optimizer.warmup_ratio = 0, 0.05
  c.log_every, c.eval_every, c.checkpoint_every = 50, 500, 250
  return c
