r"""Sentence embeddings by contrastive learning within a batch, scored like STS-B.

  python -m bert_jax.main --config=configs/sentence_embedding.py --workdir=runs/embedding \
      --config.init_from=MODEL --config.data.train=nli.jsonl --config.data.eval=STS-B/dev.tsv \
      --config.data.negative_column=contradiction

With --config.data.text_pair_column='' single texts are enough: unsupervised SimCSE (Gao
et al. 2021), with learning rates of 1e-5 to 3e-5 and cls pooling. Not run yet with these
settings.
"""

from bert_jax import config


def get_config():
  """The rate and temperature of supervised SimCSE; one epoch of 64 texts of 64 tokens.

  SimCSE makes 3 epochs of 512 texts of 32 tokens, with cls pooling.
  """
  c = config.finetuning('sentence_embedding')
  c.optimizer.learning_rate = 5e-5
  return c
