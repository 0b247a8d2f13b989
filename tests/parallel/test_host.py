import subprocess
import sys

_CODE = """
import numpy as np
from etils import epath
from bert_jax.parallel import host

def resident():
  return int(epath.Path('/proc/self/statm').read_text().split()[1]) * 4096

host.keep_freed_memory()
before = resident()
big = np.ones(25_000_000)  # 200 MB
above = np.ones(1_000_000)  # what keeps the end of the heap in place
del big
kept = resident() - before
host.give_back_memory()
assert resident() - before == kept, 'given back although there is plenty'
host._MOST = 0
host.give_back_memory()
print(kept, resident() - before)
"""


def test_freed_memory_is_kept_until_it_is_half_of_the_machines():
  kept, left = map(int, subprocess.run([sys.executable, '-c', _CODE], check=True, text=True,
                                       capture_output=True).stdout.split())
  assert 200e6 < kept < 230e6
  assert left < 30e6
