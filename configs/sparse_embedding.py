r"""Sparse vectors over the vocabulary (SPLADE) from a masked LM, for an inverted index.

  python -m bert_jax.main --config=configs/sparse_embedding.py --workdir=runs/sparse \
      --config.init_from=MODEL --config.data.train=pairs.jsonl --config.data.eval=STS-B/dev.tsv \
      --config.data.negative_column=negative

The data has the format of configs/sentence_embedding.py. The weights of the FLOPS loss are
constant: in sentence-transformers they grow over the first third of the steps. Not run yet
with these settings.
"""

from bert_jax import config


def get_config():
  """The FLOPS weights of sentence-transformers; lr 2e-5, one epoch, 256 tokens a text."""
  c = config.finetuning('sparse_embedding')
  c.max_len = 256
  c.optimizer.learning_rate = 2e-5
  return c
