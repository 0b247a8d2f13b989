r"""Multiple choice among endings or answers: SWAG, CommonsenseQA, or JSON lines.

  python -m bert_jax.main --config=configs/multiple_choice.py --workdir=runs/swag \
      --config.init_from=MODEL --config.data.format=swag \
      --config.data.train=train.csv --config.data.eval=val.csv

The format of your own JSON lines: {"text": "...", "choices": ["...", "..."], "label": 0}.
"""

from bert_jax import config


def get_config():
  """The paper's recipe: 16 texts per step, 3 epochs, lr 2e-5."""
  c = config.finetuning('multiple_choice')
  c.batch_size = 16
  c.optimizer.learning_rate = 2e-5
  return c
