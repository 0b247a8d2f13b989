"""The wheel works without the repository: it contains the configs."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

import bert_jax
from bert_jax.commands import config_flag
from bert_jax.errors import UserError
from tests import conftest
from tests.test_configs import SMALL

ROOT = pathlib.Path(__file__).parents[2]


def test_the_name_of_a_config_expands_to_its_file(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  argv = ['main', '--config=tiny', '--config.seed=1', '--workdir=tiny']
  path = ROOT / 'configs/tiny.py'
  assert config_flag.with_paths(argv) == ['main', f'--config={path}', *argv[2:]]
  spaced = ['main', '--config', 'tiny', '--config.seed=1', '--workdir=tiny']
  assert config_flag.with_paths(spaced) == config_flag.with_paths(argv)
  assert config_flag.with_paths(['main', '--config']) == ['main', '--config']
  own = ['main', '--config=my/tiny.py']
  assert config_flag.with_paths(own) == own
  pathlib.Path('tiny').write_text('')  # a file of that name comes before the config
  assert config_flag.with_paths(argv) == argv
  with pytest.raises(UserError, match='--config=tinny is not a file or a config of bert_jax: '
                                      'the configs are albert_base, base, '):
    config_flag.with_paths(['main', '--config=tinny'])


def test_package_wheel_citation_and_changelog_have_one_version():
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())
  assert project['project']['dynamic'] == ['version'] and 'version' not in project['project']
  assert project['tool']['setuptools']['dynamic']['version'] == {'attr': 'bert_jax.__version__'}
  citation = (ROOT / 'CITATION.cff').read_text()
  assert re.findall('^version: (.*)$', citation, re.M) == [bert_jax.__version__]
  released = re.findall(r'^## (\d.*)$', (ROOT / 'CHANGELOG.md').read_text(), re.M)
  assert released[0] == bert_jax.__version__


@pytest.mark.slow
def test_the_wheel_trains_predicts_and_evaluates_in_an_empty_folder(tmp_path, corpus_file):
  for name in ('bert_jax', 'configs'):  # a copy: a build leaves files beside its source
    shutil.copytree(ROOT / name, tmp_path / 'source' / name)
  for name in ('pyproject.toml', 'setup.py', 'README.md', 'LICENSE'):
    shutil.copy(ROOT / name, tmp_path / 'source')
  subprocess.run([sys.executable, '-m', 'pip', 'wheel', '--quiet', '--no-deps',
                  f'--wheel-dir={tmp_path}', tmp_path / 'source'], check=True)
  wheel, = tmp_path.glob('*.whl')
  assert wheel.name == f'bert_jax-{bert_jax.__version__}-py3-none-any.whl'
  zipfile.ZipFile(wheel).extractall(tmp_path / 'installed')
  (tmp_path / 'empty').mkdir()

  def run(module, *arguments, stdin=''):
    done = subprocess.run(
        [sys.executable, '-m', f'bert_jax.{module}', *arguments], cwd=tmp_path / 'empty',
        input=stdin, capture_output=True, text=True, env={
            **os.environ, 'PYTHONPATH': str(tmp_path / 'installed'),
            'XLA_FLAGS': conftest.xla_flags(1)})
    assert done.returncode == 0, done.stderr
    return done.stdout

  run('main', '--config=tiny', '--workdir=run', f'--config.data.source={corpus_file}',
      *(f'--config.{name}={value}' for name, value in SMALL.items()))
  answer = json.loads(run('predict', '--task=fill_mask', '--model=run',
                          stdin='{"text": "the [MASK] runs"}\n'))
  assert len(answer['masks'][0]['candidates']) == 5
  run('evaluate', '--model=run', '--suite=masked_lm', '--max_len=32', f'--data={corpus_file}',
      '--output=scores.json')
  assert 0 < json.loads((tmp_path / 'empty/scores.json').read_text())['loss'] < 10
