"""Compares logits, loss and gradients of BERT-base with PyTorch on the same device.

  python -m benchmarks.gpu_parity --output=parity.json

The reference is transformers' BERT in float32, without TF32. A distance is the norm of a
difference divided by the norm of the reference. In float32, with the highest precision,
the bound is 1e-4. In bfloat16 the bound is twice the distance of PyTorch's own bfloat16
autocast. cuDNN's attention runs only in bfloat16 on a GPU; elsewhere it is skipped. Exits
with 1 if logits or gradients exceed a bound. Needs torch and transformers.
"""

import dataclasses
import json
import sys
import tempfile

from absl import app, flags
from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from benchmarks import turns
from bert_jax.data.tokens import Tokens
from bert_jax.interop import families, huggingface, layout
from bert_jax.model.heads import BertForPreTraining
from bert_jax.objectives import losses

_OUTPUT = flags.DEFINE_string('output', None, 'JSON file.', required=True)
_LAYERS = flags.DEFINE_integer('layers', 12, 'Layers of the model. Its width is 64 times --heads.')
_HEADS = flags.DEFINE_integer('heads', 12, 'Of each layer.')
_LENGTHS = flags.DEFINE_multi_integer('length', [128, 512], 'Tokens in a row.')
_ROWS = flags.DEFINE_integer('rows', 8, 'Rows of the batch.')

_PATHS = {'float32': ('float32', 'xla'), 'bfloat16': ('bfloat16', 'xla'),
          'bfloat16, Triton': ('bfloat16', 'triton'),
          'bfloat16, cuDNN': ('bfloat16', 'cudnn')}


def _torch_model(folder: str, device: str):
  torch.manual_seed(0)
  width = 64 * _HEADS.value
  model = transformers.BertForPreTraining(transformers.BertConfig(
      num_hidden_layers=_LAYERS.value, num_attention_heads=_HEADS.value, hidden_size=width,
      intermediate_size=4 * width, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
  model.save_pretrained(folder)
  special = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']
  words = [f'w{i}' for i in range(model.config.vocab_size - len(special))]
  (epath.Path(folder) / 'vocab.txt').write_text('\n'.join([*special, *words]) + '\n')
  return model.to(device).eval()


def _arrays(length: int) -> dict[str, np.ndarray]:
  """Makes padded rows with labels, -100 at positions without a prediction."""
  rng, rows = np.random.default_rng(0), _ROWS.value
  real = np.arange(length) < rng.integers(length // 2, length + 1, (rows, 1))
  ids = np.where(real, rng.integers(5, 30_000, (rows, length)), 0)
  labels = np.where(real & (rng.random((rows, length)) < 0.15), ids, -100)
  labels[:, 1] = ids[:, 1]
  return {'ids': ids, 'real': real, 'labels': labels}


def _torch_results(model, arrays, device: str, half: bool) -> dict[str, np.ndarray]:
  tensors = {name: torch.from_numpy(x).to(device) for name, x in arrays.items()}
  model.zero_grad()
  with torch.autocast(device, dtype=torch.bfloat16, enabled=half):
    logits = model(tensors['ids'], tensors['real'].long()).prediction_logits
  chosen = tensors['labels'] >= 0
  loss = torch.nn.functional.cross_entropy(logits.float()[chosen], tensors['labels'][chosen])
  loss.backward()
  gradients = {families.BERT.canonical(name): x.grad for name, x in model.named_parameters()
               if x.grad is not None}
  return {'logits': logits.float()[tensors['real']].detach().cpu().numpy(),
          'loss': loss.item(), 'gradients': {name: x.float().cpu().numpy()
                                             for name, x in gradients.items()}}


def _results(model, arrays, dtype: str, path: str) -> dict[str, np.ndarray]:
  config = dataclasses.replace(model.config, dtype=dtype, attention=path)
  positions = np.broadcast_to(np.arange(arrays['ids'].shape[1]), arrays['ids'].shape)
  batch = Tokens(*(x.astype(np.int32) for x in (
      arrays['ids'], np.zeros_like(arrays['ids']), positions, arrays['real'])))
  labels = jnp.asarray(arrays['labels'])

  def loss(params):
    logits, _ = BertForPreTraining(config).apply(params, batch, batch.positions, None)
    total, count = losses.classification(logits, labels, labels >= 0)['loss']
    return total / count, logits

  with jax.default_matmul_precision('highest' if dtype == 'float32' else 'default'):
    (value, logits), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(model.params)
  return {'logits': np.asarray(logits, np.float32)[arrays['real']][:, :config.vocab_size],
          'loss': float(value), 'gradients': layout.to_tensors(gradient, config)}


def _distances(ours: dict, reference: dict) -> dict[str, float]:
  names = reference['gradients'].keys()
  stacked = [np.concatenate([np.ravel(x['gradients'][name]) for name in names])
             for x in (ours, reference)]
  pairs = {'logits': (ours['logits'], reference['logits']), 'gradients': stacked,
           'loss': (np.float64(ours['loss']), np.float64(reference['loss']))}
  return {name: float(np.linalg.norm(a - b) / np.linalg.norm(b)) for name, (a, b) in pairs.items()}


def main(_):
  """Compares every path at every length, and writes and prints the distances."""
  turns.busy()
  torch.set_float32_matmul_precision('highest')
  on_gpu = jax.default_backend() == 'gpu'
  device = 'cuda' if on_gpu else 'cpu'
  lines = []
  with tempfile.TemporaryDirectory() as folder:
    theirs = _torch_model(folder, device)
    ours = huggingface.load(epath.Path(folder))
    for length in _LENGTHS.value:
      arrays = _arrays(length)
      reference = _torch_results(theirs, arrays, device, half=False)
      half = _distances(_torch_results(theirs, arrays, device, half=True), reference)
      lines.append({'length': length, 'path': 'PyTorch, bfloat16', **half})
      for name, (dtype, path) in _PATHS.items():
        if path == 'cudnn' and not on_gpu:
          continue
        distances = _distances(_results(ours, arrays, dtype, path), reference)
        bounds = {x: 1e-4 if dtype == 'float32' else 2 * half[x] for x in distances}
        within = all(distances[x] <= bounds[x] for x in ('logits', 'gradients'))
        lines.append({'length': length, 'path': name, **distances, 'within': within})
  for line in lines:
    print(json.dumps(line), flush=True)
  epath.Path(_OUTPUT.value).write_text(json.dumps(lines, indent=1))
  sys.exit(not all(line.get('within', True) for line in lines))


if __name__ == '__main__':
  app.run(main)
