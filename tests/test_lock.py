"""requirements.lock is what requirements.txt asks for, with a hash for every file."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent


def test_the_lock_has_the_pins():
  pins = re.findall(r'^([\w.-]+)==([\w.]+)', (ROOT / 'requirements.txt').read_text(), re.M)
  locked = re.findall(r'^([\w.-]+)==([\w.]+)', (ROOT / 'requirements.lock').read_text(), re.M)
  assert len(pins) > 20
  assert {(name.lower().replace('_', '-'), version) for name, version in pins} <= set(locked)


def test_every_locked_package_has_hashes():
  entries = re.split(r'^(?=[\w.-]+==)', (ROOT / 'requirements.lock').read_text(), flags=re.M)[1:]
  assert len(entries) > 60
  for entry in entries:
    assert re.search(r'--hash=sha256:[0-9a-f]{64}\b', entry), entry.splitlines()[0]
