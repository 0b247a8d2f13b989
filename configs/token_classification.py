r"""Token classification: a tag for each word, such as named entities in CoNLL files.

  python -m bert_jax.main --config=configs/token_classification.py --workdir=runs/ner \
      --config.init_from=MODEL --config.data.train=train.conll --config.data.eval=dev.conll

Words are in the first column and tags (IOB1, IOB2, BIOES, BMES) in the last.
"""

from bert_jax import config


def get_config():
  """The paper's recipe: 32 sentences per step, 3 epochs, lr 5e-5."""
  return config.finetuning('token_classification')
