r"""Classification of texts with more than 512 tokens (Sun et al. 2019), such as IMDB.

  python -m bert_jax.main --config=configs/long_documents.py --workdir=runs/imdb \
      --config.init_from=MODEL --config.data.train=train.tsv --config.data.eval=test.tsv \
      --config.data.long=chunks_mean

data.long selects the head, the tail or head_tail (the first 128 and the last 382 of 510
tokens), or reads the whole text in chunks: chunks_max, chunks_mean, chunks_attention.
"""

from bert_jax import config


def get_config():
  """head_tail, the best method of that paper, at 512 tokens."""
  c = config.finetuning('sequence_classification')
  c.max_len, c.batch_size = 512, 16
  c.optimizer.learning_rate = 2e-5
  c.data.long = 'head_tail'
  return c
