"""Models that amplify rounding: they are converted, and mistakes in them are still refused."""

import dataclasses
import json

from etils import epath
import jax
import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.interop import conversion, sentence_transformers, verify
from bert_jax.interop import load as load_lib
from bert_jax.interop.onnx_export import folder as onnx_folder
from bert_jax.interop.onnx_export import functions
from tests import made_tasks


@pytest.fixture(scope='module')
def deep(tmp_path_factory):
  """An encoder of 12 layers whose large weights multiply rounding in each layer."""
  folder = tmp_path_factory.mktemp('deep') / 'model'
  return made_tasks.model(folder, num_layers=12, initializer_range=0.8)


def test_the_last_bit_of_each_parameter_changes(deep):
  model = load_lib.load(deep)
  moved = verify.last_bits_changed(model)
  signs = []
  for a, b in zip(jax.tree.leaves(model.params), jax.tree.leaves(moved.params), strict=True):
    assert b.dtype == np.float32
    a, b = np.asarray(a).view(np.int32), b.view(np.int32)
    # Zero has the smallest numbers of both signs as neighbors.
    steps = np.where(a == 0, np.sign(b), b - a)
    assert set(np.unique(steps)) <= {-1, 1}
    signs.append(steps.ravel())
  assert abs(np.concatenate(signs).mean()) < 0.02  # as often up as down


def test_rounding_above_the_usual_is_no_mistake(deep, tmp_path, capsys):
  conversion.convert(deep, str(tmp_path / 'out'), 'huggingface')
  line = next(x for x in capsys.readouterr().out.splitlines() if 'from PyTorch' in x)
  worst = float(line.split()[-1])
  model = load_lib.load(deep)
  ours, moved = (verify._outputs(x) for x in (model, verify.last_bits_changed(model)))
  change = np.abs(ours['hidden states'] - moved['hidden states']).max()
  assert verify.TOLERANCE < worst < verify.largest_rounding(change, verify.TOLERANCE)
  assert verify.largest_rounding(change, 2e-5) == 4 * change
  assert verify.largest_rounding(1.0, 2e-5) == 1e-2  # the most, in any model


@pytest.mark.parametrize('change', [{'hidden_act': 'gelu_new'}, {'layer_norm_eps': 1e-3}])
def test_a_mistake_in_such_a_model_is_refused(deep, tmp_path, change):
  conversion.convert(deep, str(tmp_path / 'out'), 'huggingface')
  path = tmp_path / 'out/config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | change))
  model = load_lib.load(deep)
  theirs = verify._transformers_outputs(epath.Path(tmp_path / 'out'), model)
  with pytest.raises(UserError, match='PyTorch: the hidden states differ by'):
    list(verify.compare_outputs(verify._outputs(model), theirs, 'PyTorch',
                                lambda: verify._outputs(verify.last_bits_changed(model))))


def test_sentence_transformers_may_round_as_much(deep, tmp_path, monkeypatch):
  conversion.convert(deep, str(tmp_path / 'out'), 'sentence_transformers')
  model, folder = load_lib.load(str(tmp_path / 'out')), epath.Path(tmp_path / 'out')
  monkeypatch.setattr(verify, 'TOLERANCE', 1e-8)  # below the rounding of this model
  (name, result), = sentence_transformers.compare(model, folder)
  assert name == 'vectors' and 1e-8 < float(result.split()[-1]) < 1e-4
  monkeypatch.setattr(verify, '_FACTOR', 0)
  with pytest.raises(UserError, match='sentence-transformers: the vectors differ'):
    list(sentence_transformers.compare(model, folder))


def test_outputs_of_onnxruntime_that_are_nan_are_refused(tmp_path, monkeypatch):
  model, folder = load_lib.load(made_tasks.model(tmp_path / 'm')), epath.Path(tmp_path / 'out')
  onnx_folder.save(model, folder)
  session = onnx_folder.session

  class Broken:
    def __init__(self, path):
      self.run = lambda *inputs: [x * np.nan for x in session(path).run(*inputs)]

  monkeypatch.setattr(onnx_folder, 'session', Broken)
  with pytest.raises(UserError, match='differ by nan'):
    list(onnx_folder.compare(model, folder))


def test_onnxruntime_may_round_as_much(deep, tmp_path, monkeypatch):
  model, folder = load_lib.load(deep), epath.Path(tmp_path / 'out')
  onnx_folder.save(model, folder)
  monkeypatch.setattr(onnx_folder, 'TOLERANCE', 1e-6)  # below the rounding of this model
  results = [float(text.split()[-1]) for title, text in onnx_folder.compare(model, folder)
             if 'onnxruntime' in text]
  assert len(results) == 1 and 1e-6 < results[0] < 1e-2
  run = functions.function
  monkeypatch.setattr(functions, 'function', lambda model: run(dataclasses.replace(
      model, config=dataclasses.replace(model.config, layer_norm_eps=1e-3))))
  with pytest.raises(UserError, match='the last_hidden_state differ by'):
    list(onnx_folder.compare(model, folder))
