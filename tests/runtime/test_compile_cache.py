"""The cache of compiled programs: its folder, its size, its users."""

import os

import jax
import pytest

from bert_jax.runtime import platforms


@pytest.fixture
def no_folder(tmp_path, monkeypatch):
  """JAX with the defaults of users, who name no folder; restores the settings afterwards."""
  names = ('jax_compilation_cache_dir', 'jax_persistent_cache_min_compile_time_secs')
  before = {name: getattr(jax.config, name) for name in names}
  jax.config.update('jax_compilation_cache_dir', None)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  yield tmp_path
  for name, value in before.items():
    jax.config.update(name, value)


def test_a_folder_of_ones_own_wins(no_folder):
  jax.config.update('jax_compilation_cache_dir', '/mine')
  platforms.keep_compiled()
  assert jax.config.jax_compilation_cache_dir == '/mine'
  assert not list(no_folder.iterdir())


def test_the_oldest_go(no_folder, monkeypatch):
  monkeypatch.setattr(platforms, '_MAX_CACHE_BYTES', 250)
  platforms.keep_compiled()
  folder = no_folder / 'bert_jax' / 'compiled' / platforms._machine()
  assert jax.config.jax_compilation_cache_dir == str(folder)
  for age in range(4):
    (folder / f'{age}-cache').write_bytes(bytes(100))
    os.utime(folder / f'{age}-cache', (1e9 - age, 1e9 - age))
  jax.config.update('jax_compilation_cache_dir', None)
  platforms.keep_compiled()
  assert sorted(path.name for path in folder.iterdir()) == ['0-cache', '1-cache']


def test_where_nothing_can_be_written_there_is_none(no_folder):
  (no_folder / 'bert_jax').write_text('a file')
  platforms.keep_compiled()
  assert jax.config.jax_compilation_cache_dir is None
