r"""BERT-large (24 x 1024) with the published recipe: 1M steps of 256 rows.

  python -m bert_jax.main --config=configs/large.py --workdir=runs/large \
      --config.data.source='corpus/*.txt.gz' --config.data.vocab=vocab.txt

The learning rate is 1e-4. Rows have 128 tokens for 90% of the steps, then 512. Hardware:
a TPU slice or GPUs that hold 256 rows of 512 together. Not run yet. The paper reports a
held-out MLM perplexity of 3.23 (loss 1.172) on Wikipedia and BooksCorpus.
"""

from bert_jax import config


def get_config():
  """The recipe of Devlin et al. 2019, appendix A.2, in bfloat16 (float32 on a CPU)."""
  c = config.pretraining('large')
  c.model.dtype = 'auto'
  c.model.remat = 'dots'
  # On v5e:4x4, `plan` estimates a third of the memory traffic of 'tp'.
  c.sharding = 'fsdp_tp'
  c.data.heldout = 0.005
  c.optimizer.eps = 1e-6  # as in google-research/bert
  return c
