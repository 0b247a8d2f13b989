"""int8: the table has the true accuracy of both files, and --most_lost is enforced."""

import logging
import re
import subprocess
import sys

from etils import epath
import numpy as np
import onnx
import pytest

from bert_jax.errors import UserError
from bert_jax.evaluation import quantized, task_scores
from bert_jax.evaluation.quantized import Texts
from bert_jax.inference import bert as bert_lib
from bert_jax.interop import conversion, load
from bert_jax.interop.onnx_export import folder
from tests import made_tasks
from tests.interop import test_onnx
from tests.test_commands import ROOT


def written(model, path):
  folder.save(folder.exported(model), epath.Path(path))
  return epath.Path(path)


def test_the_accuracy_of_a_classifier(tmp_path, capsys):
  source = made_tasks.with_head(tmp_path / 'model', 'sequence_classification', ('no', 'yes'))
  data = made_tasks.sequences(tmp_path / 'dev.tsv', 200)
  model = load.load(source)
  out = written(model, tmp_path / 'out')
  quantized.quantize(model, Texts(model, source, data), out, most_lost=1.0)
  assert logging.getLogger().isEnabledFor(logging.WARNING)  # as before the call
  table = capsys.readouterr().out
  whole, short = map(float, re.search(r'accuracy +([\d.]+), ([\d.]+)', table).groups())
  scores = task_scores.evaluate(bert_lib.load(source), data, None).facts
  assert whole == pytest.approx(scores['accuracy'], abs=1e-4) and abs(whole - short) < 0.1
  sizes = [(out / name).stat().length for name in (folder.FILE, folder.QUANTIZED)]
  assert sizes[1] < sizes[0]
  weights = [x for x in onnx.load(str(out / folder.QUANTIZED)).graph.initializer
             if x.data_type == onnx.TensorProto.INT8]
  assert len(weights) >= 2 * 4  # of each layer: qkv, out, up, down


@pytest.mark.parametrize('kind', ['embedder', 'masked_lm', 'token_classification'])
def test_the_cosine_of_outputs(kind, tmp_path, capsys):
  model = folder.exported(test_onnx.make('bert', kind))
  out = written(model, tmp_path / 'out')
  (tmp_path / 'texts.jsonl').write_text('{"text": "w1 w2 good"}\n{"text": "n1 is bad ."}\n')
  quantized.quantize(model, Texts(model, 'model', str(tmp_path / 'texts.jsonl')), out,
                     most_lost=0.2)
  mean, least = map(float, re.search(r'cosine +1, ([\d.]+) \(least (-?[\d.]+)\)',
                                     capsys.readouterr().out).groups())
  assert 0.8 < mean < 1 and least <= mean
  with pytest.raises(UserError, match='of the cosine, more than --most_lost=0: nothing is kept'):
    quantized.quantize(model, Texts(model, 'model'), out, most_lost=0)
  assert not (out / folder.QUANTIZED).exists() and (out / folder.FILE).exists()


def test_the_output_that_loses_most_counts(tmp_path, capsys, monkeypatch):
  model = folder.exported(test_onnx.make('bert', 'question_answering'))
  out = written(model, tmp_path / 'out')
  opposite = {'start_logits': -1.0, 'end_logits': 1.0}
  monkeypatch.setattr(quantized, '_run', lambda path, texts, output, _: (
      np.ones((2, 3)) * (opposite[output] if str(path).endswith(folder.QUANTIZED) else 1.0), 0.1))
  quantized.quantize(model, Texts(model, 'model'), out, most_lost=2.0)
  assert 'cosine          1, -1.000000 ' in capsys.readouterr().out


def test_single_numbers_are_compared_together(tmp_path, capsys, monkeypatch):
  """The cosine of two numbers alone is 1, whatever int8 makes of them."""
  model = folder.exported(test_onnx.make('bert', 'embedder'))
  out = written(model, tmp_path / 'out')
  results = iter([(np.array([[1.0], [2.0]]), 0.1), (np.array([[1.0], [4.0]]), 0.1)])
  monkeypatch.setattr(quantized, '_run', lambda *_: next(results))
  quantized.quantize(model, Texts(model, 'model'), out, most_lost=1.0)
  expected = (1 * 1 + 2 * 4) / (1 + 4) ** 0.5 / (1 + 16) ** 0.5
  assert f'cosine          1, {expected:.6f} ' in capsys.readouterr().out


def test_models_and_files_without_comparable_texts_are_refused(tmp_path):
  choices = folder.exported(test_onnx.make('bert', 'multiple_choice'))
  with pytest.raises(UserError, match='is not for multiple choice'):
    Texts(choices, 'model')
  (tmp_path / 'empty.jsonl').write_text('\n')
  with pytest.raises(UserError, match='empty.jsonl holds no example'):
    Texts(folder.exported(test_onnx.make('bert', 'embedder')), 'model',
          str(tmp_path / 'empty.jsonl'))


def test_an_int8_file_that_loses_too_much_replaces_nothing(tmp_path):
  source, out = made_tasks.model(tmp_path / 'model'), tmp_path / 'out'
  conversion.convert(source, str(out), 'onnx')
  before = (out / folder.FILE).read_bytes()

  def refuse(directory):
    assert directory != out and (directory / folder.FILE).exists()
    raise UserError('int8 loses too much')

  for target, overwrite in ((out, True), (tmp_path / 'new', False)):
    with pytest.raises(UserError, match='int8 loses too much'):
      conversion.convert(source, str(target), 'onnx', overwrite=overwrite, finish=refuse)
  assert (out / folder.FILE).read_bytes() == before
  assert sorted(path.name for path in tmp_path.iterdir()) == ['model', 'out']


def test_a_mistake_in_the_examples_ends_the_command_before_it_writes(tmp_path):
  source = made_tasks.with_head(tmp_path / 'model', 'sequence_classification', ('no', 'yes'))
  (tmp_path / 'dev.tsv').write_text('text\tlabel\nw1 good\tmaybe\nw2\tyes\n')
  done = subprocess.run(
      [sys.executable, '-m', 'bert_jax.convert', f'--input={source}',
       f'--output={tmp_path / "out"}', '--to=onnx', '--quantize=int8',
       f'--eval={tmp_path / "dev.tsv"}'], cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 2 and done.stderr.count('\n') == 1
  assert "dev.tsv, line 2: the label 'maybe' is none of the 2 labels: no, yes" in done.stderr
  assert not (tmp_path / 'out').exists()


def test_fields_are_refused_without_a_classifier():
  model = folder.exported(test_onnx.make('bert', 'embedder'))
  with pytest.raises(UserError, match='--fields has no effect here'):
    Texts(model, 'model', 'x', ['format=glue/sst2'])
