"""BERT-large (24 x 1024) as published: lr 1e-4, 256 rows, 1M steps, 128 tokens for 90% of them.

  python -m bert_jax.main --config=configs/large.py --workdir=runs/large \\
      --config.data.source='corpus/*.txt.gz' --config.data.vocab=vocab.txt

Hardware: a TPU slice or GPUs that hold 256 rows of 512 between them. Not run yet. The paper reports
a held-out MLM perplexity of 3.23 (loss 1.173) on Wikipedia and BooksCorpus.
"""

from bert_jax import config


def get_config():
  """The paper's recipe (Devlin et al. 2019, appendix A.2) in bfloat16 (a CPU: float32)."""
  c = config.pretraining('large')
  c.model.dtype = 'auto'
  c.model.remat = 'dots'
  c.sharding = 'fsdp_tp'  # by `plan` on v5e:4x4: a third of the memory traffic of 'tp'
  c.data.heldout = 0.005
  return c
