r"""Extractive question answering: SQuAD v1.1 and v2.0.

  python -m bert_jax.main --config=configs/question_answering.py --workdir=runs/squad \
      --config.init_from=MODEL --config.data.train=train-v1.1.json --config.data.eval=dev-v1.1.json

The paper reports EM 80.8 and F1 88.5 on SQuAD v1.1 for BERT-base. We have not run
BERT-base on it.
"""

from bert_jax import config


def get_config():
  """32 windows of up to 384 tokens per step and lr 5e-5, as in the paper; 2 epochs, not 3."""
  c = config.finetuning('question_answering')
  c.optimizer.learning_rate = 5e-5
  return c
