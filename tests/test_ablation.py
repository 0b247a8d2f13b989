"""The ablations of the speedrun: sentence pairs, runs, verdicts and the table."""

import collections
import json
import runpy
import subprocess
import sys

import pytest

from benchmarks import calls, grammar, variants
from bert_jax import config as config_lib


def test_the_grammar_makes_pairs_of_equal_length():
  pairs = list(grammar.make(250))
  assert collections.Counter(pair['UID'] for pair in pairs) == dict.fromkeys(grammar.PARADIGMS, 250)
  assert pairs == list(grammar.make(250))
  for pair in pairs:
    good, bad = (pair[name].split() for name in ('sentence_good', 'sentence_bad'))
    changed = sum(a != b for a, b in zip(good, bad, strict=True))
    # They differ in one point of grammar, of two words at most: "one house", "say that".
    assert 1 <= changed <= 2, pair
  assert len({(pair['sentence_good'], pair['sentence_bad']) for pair in pairs}) == len(pairs)


@pytest.mark.parametrize('variant', variants.VARIANTS)
def test_every_variant_reads_the_same_tokens(variant):
  overrides = variants.overrides(variants.Run(variant, 1_000_000, 3), 'records')
  assert overrides['train_steps'] == sum(steps for steps, *_ in overrides['phases'])
  tokens = sum(steps * length * rows for steps, length, rows in overrides['phases'])
  assert abs(tokens - 1_000_000) < 4096 and overrides['seed'] == 3
  config = runpy.run_path('configs/speedrun.py')['get_config']()
  config.update_from_flattened_dict(overrides)
  config_lib.check(config, given=overrides)  # refuses fields without an effect


def _line(variant, seed, loss, tokens=4_000_000):
  return {'variant': variant, 'tokens': tokens, 'seed': seed, 'speed': 1000.0,
          'masked_lm': {'rows': [{'unit': 'byte', 'nat': loss}]},
          'minimal_pairs': {'accuracy': 0.5}}


@pytest.mark.parametrize('losses, change, verdict', [
    ((0.9, 0.8, 0.7), '-0.1000', 'better'), ((1.1, 1.0, 0.9), '+0.1000', 'worse'),
    ((0.9, 1.0, 0.7), '-0.0333', 'unclear'), ((0.9, 0.8), '-0.1000', '')])
def test_a_verdict_compares_runs_of_the_same_seed(losses, change, verdict):
  lines = [_line(variants.RECIPE, seed, loss) for seed, loss in enumerate((1.0, 0.9, 0.8))]
  lines += [_line('AdamW', seed, loss) for seed, loss in enumerate(losses)]
  row, = (line for line in variants.table(lines).splitlines() if 'AdamW' in line)
  cells = [cell.strip() for cell in row.strip('|').split('|')]
  assert cells[0] == '4M' and cells[2] == str(len(losses)) and cells[4:6] == [change, verdict]


def _scored(data):
  return {'data': data, 'rows': [{'unit': 'byte', 'nat': 1.0}], 'accuracy': 0.5}


def test_runs_with_another_judge_or_other_fields_are_refused(tmp_path):
  """One table compares only runs with the same records, judge, pairs and fields."""
  line = _line(variants.RECIPE, 0, 1.0, 1_000_000) | {
      'masked_lm': _scored('judge/*.txt'), 'minimal_pairs': _scored('pairs.jsonl')}
  (tmp_path / 'runs.jsonl').write_text(json.dumps(line) + '\n')

  def table(judge='judge/*.txt', fields=()):
    return subprocess.run(
        [sys.executable, '-m', 'benchmarks.ablation', '--records=records', f'--judge={judge}',
         '--pairs=pairs.jsonl', f'--workdir={tmp_path}', '--variants=recipe', *fields],
        capture_output=True, text=True)

  assert '| 1M | recipe | 1 | 1.0000 |' in table().stdout
  for refused, flag in ((table('other.txt'), 'judge=judge/*.txt, not other.txt'),
                        (table(fields=['--fields=model.dtype=float32']), 'fields=[], not')):
    assert refused.returncode and f'--workdir has runs with --{flag}' in refused.stderr


def test_scores_of_other_data_are_refused(tmp_path):
  (tmp_path / 'a.json').write_text(json.dumps(_scored('old.txt')))
  assert calls.evaluate(tmp_path / 'a.json', 'masked_lm', 'old.txt')['accuracy'] == 0.5
  with pytest.raises(SystemExit, match='has the scores of old.txt, not of new.txt: use another'):
    calls.evaluate(tmp_path / 'a.json', 'masked_lm', 'new.txt')
