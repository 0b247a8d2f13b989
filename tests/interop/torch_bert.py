"""BERTs of transformers (PyTorch) with random weights: the reference of the parity tests."""

import pathlib

import numpy as np
import torch
import transformers

from bert_jax.data.tokens import Tokens

SPECIAL = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']
_SIZES = {'tiny': (2, 128, 2, 1000), 'base': (12, 768, 12, 30522)}


def config(size: str = 'tiny', **overrides) -> transformers.BertConfig:
  layers, width, heads, vocab = _SIZES[size]
  fields = {'num_hidden_layers': layers, 'hidden_size': width, 'num_attention_heads': heads,
            'intermediate_size': 4 * width, 'vocab_size': vocab, 'hidden_dropout_prob': 0.0,
            'attention_probs_dropout_prob': 0.0}
  return transformers.BertConfig(**(fields | overrides))


def make(architecture: str, folder: pathlib.Path, size: str = 'tiny', **overrides):
  """A model in evaluation mode, saved in `folder` with a vocabulary."""
  torch.manual_seed(0)
  model = getattr(transformers, architecture)(config(size, **overrides)).eval()
  with torch.no_grad():  # biases and norms away from 0 and 1, so that swaps show
    for name, tensor in model.named_parameters():
      if name.endswith('bias') or 'LayerNorm' in name:
        tensor.add_(0.05 * torch.randn(tensor.shape))
  model.save_pretrained(str(folder))
  write_vocab(folder, model.config.vocab_size)
  return model


def write_vocab(folder: pathlib.Path, size: int):
  words = [f'w{i}' for i in range(size - len(SPECIAL) - 37)]
  letters = [*'abcdefghijklmnopqrstuvwxyz0123456789', '##a']
  (folder / 'vocab.txt').write_text('\n'.join([*SPECIAL, *letters, *words]) + '\n')
  (folder / 'tokenizer_config.json').write_text('{"do_lower_case": true}')


def make_batch(vocab_size: int, rows: int, length: int, padded: bool, seed: int = 0) -> Tokens:
  """Random ids, two segments, and padding at the end of all rows but the first."""
  rng = np.random.default_rng(seed)
  used = np.full(rows, length)
  if padded:
    used[1:] = rng.integers(3, length, rows - 1)
  text_ids = (np.arange(length) < used[:, None]).astype(np.int32)
  ids = (rng.integers(5, vocab_size, (rows, length)) * text_ids).astype(np.int32)
  type_ids = ((np.arange(length) > length // 2) * text_ids).astype(np.int32)
  positions = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
  return Tokens(ids, type_ids, positions, text_ids)


def inputs(batch: Tokens) -> dict[str, torch.Tensor]:
  names = ('input_ids', 'token_type_ids', 'attention_mask')
  arrays = (batch.ids, batch.type_ids, batch.text_ids)
  return {name: torch.tensor(np.array(x), dtype=torch.long) for name, x in zip(names, arrays)}
