"""Lists packages, devices and driver.

  python -m benchmarks.gpu_versions --output=versions.json
"""

import importlib.metadata
import json
import subprocess
import sys

from absl import app, flags
from etils import epath
import jax

_OUTPUT = flags.DEFINE_string('output', None, 'JSON file.', required=True)
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy', 'torch', 'transformers')


def main(_):
  """Writes and prints the versions."""
  versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
  versions |= {'python': sys.version, 'devices': [x.device_kind for x in jax.devices()]}
  if jax.default_backend() == 'gpu':
    versions['driver'] = subprocess.run(
        ['nvidia-smi', '--query-gpu=name,driver_version,memory.total', '--format=csv,noheader'],
        capture_output=True, text=True, check=True).stdout.strip()
  epath.Path(_OUTPUT.value).write_text(json.dumps(versions, indent=1))
  print(json.dumps(versions), flush=True)


if __name__ == '__main__':
  app.run(main)
