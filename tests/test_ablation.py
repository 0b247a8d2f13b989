"""The ladder of the speedrun: its pairs, its runs, its rule and its table."""

import collections
import runpy

import pytest

from benchmarks import grammar, variants
from bert_jax import config as config_lib


def test_the_grammar_makes_pairs_of_equal_length():
  pairs = list(grammar.make(250))
  assert collections.Counter(pair['UID'] for pair in pairs) == dict.fromkeys(grammar.PARADIGMS, 250)
  assert pairs == list(grammar.make(250))
  for pair in pairs:
    good, bad = (pair[name].split() for name in ('sentence_good', 'sentence_bad'))
    changed = sum(a != b for a, b in zip(good, bad, strict=True))
    # In one point of grammar: "one house" and "say that" are two words each.
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
def test_the_rule_compares_seed_by_seed(losses, change, verdict):
  lines = [_line(variants.RECIPE, seed, loss) for seed, loss in enumerate((1.0, 0.9, 0.8))]
  lines += [_line('AdamW', seed, loss) for seed, loss in enumerate(losses)]
  row, = (line for line in variants.table(lines).splitlines() if 'AdamW' in line)
  cells = [cell.strip() for cell in row.strip('|').split('|')]
  assert cells[0] == '4M' and cells[2] == str(len(losses)) and cells[4:6] == [change, verdict]
