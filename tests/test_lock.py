"""The .lock files meet the requirements and have a hash for every file."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def pins(name):
  return re.findall(r'^([\w.-]+)(?:\[\w+\])?==([\w.]+)', (ROOT / name).read_text(), re.M)


@pytest.mark.parametrize('name', ['requirements', 'requirements-tpu', 'requirements-gpu'])
def test_the_lock_has_the_pinned_versions(name):
  pinned = [*pins('requirements.txt'), *pins(f'{name}.txt')]
  locked = pins(f'{name}.lock')
  assert len(pinned) > 20
  names = {(package.lower().replace('_', '-'), version) for package, version in pinned}
  assert names <= set(locked)


@pytest.mark.parametrize('name', ['requirements', 'requirements-tpu', 'requirements-gpu'])
def test_every_locked_package_has_hashes(name):
  entries = re.split(r'^(?=[\w.-]+==)', (ROOT / f'{name}.lock').read_text(), flags=re.M)[1:]
  assert len(entries) > 60
  for entry in entries:
    assert re.search(r'--hash=sha256:[0-9a-f]{64}\b', entry), entry.splitlines()[0]


def test_the_tests_use_the_libtpu_of_a_tpu_vm():
  def compilers(name):
    return set(re.findall(r'^libtpu==([\d.]+) ; python_(?:full_)?version (<|>=) .3\.12',
                          (ROOT / name).read_text(), re.M))

  tested = compilers('requirements-test.txt')
  assert len(tested) == 2 and tested == compilers('requirements-tpu.lock')
