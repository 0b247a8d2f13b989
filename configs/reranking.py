"""The documents of a query in order of relevance: a cross-encoder on pairs.

  python -m bert_jax.main --config=configs/reranking.py --workdir=runs/reranker \
      --config.init_from=MODEL --config.data.train=train.jsonl --config.data.eval=dev.jsonl

JSON lines: {"query": "...", "positives": ["..."], "negatives": ["...", "..."]}, or a pair in each,
{"query": "...", "document": "...", "label": 1}. Not run yet at this size.
"""

from bert_jax import config


def get_config():
  """sentence-transformers' recipe: binary cross-entropy, lr 2e-5, one epoch; 256 tokens a pair."""
  c = config.finetuning('reranking')
  c.max_len = 256
  c.train_epochs = 1.0
  c.optimizer.learning_rate = 2e-5
  return c
