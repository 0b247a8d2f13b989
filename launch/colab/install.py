"""Installs bert_jax for the chip of a notebook's machine, and checks that JAX uses it."""

from collections.abc import Iterable, Mapping
import glob
from importlib import metadata
import os
import re
import signal
import subprocess
import sys
import time

_TPU_VARIABLES = ('COLAB_TPU_ADDR', 'TPU_ACCELERATOR_TYPE', 'TPU_CHIPS_PER_HOST_BOUNDS')
_BACKENDS = {'tpu': 'tpu', 'gpu': 'gpu', 'cuda12': 'gpu', '': 'cpu'}
_CUDA_PLUGINS = [
    f'jax-cuda{version}-{part}' for version in (12, 13) for part in ('plugin', 'pjrt')
]


def choose_extra(environ: Mapping[str, str], devices: Iterable[str],
                 nvidia_smi: str) -> str:
  """Returns the extra of pyproject.toml: tpu, gpu (CUDA 13), cuda12, or '' for a CPU.

  Args:
    environ: the environment variables.
    devices: the device files in /dev.
    nvidia_smi: the output of nvidia-smi.
  """
  if any(name in environ for name in _TPU_VARIABLES) or any(
      re.fullmatch(r'/dev/(accel|vfio/)\d+', device) for device in devices):
    return 'tpu'
  cuda = re.search(r'CUDA (?:UMD )?Version: *(\d+)', nvidia_smi)
  if not cuda:
    return ''
  return 'gpu' if int(cuda[1]) >= 13 else 'cuda12'


def _extra() -> str:
  try:
    nvidia_smi = subprocess.run(
        ['nvidia-smi'], capture_output=True, text=True, check=False).stdout
  except FileNotFoundError:
    nvidia_smi = ''
  return choose_extra(os.environ, glob.glob('/dev/accel*') + glob.glob('/dev/vfio/*'),
                      nvidia_smi)


def _versions() -> dict[str, str]:
  # Python imports the first of two packages with the same name. Reversed, the first one
  # wins here too, because it comes last.
  return {d.name.lower().replace('_', '-'): d.version
          for d in reversed(list(metadata.distributions()))}


def imported(names: Iterable[str]) -> set[str]:
  """Returns the packages among `names` of which this process has imported a module."""
  packages = metadata.packages_distributions()
  owners = {owner for module in list(sys.modules) for owner in packages.get(module, ())}
  return set(names) & {owner.lower().replace('_', '-') for owner in owners}


def install():
  """Installs bert_jax from this folder.

  Restarts the kernel if imported packages changed. This happens once, because the second
  call replaces nothing.
  """
  extra, before = _extra(), _versions()
  pip = [sys.executable, '-m', 'pip']
  subprocess.run([*pip, 'install', '--quiet', f'.[{extra}]' if extra else '.'],
                 check=True)
  after = _versions()
  # JAX would also load a plugin of another version, such as the one that Colab installs.
  left = [name for name in _CUDA_PLUGINS if after.get(name, after['jax']) != after['jax']]
  if left:
    subprocess.run([*pip, 'uninstall', '--quiet', '--yes', *left], check=True)
  changed = imported(name for name in before if before[name] != after.get(name))
  if changed:
    print('The kernel restarts, because it has older versions of '
          f'{", ".join(sorted(changed))} in memory. Run all cells again.', flush=True)
    time.sleep(1)  # so that the line reaches the page
    os.kill(os.getpid(), signal.SIGKILL)


def check_backend():
  """Prints the device that JAX runs on.

  Raises:
    RuntimeError: JAX does not use the chip of the machine. JAX_PLATFORMS=cpu selects the
      CPU.
  """
  import jax  # after install()
  expected = 'cpu' if os.environ.get('JAX_PLATFORMS') == 'cpu' else _BACKENDS[_extra()]
  backend, device = jax.default_backend(), jax.devices()[0].device_kind
  if backend != expected:
    raise RuntimeError(
        f'this machine has a {expected.upper()}, but JAX {jax.__version__} runs on '
        f'the {backend.upper()}: restart the runtime and run all cells again')
  if backend == 'cpu':
    print(f'JAX {jax.__version__} runs on the CPU, so this notebook is slow. On Colab, '
          'choose a TPU or GPU with Runtime > Change runtime type.')
  else:
    print(f'JAX {jax.__version__} runs on {jax.device_count()} x {device}.')
