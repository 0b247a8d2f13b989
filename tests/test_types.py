"""The types of the public interface: mypy accepts them, and users see what calls return."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
USE = """
import bert_jax

bert = bert_jax.from_pretrained('runs/tiny')
reveal_type(bert)
reveal_type(bert.embed(['a']))
reveal_type(bert.embed(['a'], 'none'))
reveal_type(bert.score('a'))
reveal_type(bert.score(['a']))
reveal_type(bert_jax.train('tiny', 'runs/tiny'))
bert.search('a', 3)
"""


def mypy(*arguments):
  done = subprocess.run([sys.executable, '-m', 'mypy', '--config-file', 'pyproject.toml',
                         *arguments], cwd=ROOT, capture_output=True, text=True)
  return done.stdout.splitlines()


@pytest.mark.medium
def test_mypy_accepts_the_interface_and_reveals_its_types(tmp_path):
  assert mypy('--cache-dir', str(tmp_path))[-1].startswith('Success: no issues found in ')
  (tmp_path / 'use.py').write_text(USE)
  lines = mypy('--cache-dir', str(tmp_path), str(tmp_path / 'use.py'))
  kinds = [line.split('"')[1].split('[')[0] for line in lines if 'Revealed type' in line]
  model, array = 'bert_jax.inference.bert.Bert', 'numpy.ndarray'
  assert kinds == [model, array, 'list', 'dict', 'list', model]
  assert 'incompatible type "int"; expected "Sequence[str]"' in lines[-2]
  assert (ROOT / 'bert_jax/py.typed').exists()
