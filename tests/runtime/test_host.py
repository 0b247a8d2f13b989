"""The host: whether bfloat16 is fast, and how much freed memory a run keeps."""

import json
import subprocess
import sys

import pytest

from bert_jax.runtime import host

_CODE = """
import json
import numpy as np
from etils import epath
from bert_jax.runtime import host

def resident():
  return int(epath.Path('/proc/self/statm').read_text().split()[1]) * 4096

def step(megabytes):  # then records the memory that is held
  big = np.ones(megabytes * 125_000)
  above = np.ones(10_000)  # what keeps the end of the heap in place
  del big
  memory.after_step()
  held.append(resident() / 1e6)
  return above

host.keep_freed_memory()
memory, held = host.FreedMemory(), []
model = np.ones(10_000_000)  # 80 MB: the steps below are large beside other memory
above = [step(1) for _ in range(3)]
unit = int(resident() / 1e6)
above += [step(unit // 8)] + [step(2 * unit) for _ in range(6)]
host._MOST_OF_MACHINE = 0
above.append(step(unit // 4))
print(json.dumps([unit] + held))
"""


def test_freed_memory_is_kept_up_to_a_limit():
  done = subprocess.run([sys.executable, '-c', _CODE], check=True, text=True, capture_output=True)
  unit, *held = json.loads(done.stdout)
  assert 1.1 * unit < held[3] < 1.2 * unit, 'an eighth more than the first steps needed'
  # Three times as much is returned until the limit has grown to it (1.25, 1.6, 2.0, 2.4, 3.1).
  assert max(held[4:9]) < 1.1 * unit
  assert 2.8 * unit < held[9] < 3.1 * unit
  assert held[10] < 1.1 * unit, 'no part of the machine is left'


@pytest.mark.parametrize('flags, version, is_fast', [
    ('flags : fpu avx512f avx512_bf16', '0.12.0.1', True), ('flags : amx_bf16', '0.11.0', True),
    ('flags : amx_bf16', '0.10.2', False), ('flags : fpu avx512f', '1.0.0', False)])
def test_bfloat16_is_fast_with_cpu_instructions_and_a_new_jax(monkeypatch, flags, version, is_fast):
  monkeypatch.setattr(host.pathlib.Path, 'read_text', lambda path: flags)
  monkeypatch.setattr(host.importlib.metadata, 'version', lambda package: version)
  assert host.has_fast_bfloat16() == is_fast
