"""The platform that JAX computes on."""

import jax
import pytest

from bert_jax.runtime import platforms


@pytest.mark.parametrize('nvidia, expected', [(True, 'cuda'), (False, 'rocm')])
def test_jax_is_asked_for_the_gpu_that_is_there(monkeypatch, nvidia, expected):
  there = '/dev/nvidia[0-9]*' if nvidia else '/dev/kfd'
  asked = []
  monkeypatch.setattr(platforms.glob, 'glob', lambda pattern: [pattern] * (pattern == there))
  monkeypatch.setattr(jax.config, 'update', lambda name, value: asked.append((name, value)))
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  platforms.select_platform('gpu')
  assert asked == [('jax_platforms', expected)]
