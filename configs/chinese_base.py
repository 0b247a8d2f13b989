r"""BERT-base for Chinese (12 x 768): characters as tokens, whole-word masking.

  python -m bert_jax.main --config=configs/chinese_base.py --workdir=runs/chinese \
      --config.data.source='zh/*.txt.gz'
  python -m bert_jax.main --config=configs/sequence_classification.py --workdir=runs/chnsenticorp \
      --config.init_from=runs/chinese --config.data.train=train.tsv --config.data.eval=dev.tsv

Cui et al. 2019 (arXiv:1906.08101): the text is split into words once, during
tokenization, and all characters of a word are masked together. Hardware: a TPU slice or
GPUs. Not run yet. Without data.vocab the run trains a vocabulary.
"""

from bert_jax import config


def get_config():
  """BERT's recipe with masking of whole words, in bfloat16 (float32 on a CPU).

  The paper continues from Google's Chinese BERT instead.
  """
  c = config.pretraining('base')
  c.model.vocab_size, c.model.dtype = 21_128, 'auto'
  c.data.language = 'zh'
  c.data.heldout = 0.005
  c.optimizer.eps = 1e-6  # as in google-research/bert
  c.masking.unit = 'whole_word'
  return c
