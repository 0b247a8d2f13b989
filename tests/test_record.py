"""A record of the speedrun: its entry, and its model in parts."""

import hashlib
import json
import subprocess
import sys

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import parts
from bert_jax.data import preparation
from bert_jax.interop import load, native
from tests import made_tasks
from tests.test_commands import ROOT


def test_parts_hold_the_model_rounded_to_bfloat16(tmp_path, monkeypatch):
  model = load.load(made_tasks.model(tmp_path / 'model'))
  arrays = jax.tree.leaves(model.params)
  most = max(x.size for x in arrays)  # bytes: half of the largest array
  monkeypatch.setattr(parts, '_BYTES', most)
  parts.write(model, tmp_path / 'parts')
  files = sorted((tmp_path / 'parts').glob('*.safetensors'))
  assert len(files) > 1 and all(file.stat().st_size < most + 4096 for file in files)
  read = parts.read(tmp_path / 'parts')
  assert read.config == model.config and read.tokenizer.vocab == model.tokenizer.vocab
  rounded = jax.tree.map(lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32),
                         model.params)
  jax.tree.map(np.testing.assert_array_equal, read.params, rounded)
  parts.main(['', str(tmp_path / 'parts'), str(tmp_path / 'joined')])
  assert parts.digest(native.load(epath.Path(tmp_path / 'joined'))) == parts.digest(read)
  assert parts.digest(read) != parts.digest(model)


@pytest.mark.slow
def test_a_record_describes_its_run_and_can_be_repeated(corpus_file, tmp_path):
  preparation.prepare(preparation.Settings(corpus_file, vocab_size=200, heldout=0.1),
                      str(tmp_path / 'records'), 1)
  (tmp_path / 'pairs.jsonl').write_text(
      '{"sentence_good": "the king runs", "sentence_bad": "the king run"}\n')
  fields = {'phases': '((6,16,16),(2,32,8))', 'model.hidden_size': 16,
            'model.num_heads': 2, 'model.intermediate_size': 16, 'model.max_positions': 128,
            'optimizer.warmup_ratio': 0.0}

  def make(name, steps):
    done = subprocess.run(
        [sys.executable, '-m', 'benchmarks.record', f'--records={tmp_path}/records', '--seed=3',
         f'--held_out={corpus_file}', f'--pairs={tmp_path}/pairs.jsonl', f'--steps={steps}',
         f'--output={tmp_path}/{name}', *(f'--fields={k}={v}' for k, v in fields.items())],
        cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((tmp_path / name / 'record.json').read_text())

  record = make('a', 8)
  log = (tmp_path / 'a/run/metrics.jsonl').read_bytes()
  assert record['steps'] == 8 and record['tokens'] == 6 * 16 * 16 + 2 * 32 * 8
  assert record['log_sha256'] == hashlib.sha256(log).hexdigest()
  assert 0 < record['nat_per_byte'] < record['nat_per_token'] and record['pairs'] == 1
  assert record['parameters_sha256'] == parts.digest(load.load(str(tmp_path / 'a/run')))
  assert '--config.seed=3' in record['command'] and len(record['commit']) >= 40
  # The same run has the same parameters; a finished record is only printed again.
  assert make('b', 8)['parameters_sha256'] == record['parameters_sha256']
  assert make('a', 8) == record


def test_the_index_has_every_field_of_a_record():
  records = json.loads((ROOT / 'docs/checkpoints.json').read_text())
  table = (ROOT / 'docs/speedrun.md').read_text()
  assert records
  for record in records:
    assert set(record) == {
        'date', 'command', 'steps', 'tokens', 'passes', 'tokens_per_second', 'minutes', 'records',
        'log_sha256', 'commit', 'machine', 'versions', 'parameters_sha256', 'nat_per_byte',
        'nat_per_token', 'minimal_pairs', 'pairs'}
    for name, digits in (('commit', 40), ('log_sha256', 64), ('parameters_sha256', 64)):
      assert len(record[name]) == digits and int(record[name], 16)
    # One row of the table of records has its figures; other seeds have the same commit.
    figures = (record['date'], f'{record["minutes"]}', f'{record["nat_per_token"]:.3f}',
               f'{100 * record["minimal_pairs"]:.1f} of {record["pairs"]:,} pairs')
    rows = (line for line in table.splitlines()
            if line.endswith(f'| {record["commit"][:7]} |'))
    assert sum(all(figure in row for figure in figures) for row in rows) == 1
