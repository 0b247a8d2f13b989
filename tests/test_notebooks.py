"""The notebooks, from top to bottom in a kernel of their own, at a small size."""

import pathlib
import re

import nbclient
import nbformat
import pytest

from tests import made_tasks

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / 'launch/colab').glob('*.ipynb'))


def execute(name: str, **values) -> list:
  """Runs a notebook with other values of its variables; returns the outputs of its cells."""
  notebook = nbformat.read(ROOT / f'launch/colab/{name}.ipynb', as_version=4)
  for variable, value in values.items():
    changed = 0
    for cell in notebook.cells:
      if cell.cell_type == 'code':
        cell.source, count = re.subn(rf'(?m)^{variable} = .*', lambda _: f'{variable} = {value!r}',
                                     cell.source)
        changed += count
    assert changed == 1, variable
  nbclient.NotebookClient(notebook, timeout=600, resources={'metadata': {'path': ROOT}}).execute()
  return [output for cell in notebook.cells if cell.cell_type == 'code' for output in cell.outputs]


def text_of(outputs) -> str:
  return '\n'.join(o.get('text', '') for o in outputs)


def images(outputs) -> int:
  return sum('image/png' in o.get('data', {}) for o in outputs)


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_without_outputs(path):
  notebook = nbformat.read(path, as_version=4)
  nbformat.validate(notebook)
  code = [cell for cell in notebook.cells if cell.cell_type == 'code']
  assert len(code) >= 4 and not any(cell.outputs or cell.execution_count for cell in code)


@pytest.fixture(scope='module')
def pretrained(tmp_path_factory):
  """What the first notebook leaves, and its outputs."""
  workdir = str(tmp_path_factory.mktemp('notebooks') / 'tiny')
  return workdir, execute('pretrain', STEPS=20, WORKDIR=workdir)


@pytest.mark.slow
def test_pretrain(pretrained):
  workdir, outputs = pretrained
  assert (pathlib.Path(workdir) / 'checkpoints/20').exists() and images(outputs) == 1
  assert len(re.findall(r'^  \S+ +[\d.]+%$', text_of(outputs), re.M)) == 10  # candidates


@pytest.mark.slow
def test_explore(pretrained):
  outputs = execute('explore', MODEL=pretrained[0])
  assert images(outputs) == 1
  assert any('<html' in o.get('data', {}).get('text/html', '') for o in outputs)
  layers = re.findall(r'^ +(\d+) +(-?[\d.]+) +(-?[\d.]+)$', text_of(outputs), re.M)
  assert [layer for layer, _, _ in layers] == ['0', '1', '2']  # the embeddings and two layers


@pytest.mark.slow
def test_finetune(tmp_path):
  text = pathlib.Path(made_tasks.sequences(tmp_path / 'made.tsv', 200)).read_text()
  lines = [line.split('\t') for line in text.splitlines()[1:]]
  (tmp_path / 'sst.tsv').write_text('sentence\tlabel\n' + ''.join(
      f'{text}\t{int(label == "yes")}\n' for text, label, _ in lines))
  (tmp_path / 'model').mkdir()
  notebook = {'MODEL': made_tasks.model(tmp_path / 'model', max_positions=128), 'EPOCHS': 1.0,
              'WORKDIR': str(tmp_path / 'run')}
  data = (str(tmp_path / 'sst.tsv'),) * 2
  outputs = execute('finetune', **notebook, **{'TRAIN, EVAL': data})
  assert images(outputs) == 1
  assert len(re.findall(r'^(?:positive|negative) +[\d.]+%', text_of(outputs), re.M)) == 2
  assert (tmp_path / 'run/huggingface/model.safetensors').exists()
