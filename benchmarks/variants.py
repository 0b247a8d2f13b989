"""The variants of `benchmarks.ablation`, the runs of its ladder, and their table."""

import collections
import dataclasses
import statistics
from typing import Any

_ROWS = 16  # rows of 128 tokens in a step of the recipe; twice as many rows of 64
RECIPE = 'recipe'


def _causal(rows: float, steps: float) -> dict[str, float]:
  """The share `rows` of the rows is causal in the first share `steps` of the steps."""
  return {'masking.causal_rows': rows, 'masking.causal_steps': steps}


# Phases are shares of the tokens: (share, row length, rows).
VARIANTS: dict[str, dict[str, Any]] = {
    RECIPE: {},
    'float32': {'model.dtype': 'float32'},
    # Masking
    '30% masked': {'masking.rate': 0.3, 'masking.final_rate': 0.0},
    '40% masked': {'masking.rate': 0.4, 'masking.final_rate': 0.0},
    '50% masked': {'masking.final_rate': 0.0},
    '40% to 20% masked': {'masking.rate': 0.4, 'masking.final_rate': 0.2},
    '50% to 15% masked': {'masking.final_rate': 0.15},
    'no causal rows': {'masking.causal_rows': 0.0},
    'an eighth of the rows causal': _causal(0.125, 1.0),
    'a quarter of the rows causal': _causal(0.25, 1.0),
    'half of the rows causal': _causal(0.5, 1.0),
    'three quarters of the rows causal': _causal(0.75, 1.0),
    'only causal rows in the first eighth': _causal(1.0, 0.125),
    'causal in the first half': _causal(1.0, 0.5),
    'three quarters causal in the first three quarters': _causal(0.75, 0.75),
    'three quarters causal in the first quarter': _causal(0.75, 0.25),
    'three quarters causal in the first sixteenth': _causal(0.75, 0.0625),
    'whole words': {'masking.unit': 'whole_word'},
    # Optimizer
    'AdamW': {'optimizer.name': 'adamw', 'optimizer.learning_rate': 2e-3},
    'Muon': {'optimizer.name': 'muon'},
    'rate 3e-3': {'optimizer.learning_rate': 3e-3},
    'rate 6e-3': {'optimizer.learning_rate': 6e-3},
    '1-sqrt decay of the last half': {'optimizer.decay': '1-sqrt', 'optimizer.decay_ratio': 0.5},
    'weight decay 0.1': {'optimizer.weight_decay': 0.1},
    'no weight decay': {'optimizer.weight_decay': 0.0},
    'b2 0.98': {'optimizer.b2': 0.98},
    'warmup 10%': {'optimizer.warmup_ratio': 0.1},
    'no clipping': {'optimizer.clip_norm': 0.0},
    # Rows and batches
    'rows of 128 only': {'phases': ((1, 128, _ROWS),)},
    'rows of 64 only': {'phases': ((1, 64, 2 * _ROWS),)},
    'rows of 32, 64 and 128': {'phases': ((4, 32, 4 * _ROWS), (4, 64, 2 * _ROWS),
                                          (2, 128, _ROWS))},
    'half the rows': {'phases': ((8, 64, _ROWS), (2, 128, _ROWS // 2))},
    'twice the rows': {'phases': ((8, 64, 4 * _ROWS), (2, 128, 2 * _ROWS))},
    'twice the rows after a quarter': {'phases': (
        (10, 64, 2 * _ROWS), (22, 64, 4 * _ROWS), (8, 128, 2 * _ROWS))},
    'batches that grow': {'phases': ((3, 64, _ROWS), (5, 64, 2 * _ROWS), (2, 128, _ROWS))},
    # Block
    'no convolutions': {'model.conv_reach': 0},
    'convolutions over two neighbors': {'model.conv_reach': 2},
    '8 heads': {'model.num_heads': 8},
    '2 heads': {'model.num_heads': 2},
    '4 layers of 320': {'model.hidden_size': 320, 'model.num_heads': 5,
                        'model.intermediate_size': 480},
    '7 layers of 192': {'model.num_layers': 7, 'model.scan_unroll': 7,
                        'model.hidden_size': 192, 'model.num_heads': 3,
                        'model.intermediate_size': 288},
    'wider feed-forward': {'model.intermediate_size': 768},
    'local windows of 32': {'model.local_window': 32},
    'ReGLU': {'model.activation': 'relu'},
    'initializer 0.02': {'model.initializer_range': 0.02},
    'initializer 0.06': {'model.initializer_range': 0.06},
    'dropout 0.1': {'model.dropout': 0.1},
    'the recipe before the three winners': {
        'optimizer.name': 'muon', 'model.initializer_range': 0.02, 'masking.rate': 0.4,
        'masking.final_rate': 0.0}}


@dataclasses.dataclass(frozen=True)
class Run:
  """A run of the ladder; its fields identify it in runs.jsonl."""

  variant: str
  tokens: int
  seed: int


def overrides(run: Run, records: str) -> dict[str, Any]:
  """The fields of a run that differ from configs/speedrun.py."""
  fields = {'train_minutes': 0, 'seed': run.seed, 'data.source': records, 'log_every': 20,
            **VARIANTS[run.variant]}
  shares = fields.pop('phases', ((8, 64, 2 * _ROWS), (2, 128, _ROWS)))
  whole = sum(share for share, *_ in shares)
  fields['phases'] = tuple((round(run.tokens * share / whole / (length * rows)), length, rows)
                           for share, length, rows in shares)
  fields['train_steps'] = sum(steps for steps, *_ in fields['phases'])
  return fields | {'eval_every': fields['train_steps'],
                   'checkpoint_every': fields['train_steps']}


def _judged(line: dict[str, Any]) -> tuple[float, float]:
  """(nat per byte of the judging text, share of the judging pairs)."""
  nat = {row['unit']: row['nat'] for row in line['masked_lm']['rows']}
  return nat['byte'], line['minimal_pairs']['accuracy']


def _verdict(differences: list[float]) -> str:
  if len(differences) < 3:
    return ''
  if all(x < 0 for x in differences):
    return 'better'
  return 'worse' if all(x > 0 for x in differences) else 'unclear'


def table(lines: list[dict[str, Any]]) -> str:
  """The table of all results: for each number of tokens, the best variant first."""
  judged = {Run(line['variant'], line['tokens'], line['seed']): _judged(line) for line in lines}
  speeds = collections.defaultdict(list)
  for line in lines:
    speeds[line['variant'], line['tokens']].append(line['speed'])
  text = ('| tokens | variant | seeds | nat per byte | against the recipe | in all seeds | '
          'pairs, % | tokens per second |\n' + '| --- ' * 8 + '|\n')
  rows = []
  for (variant, tokens), speed in speeds.items():
    runs = sorted((run for run in judged if (run.variant, run.tokens) == (variant, tokens)),
                  key=lambda run: run.seed)
    losses, pairs = zip(*(judged[run] for run in runs))
    # Seed by seed: both runs read the same documents in the same order.
    differences = [judged[run][0] - judged[base][0] for run in runs
                   if (base := Run(RECIPE, tokens, run.seed)) in judged and variant != RECIPE]
    deviation = f' ± {statistics.stdev(losses):.4f}' if len(losses) > 1 else ''
    change = f'{statistics.mean(differences):+.4f}' if differences else ''
    rows.append((tokens, statistics.mean(losses),
                 f'| {tokens / 1e6:g}M | {variant} | {len(runs)} | '
                 f'{statistics.mean(losses):.4f}{deviation} | {change} | '
                 f'{_verdict(differences)} | {100 * statistics.mean(pairs):.1f} | '
                 f'{statistics.median(speed):,.0f} |\n'))
  return text + ''.join(row for *_, row in sorted(rows))
