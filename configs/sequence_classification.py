r"""Classification of texts or pairs: GLUE, or any table. MRPC with a published BERT:

  python -m bert_jax.main --config=configs/sequence_classification.py --workdir=runs/mrpc \
      --config.init_from=MODEL --config.data.format=glue/mrpc \
      --config.data.train=MRPC/train.tsv --config.data.eval=MRPC/dev.tsv

MODEL is a workdir, a checkpoint of bert_jax, or a Hugging Face folder or hub name. Your
own tables are csv, tsv or jsonl, with data.text_column, data.text_pair_column and
data.label_column.
"""

from bert_jax import config


def get_config():
  """The paper's recipe: 32 examples, 3 epochs, lr 3e-5, 10% warmup, linear decay."""
  return config.finetuning('sequence_classification')
