"""A TensorFlow checkpoint with the published names gives the model that it came from."""

import json
import re
import sys

from etils import epath
import jax
import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.interop import huggingface
from bert_jax.interop import load as load_lib
from tests.interop import torch_bert

tf = pytest.importorskip('tensorflow')


def published_name(name: str) -> tuple[str, bool]:
  """google-research/bert's name of a tensor of transformers, and True if it is transposed there."""
  name = re.sub(r'layer\.(\d+)', r'layer_\1', name).replace('.', '/')
  name = name.replace('LayerNorm/weight', 'LayerNorm/gamma').replace('LayerNorm/bias',
                                                                    'LayerNorm/beta')
  if name.startswith('cls/seq_relationship'):
    return name.replace('weight', 'output_weights').replace('bias', 'output_bias'), False
  name = name.replace('predictions/bias', 'predictions/output_bias')
  if name.endswith('_embeddings/weight'):
    return name.removesuffix('/weight'), False
  if name.endswith('/weight'):
    return name.removesuffix('weight') + 'kernel', True
  return name, False


@pytest.fixture
def folders(tmp_path):
  """(the model as transformers saves it, the same as a TensorFlow checkpoint)."""
  theirs = torch_bert.make('BertForPreTraining', tmp_path / 'hf')
  folder = tmp_path / 'tf'
  folder.mkdir()
  variables = {}
  for name, x in theirs.named_parameters():
    name, transposed = published_name(name)
    variables[name] = tf.Variable(x.detach().numpy().T if transposed else x.detach().numpy())
    variables[f'{name}/adam_m'] = tf.Variable(np.zeros(2, np.float32))
  variables['global_step'] = tf.Variable(7)
  tf.raw_ops.SaveV2(
      prefix=str(folder / 'bert_model.ckpt'), tensor_names=list(variables),
      shape_and_slices=[''] * len(variables), tensors=[v.read_value() for v in variables.values()])
  torch_bert.write_vocab(folder, 1000)
  (folder / 'tokenizer_config.json').unlink()
  (folder / 'bert_config.json').write_text(json.dumps({
      'attention_probs_dropout_prob': 0.0, 'hidden_act': 'gelu', 'hidden_dropout_prob': 0.0,
      'hidden_size': 128, 'initializer_range': 0.02, 'intermediate_size': 512,
      'max_position_embeddings': 512, 'num_attention_heads': 2, 'num_hidden_layers': 2,
      'type_vocab_size': 2, 'vocab_size': 1000}))
  return tmp_path / 'hf', folder


def test_a_tensorflow_checkpoint_gives_the_same_parameters(folders):
  theirs, ours = huggingface.load(epath.Path(folders[0])), load_lib.load(str(folders[1]))
  assert ours.config == theirs.config and ours.groups == theirs.groups
  jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
  assert ours.tokenizer.lowercase


def test_bad_folders(folders, monkeypatch):
  folder = folders[1]
  config = (folder / 'bert_config.json').read_text()
  (folder / 'bert_config.json').write_text(config.replace('"intermediate_size": 512',
                                                          '"intermediate_size": 256'))
  with pytest.raises(UserError, match='but its config needs'):
    load_lib.load(str(folder))
  (folder / 'bert_config.json').write_text(config)
  data = next(folder.glob('*.data-*'))
  data.write_bytes(data.read_bytes()[:1000])
  with pytest.raises(UserError, match='cannot be read'):
    load_lib.load(str(folder))
  monkeypatch.setitem(sys.modules, 'tensorflow', None)
  with pytest.raises(UserError, match='pip install tensorflow-cpu'):
    load_lib.load(str(folder))
  for path in folder.glob('*.index'):
    path.unlink()
  monkeypatch.undo()
  with pytest.raises(UserError, match='contains 0 TensorFlow checkpoints'):
    load_lib.load(str(folder))
