r"""Reranking of the documents of a query with a cross-encoder.

  python -m bert_jax.main --config=configs/reranking.py --workdir=runs/reranker \
      --config.init_from=MODEL --config.data.train=train.jsonl --config.data.eval=dev.jsonl

JSON lines: {"query": "...", "positives": ["..."], "negatives": ["...", "..."]}, or one
pair per line, {"query": "...", "document": "...", "label": 1}. Not run yet with these settings.
"""

from bert_jax import config


def get_config():
  """Binary cross-entropy, lr 2e-5, one epoch, 256 tokens, as in sentence-transformers."""
  c = config.finetuning('reranking')
  c.max_len = 256
  c.train_epochs = 1.0
  c.optimizer.learning_rate = 2e-5
  return c
