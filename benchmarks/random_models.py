"""Writes random models of published sizes, to measure speed without a network.

  python -m benchmarks.random_models --vocab=records/wiki/tokenizer/vocab.txt --output=runs/random

OUTPUT/bert_base is BERT-base for transformers. OUTPUT/minilm has the size of
all-MiniLM-L6-v2, for sentence-transformers. Needs torch, transformers and
sentence-transformers.
"""

import pathlib
import shutil

from absl import app, flags
import sentence_transformers
from sentence_transformers import models
import torch
import transformers

_VOCAB = flags.DEFINE_string('vocab', None, 'vocab.txt of the models.', required=True)
_OUTPUT = flags.DEFINE_string('output', None, 'Folder of the models.', required=True)
_NAMES = flags.DEFINE_multi_enum('names', ['bert_base', 'minilm'], ['bert_base', 'minilm'],
                                 'The models to write.')


def _save(kind, config: transformers.BertConfig, folder: pathlib.Path):
  kind(config).save_pretrained(folder)
  transformers.BertTokenizerFast(vocab=_VOCAB.value).save_pretrained(folder)
  shutil.copy(_VOCAB.value, folder / 'vocab.txt')


def main(_):
  """Writes the folders."""
  home, size = pathlib.Path(_OUTPUT.value), len(transformers.BertTokenizerFast(vocab=_VOCAB.value))
  torch.manual_seed(0)
  if 'bert_base' in _NAMES.value:
    _save(transformers.BertForPreTraining, transformers.BertConfig(vocab_size=size),
          home / 'bert_base')
  if 'minilm' in _NAMES.value:
    config = transformers.BertConfig(vocab_size=size, hidden_size=384, num_hidden_layers=6,
                                     num_attention_heads=12, intermediate_size=1536)
    _save(transformers.BertModel, config, home / 'minilm_words')
    modules = [models.Transformer(str(home / 'minilm_words'), max_seq_length=256),
               models.Pooling(config.hidden_size)]
    sentence_transformers.SentenceTransformer(modules=modules, device='cpu').save(
        str(home / 'minilm'))


if __name__ == '__main__':
  app.run(main)
