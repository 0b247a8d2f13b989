"""The platform that JAX computes on."""

import jax
import pytest

from bert_jax.runtime import platforms


@pytest.mark.parametrize('nvidia, expected', [(True, 'cuda'), (False, 'rocm')])
def test_jax_is_asked_for_the_gpu_that_is_there(monkeypatch, nvidia, expected):
  device_files = '/dev/nvidia[0-9]*' if nvidia else '/dev/kfd'
  updates = []
  monkeypatch.setattr(platforms.glob, 'glob', lambda pattern: [pattern] * (pattern == device_files))
  monkeypatch.setattr(jax.config, 'update', lambda name, value: updates.append((name, value)))
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  platforms.select_platform('gpu')
  assert updates == [('jax_platforms', expected)]
