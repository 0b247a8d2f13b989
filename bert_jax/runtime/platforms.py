"""The platform that JAX computes on."""

import glob

import jax

from bert_jax import errors
from bert_jax.errors import UserError
from bert_jax.runtime import host

PLATFORMS = ('auto', 'cpu', 'gpu', 'tpu')


def select_platform(platform: str):
  """Makes JAX use `platform`; raises UserError if it is unknown or has no device here."""
  errors.require_choice('platform', platform, PLATFORMS)
  if platform != 'auto':
    # One name alone: with several, JAX demands them all.
    gpu = 'cuda' if glob.glob('/dev/nvidia[0-9]*') or not glob.glob('/dev/kfd') else 'rocm'
    jax.config.update('jax_platforms', gpu if platform == 'gpu' else platform)
  try:
    backend = jax.default_backend()
  except (RuntimeError, AssertionError) as e:  # CUDA's plugin asserts, without a message
    raise UserError(f'platform={platform!r} has no device here: {e}'.rstrip(': ')) from e
  if platform == 'auto' and backend == 'cpu' and host.has_accelerator():
    raise UserError('there is an accelerator here, but JAX finds only CPUs: install '
                    'requirements-tpu.txt or requirements-gpu.txt (or another process holds it), '
                    'or give --config.platform=cpu')
  if platform not in ('auto', backend):
    raise UserError(f'platform={platform!r} has no device here: JAX finds {backend!r}')
