"""The cache of compiled programs: its folder, its size, its users."""

import errno
import os
import pathlib
import warnings

from etils import epath
import jax
from jax.experimental.compilation_cache import compilation_cache
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


def test_a_folder_that_the_user_sets_wins(no_folder):
  jax.config.update('jax_compilation_cache_dir', '/mine')
  platforms.keep_compiled()
  assert jax.config.jax_compilation_cache_dir == '/mine'
  assert not list(no_folder.iterdir())


def test_the_oldest_programs_are_deleted(no_folder, monkeypatch):
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


def test_without_a_writable_folder_there_is_no_cache(no_folder):
  (no_folder / 'bert_jax').write_text('a file')
  platforms.keep_compiled()
  assert jax.config.jax_compilation_cache_dir is None


@pytest.fixture
def compiled(no_folder):
  """Compiles a program as a new process does, and returns the file that keeps it."""
  names = ('jax_persistent_cache_min_compile_time_secs',
           'jax_persistent_cache_min_entry_size_bytes')
  before = {name: getattr(jax.config, name) for name in names}
  platforms.keep_compiled()
  for name, value in zip(names, (0, -1)):
    jax.config.update(name, value)
  compilation_cache.reset_cache()

  def compiled():
    jax.clear_caches()
    jax.jit(lambda x: x * 2 + 1).lower(jax.ShapeDtypeStruct((3,), 'float32')).compile()
    return next(no_folder.rglob('*-cache'), None)

  yield compiled
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


@pytest.mark.parametrize('cut', [lambda content: b'', lambda content: content[:-9],
                                 lambda content: b'other' + content])
def test_a_truncated_program_is_compiled_again(compiled, cut):
  """A kill leaves such a file. JAX alone would warn at every start and never replace it."""
  path = compiled()
  with warnings.catch_warnings(record=True) as warned:
    platforms.keep_compiled()
    for _ in range(2):
      broken = cut(path.read_bytes())
      path.write_bytes(broken)
      assert compiled() == path and path.read_bytes() != broken
  assert warned == []


def test_a_cache_on_a_full_disk_prints_one_line(compiled, capfd, monkeypatch):
  write = type(epath.Path('/')).write_bytes

  def full(path, content):
    write(path, content[:9])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(type(epath.Path('/')), 'write_bytes', full)
  monkeypatch.setattr(pathlib.Path, 'write_bytes', full)
  with warnings.catch_warnings(record=True) as warned:
    platforms.keep_compiled()
    assert compiled() is None  # no part of it stays
  assert warned == [] and capfd.readouterr().out == (
      '  note            a compiled program is not cached: OSError: [Errno 28] No '
      'space left on device\n')
