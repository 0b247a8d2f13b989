"""The platform that JAX computes on."""

import jax
import pytest

from bert_jax.errors import UserError
from bert_jax.runtime import platforms


@pytest.mark.parametrize('nvidia, expected', [(True, 'cuda'), (False, 'rocm')])
def test_platform_gpu_selects_the_installed_kind_of_gpu(monkeypatch, nvidia, expected):
  device_files = '/dev/nvidia[0-9]*' if nvidia else '/dev/kfd'
  updates = []
  monkeypatch.setattr(platforms.glob, 'glob', lambda pattern: [pattern] * (pattern == device_files))
  monkeypatch.setattr(jax.config, 'update', lambda name, value: updates.append((name, value)))
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  platforms.select_platform('gpu')
  assert updates == [('jax_platforms', expected)]


# The first line of the file, with the closed and with the open driver.
VERSIONS = ('NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Wed Sep  6 19:13:39 UTC 2023\n',
            'NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build\n')


@pytest.fixture
def jax_platforms():
  """Sets the option of JAX as the variable JAX_PLATFORMS would."""
  before = jax.config.jax_platforms
  yield lambda value: jax.config.update('jax_platforms', value)
  jax.config.update('jax_platforms', before)


def test_jax_platforms_cpu_is_respected(monkeypatch, jax_platforms):
  """Even on a machine with an accelerator."""
  monkeypatch.setattr(platforms.host, 'has_accelerator', lambda: True)
  jax_platforms('cpu')
  platforms.select_platform('auto')


@pytest.mark.parametrize('version', VERSIONS)
@pytest.mark.parametrize('driver, plugin, message', [
    ('535.104.05', 'jax_cuda13_plugin', "the NVIDIA driver 535.104.05 is older than 580: install "
     "'.[cuda12]', which needs 525, or a newer driver"),
    ('470.82.01', 'jax_cuda12_plugin',
     'the NVIDIA driver 470.82.01 is older than 525: install a newer driver'),
    ('580.65.06', 'jax_cuda13_plugin', 'install requirements-tpu.txt'),
    ('', 'jax_cuda13_plugin', 'install requirements-tpu.txt')])
def test_an_unused_accelerator_is_an_error_that_names_an_old_driver(
    monkeypatch, jax_platforms, tmp_path, version, driver, plugin, message):
  jax_platforms(None)
  if driver:
    (tmp_path / 'version').write_text(version.format(driver))
  monkeypatch.setattr(platforms, '_NVIDIA', tmp_path / 'version')
  monkeypatch.setattr(platforms.importlib.util, 'find_spec', lambda name: name == plugin or None)
  monkeypatch.setattr(platforms.host, 'has_accelerator', lambda: True)
  with pytest.raises(UserError) as error:
    platforms.select_platform('auto')
  assert str(error.value).startswith(
      f'this machine has an accelerator, but JAX finds only CPUs: {message}')
