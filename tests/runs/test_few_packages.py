"""Training on token records needs few packages: a machine without a network may lack the others."""

import json
import subprocess
import sys

import pytest

from bert_jax.data import preparation
from tests.test_commands import ROOT

# Packages that only other commands, other sources of text or other tokenizers use.
ABSENT = ('sentencex', 'rjieba', 'sentencepiece', 'tensorflow_datasets', 'tensorflow',
          'apache_beam', 'tensorboardX', 'huggingface_hub', 'gcsfs', 'torch', 'transformers')
SCRIPT = """
import importlib.machinery, sys

class Finder(importlib.machinery.PathFinder):
  @classmethod
  def find_spec(cls, name, path=None, target=None):
    absent = name.partition('.')[0] in {absent!r}
    return None if absent else super().find_spec(name, path, target)

sys.meta_path = [Finder if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
from bert_jax.runs import run
from tests import conftest
run.run(conftest.tiny_config({records!r}, train_steps=2, **{{'optimizer.warmup_steps': 1}}),
        {workdir!r})
"""


@pytest.mark.slow
def test_training_on_records_needs_no_other_package(corpus_file, tmp_path):
  records, workdir = str(tmp_path / 'records'), tmp_path / 'run'
  preparation.prepare(preparation.Settings(corpus_file, vocab_size=200, heldout=0.1), records, 1)
  done = subprocess.run(
      [sys.executable, '-c', SCRIPT.format(absent=ABSENT, records=records, workdir=str(workdir))],
      cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert 'tensorboardX is not installed: no record for tensorboard' in done.stdout
  lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  assert lines[-1]['step'] == 2 and 'eval_loss' in lines[-1]
  assert not (workdir / 'tensorboard').exists()
