"""Runs each notebook from top to bottom in its own kernel, with small sizes."""

import json
import pathlib
import re
import shutil
import subprocess

import jupyter_client
from jupyter_client import kernelspec
import nbclient
import nbformat
import pytest

from launch.colab import install
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
def test_notebooks_are_committed_without_outputs(path):
  notebook = nbformat.read(path, as_version=4)
  nbformat.validate(notebook)
  code = [cell for cell in notebook.cells if cell.cell_type == 'code']
  assert len(code) >= 4 and not any(cell.outputs or cell.execution_count for cell in code)


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_open_on_a_tpu_with_the_same_first_cells(path):
  notebook, first = (nbformat.read(p, as_version=4) for p in (path, NOTEBOOKS[0]))
  assert notebook.metadata.accelerator == 'TPU' and notebook.metadata.colab.gpuType == 'V5E1'
  code = [[cell.source for cell in n.cells if cell.cell_type == 'code'] for n in (notebook, first)]
  assert code[0][:2] == code[1][:2] and 'install.check_backend()' in code[0][1]
  assert [cell.source.count('REPOSITORY = ') for cell in notebook.cells].count(1) == 1
  assert not any('OWNER' in cell for cell in code[0][1:])


def test_a_placeholder_address_is_an_error(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('COLAB_RELEASE_TAG', 'release')
  notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
  cell = next(cell.source for cell in notebook.cells if cell.cell_type == 'code')
  with pytest.raises(ValueError, match='REPOSITORY is a placeholder: set it to the address of'):
    exec(cell, {})
  assert not list(tmp_path.iterdir())


# The output of nvidia-smi of drivers 550, 580 and 610, and of one without its driver.
SMI = '| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: {}     |'
NEW_SMI = '| NVIDIA-SMI 610.43.02    KMD Version: 610.43.02    CUDA UMD Version: {}     |'
NO_DRIVER = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."


@pytest.mark.parametrize('environ, devices, nvidia_smi, extra', [
    ({}, (), '', ''),
    ({'TPU_ML_PLATFORM': 'JAX', 'COLAB_GPU': ''}, ('/dev/vfio/vfio', '/dev/accel'), NO_DRIVER, ''),
    ({'TPU_ACCELERATOR_TYPE': 'v5e-1'}, (), '', 'tpu'),
    ({'COLAB_TPU_ADDR': '10.0.0.1:8470'}, (), '', 'tpu'),
    ({}, ('/dev/accel0',), '', 'tpu'),
    ({}, ('/dev/vfio/vfio', '/dev/vfio/0'), '', 'tpu'),
    ({}, (), SMI.format('12.4'), 'cuda12'),
    ({}, (), SMI.format('13.0'), 'gpu'),
    ({}, (), NEW_SMI.format('13.2'), 'gpu'),
])
def test_the_extra_matches_the_chip(environ, devices, nvidia_smi, extra):
  assert install.choose_extra(environ, devices, nvidia_smi) == extra
  assert not extra or f'\n{extra} = ["jax[' in (ROOT / 'pyproject.toml').read_text()


def test_imported_packages_are_found_among_names():
  assert install.imported(['numpy', 'jax', 'tensorboardx-of-no-one', 'pip']) >= {'numpy', 'jax'}
  assert not install.imported(['tensorboardx-of-no-one'])


@pytest.mark.parametrize('extra, backend, error', [
    ('tpu', 'tpu', None), ('cuda12', 'gpu', None), ('', 'cpu', None),
    ('tpu', 'cpu', 'this machine has a TPU, but JAX [0-9.]+ runs on the CPU'),
    ('gpu', 'cpu', 'this machine has a GPU, but JAX [0-9.]+ runs on the CPU')])
def test_an_unused_chip_is_an_error_and_a_cpu_prints_a_note(monkeypatch, capsys, extra, backend,
                                                            error):
  monkeypatch.delenv('JAX_PLATFORMS')
  monkeypatch.setattr(install, '_extra', lambda: extra)
  monkeypatch.setattr('jax.default_backend', lambda: backend)
  if error:
    with pytest.raises(RuntimeError, match=error):
      install.check_backend()
    return
  install.check_backend()
  output = capsys.readouterr().out
  assert ('runs on the CPU, so this notebook is slow' in output) == (backend == 'cpu')


# The packages of Colab's TPU runtime of August 2026 (Python 3.13) that matter to bert_jax.
FREEZE = ('jax==0.7.2', 'jaxlib==0.7.2', 'libtpu==0.0.21.1', 'flax==0.11.2', 'optax==0.2.8',
          'orbax-checkpoint==0.12.4', 'numpy==2.1.3', 'absl-py==1.4.0',
          'tensorflow-datasets==4.9.10', 'matplotlib', 'ipykernel')
VERSIONS = """
import json, re
from importlib import metadata
pins = [r for r in metadata.requires('jax') if re.match(r'libtpu.*extra == .tpu.', r)]
print(json.dumps([pins] + [metadata.version(n) for n in ('jax', 'jaxlib', 'libtpu')]))
"""


@pytest.fixture(scope='module')
def colab(tmp_path_factory):
  """A machine like Colab's: (Python of its environment, address of a repository)."""
  folder = tmp_path_factory.mktemp('colab')
  completed = subprocess.run(['python3.13', '-m', 'venv', folder / 'env'], check=False)
  if completed.returncode:
    pytest.skip('Colab has Python 3.13, and this machine has not')
  python = str(folder / 'env/bin/python')
  subprocess.run([python, '-m', 'pip', 'install', '--quiet', *FREEZE], check=True)
  repository = folder / 'repository'
  shutil.copytree(ROOT, repository, ignore=shutil.ignore_patterns('.*', '__pycache__', 'runs'))
  for command in (['init', '--quiet'], ['add', '.'],
                  ['-c', 'user.name=a', '-c', 'user.email=a@b', 'commit', '--quiet', '-m', 'All']):
    subprocess.run(['git', *command], cwd=repository, check=True)
  return python, f'file://{repository}'


def begin_on_colab(folder, python: str, repository: str, **environ) -> tuple[str, str]:
  """The output of the first cells of a notebook, and their error, if any.

  They run in a kernel that has imported numpy, like Colab's kernel.
  """
  spec = {'argv': [python, '-m', 'ipykernel_launcher', '-f', '{connection_file}'],
          'display_name': 'colab', 'language': 'python',
          'env': {'COLAB_RELEASE_TAG': 'release', **environ}}
  (folder / 'kernels/colab').mkdir(parents=True, exist_ok=True)
  (folder / 'kernels/colab/kernel.json').write_text(json.dumps(spec))
  manager = jupyter_client.AsyncKernelManager(
      kernel_name='colab',
      kernel_spec_manager=kernelspec.KernelSpecManager(kernel_dirs=[str(folder / 'kernels')]))
  notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
  first, second = [cell for cell in notebook.cells if cell.cell_type == 'code'][:2]
  first.source = 'import numpy\n' + re.sub('(?m)^REPOSITORY = .*',
                                          f'REPOSITORY = {repository!r}', first.source)
  notebook.cells = [first, second]
  (folder / 'content').mkdir(exist_ok=True)
  client = nbclient.NotebookClient(notebook, km=manager, timeout=1200,
                                   resources={'metadata': {'path': folder / 'content'}})
  error = ''
  try:
    client.execute()
  except (nbclient.exceptions.DeadKernelError, nbclient.exceptions.CellExecutionError) as e:
    error = re.sub(r'\x1b\[\d*m', '', str(e)).strip().splitlines()[-1]
  return text_of(first.outputs + second.outputs), error


@pytest.mark.slow
def test_on_colab_the_notebook_installs_jax_for_the_chip(colab, tmp_path, monkeypatch):
  python, repository = colab
  for name in ('JAX_PLATFORMS', 'XLA_FLAGS'):  # the flags are for this process' jaxlib
    monkeypatch.delenv(name)
  tpu = {'TPU_ACCELERATOR_TYPE': 'v5e-1'}
  output, error = begin_on_colab(tmp_path, python, repository, **tpu)
  assert error == 'Kernel died'
  restarts = 'The kernel restarts, because it has older versions of '
  assert re.search(rf'^{restarts}(.*, )?numpy(, .*)? in memory', output,
                   re.M)
  output, error = begin_on_colab(tmp_path, python, repository, **tpu)
  assert restarts not in output  # the machine has no real chip, so JAX runs on the CPU
  assert re.match('RuntimeError: this machine has a TPU, but JAX .* runs on the CPU', error)
  result = subprocess.run([python, '-c', VERSIONS], capture_output=True, text=True, check=True)
  (pin,), jax, jaxlib, libtpu = json.loads(result.stdout)
  assert jax == jaxlib != '0.7.2'
  assert libtpu.startswith(re.match(r'libtpu==([\d.]+)\.\*', pin)[1] + '.')
  subprocess.run([python, '-m', 'pip', 'check'], check=True)
  output, error = begin_on_colab(tmp_path, python, repository)
  assert not error and f'JAX {jax} runs on the CPU, so this notebook is slow' in output


@pytest.fixture(scope='module')
def pretrained(tmp_path_factory):
  """The files of the first notebook, and its outputs."""
  workdir = str(tmp_path_factory.mktemp('notebooks') / 'tiny')
  return workdir, execute('pretrain', STEPS=20, WORKDIR=workdir)


@pytest.mark.slow
def test_the_pretraining_notebook_runs(pretrained):
  workdir, outputs = pretrained
  assert (pathlib.Path(workdir) / 'checkpoints/20').exists() and images(outputs) == 1
  assert len(re.findall(r'^  \S+ +[\d.]+%$', text_of(outputs), re.M)) == 10  # candidates


@pytest.mark.slow
def test_the_exploring_notebook_runs(pretrained):
  outputs = execute('explore', MODEL=pretrained[0])
  assert images(outputs) == 1
  assert any('<html' in o.get('data', {}).get('text/html', '') for o in outputs)
  layers = re.findall(r'^ +(\d+) +(-?[\d.]+) +(-?[\d.]+) +(-?[\d.]+)$', text_of(outputs), re.M)
  assert [layer for layer, *_ in layers] == ['0', '1', '2']  # the embeddings and two layers
  _, same, other, elsewhere = layers[0]
  assert same == other == '1.00' and float(elsewhere) < 1  # the embedding includes the position


@pytest.mark.slow
def test_the_fine_tuning_notebook_runs(tmp_path):
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
