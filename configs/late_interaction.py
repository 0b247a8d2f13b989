r"""Late interaction (ColBERT): a vector for each token, for retrieval by MaxSim.

  python -m bert_jax.main --config=configs/late_interaction.py --workdir=runs/late \
      --config.init_from=MODEL --config.data.train=pairs.jsonl --config.data.eval=STS-B/dev.tsv \
      --config.data.negative_column=negative

The data has the format of configs/sentence_embedding.py. If init_from is already a
late-interaction model, the run keeps its projection, prompts and skipped words, and the
length of its queries. Documents have up to `max_len` tokens: give the model's length.
"""

from bert_jax import config


def get_config():
  """32 tokens a query, 180 a document, 128 numbers a vector; lr 3e-5, one epoch."""
  return config.finetuning('late_interaction')
