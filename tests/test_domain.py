"""The recipe from a published checkpoint and own text to an embedder, with small sizes."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests import made_tasks
from tests.test_commands import ROOT


@pytest.mark.slow
def test_the_recipe_compares_three_ways_to_an_embedder(tmp_path):
  rng = np.random.default_rng(0)
  texts = [[' '.join(rng.choice(made_tasks.WORDS, 5)).capitalize() + '.' for _ in range(5)]
           for _ in range(120)]
  for name, part in (('text', texts[:100]), ('held_out', texts[100:])):
    (tmp_path / f'{name}.txt').write_text('\n\n'.join('\n'.join(text) for text in part) + '\n')
  beir = tmp_path / 'beir'
  (beir / 'qrels').mkdir(parents=True)
  for name, column in (('corpus', slice(1, 5)), ('queries', slice(0, 1))):
    (beir / f'{name}.jsonl').write_text(''.join(
        json.dumps({'_id': f'{name[0]}{i}', 'text': ' '.join(text[column])}) + '\n'
        for i, text in enumerate(texts[100:])))
  (beir / 'qrels/test.tsv').write_text('query-id\tcorpus-id\tscore\n' + ''.join(
      f'q{i}\tc{i}\t1\n' for i in range(20)))
  model = made_tasks.model(tmp_path / 'model', max_positions=128)
  command = [
      sys.executable, '-m', 'benchmarks.domain', f'--model={model}',
      f'--text={tmp_path}/text.txt', f'--held_out={tmp_path}/held_out.txt', f'--beir={beir}',
      f'--workdir={tmp_path}/run', '--seeds=2', '--steps=2', '--pair_steps=2',
      '--fields=max_len=32', '--fields=optimizer.warmup_steps=1']
  for _ in range(2):  # the second call finds everything done
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
  assert '$ python' not in done.stdout
  table = [line.split('|')[1:-1] for line in done.stdout.splitlines() if line.startswith('|')]
  assert [row[0].strip() for row in table[2:]] == [
      'before', 'pairs alone', 'masked LM, then pairs',
      'masked LM with a causal detour, then pairs']
  losses = [json.loads((tmp_path / f'run/loss-{i}-{j}.json').read_text()) for i in (1, 2)
            for j in (0, 1)]
  nats = [row['nat'] for loss in losses for row in loss['rows'] if row['unit'] == 'byte']
  assert len(set(nats)) == 4  # the ways and the seeds differ
  assert table[4][1].strip() == f'{np.mean(nats[:2]):.4f} ± {np.std(nats[:2], ddof=1):.4f}'
  pairs = [json.loads(line) for line in (tmp_path / 'run/pairs.jsonl').read_text().splitlines()]
  assert len(pairs) == 32
  assert not any(pair['query'] in pair['positive'] for pair in pairs)
