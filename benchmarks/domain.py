"""Trains an embedder from a published checkpoint and one's own text, with three seeds.

  python -m benchmarks.domain --model=sentence-transformers/all-MiniLM-L6-v2 \\
      --text='corpus/*.txt.gz' --held_out='held_out/*.txt' --beir=BEIR --workdir=runs/domain

The benchmark compares three ways, which all end with contrastive training on pairs from
the text. The first does only this, the second trains masked LM on the text before, and
the third does so with a causal detour (half of the rows causal in the first half of the
steps, arXiv:2605.12438). The pairs need no labels: a random sentence is the query, and
the text around it in its document is the positive (inverse cloze task, Lee et al. 2019,
https://arxiv.org/abs/1906.00300). The table has the held-out loss of masked LM in nats
per byte, and NDCG@10 of the embedder on --beir, a folder of the same domain in BEIR's
layout. The same command resumes.
"""

import json
import pathlib
import statistics

from absl import app, flags
import numpy as np

from benchmarks.calls import call, evaluate, keep_flags
from bert_jax.data import corpus

_MODEL = flags.DEFINE_string('model', None, 'To start from.', required=True)
_TEXT = flags.DEFINE_string('text', None, 'Glob of text files.', required=True)
_HELD_OUT = flags.DEFINE_string('held_out', None, 'Glob of other text files.', required=True)
_BEIR = flags.DEFINE_string('beir', None, 'Folder of queries and documents.', required=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for data and runs.', required=True)
_SEEDS = flags.DEFINE_integer('seeds', 3, 'Runs of each way.')
_STEPS = flags.DEFINE_integer('steps', 150, 'Of masked LM.')
_PAIR_STEPS = flags.DEFINE_integer('pair_steps', 100, 'Of contrastive training.')
_FIELDS = flags.DEFINE_multi_string('fields', [], 'FIELD=VALUE of masked LM; may be repeated.')

_CAUSAL = {'masking.causal_rows': 0.5, 'masking.causal_steps': 0.5}
_WAYS = {'pairs alone': None, 'masked LM, then pairs': {},
         'masked LM with a causal detour, then pairs': _CAUSAL}
_BATCH, _WORDS = 16, 90  # pairs in a step, words of a document


def _write_pairs(path: pathlib.Path, count: int):
  """Writes `count` pairs of a sentence and up to `_WORDS` words around it."""
  rng, settings = np.random.default_rng(0), corpus.Settings(_TEXT.value)
  lines = []
  for file in corpus.find_files(_TEXT.value):
    for document in corpus.read_file(file, corpus.format_of(file, 'auto'), 'text'):
      sentences = settings.sentences(document)
      if len(sentences) > 2:
        chosen = int(rng.integers(len(sentences)))
        first = max(0, chosen - 3)
        rest = ' '.join([*sentences[first:chosen], *sentences[chosen + 1:]]).split()
        lines.append({'query': sentences[chosen], 'positive': ' '.join(rest[:_WORDS])})
  if len(lines) < count:
    raise app.UsageError(f'{_TEXT.value} gives {len(lines)} pairs: {count} are needed')
  order = rng.permutation(len(lines))[:count]
  path.write_text(''.join(json.dumps(lines[i]) + '\n' for i in order))


def _run(config: str, workdir: pathlib.Path, **fields):
  done = workdir.parent / f'{workdir.name}.done'
  if not done.exists():
    call('bert_jax.main', f'--config=configs/{config}.py', f'--workdir={workdir}',
         *(f'--config.{name.replace("__", ".")}={value}' for name, value in fields.items()))
    done.touch()


def _measure(way: str, seed: int, home: pathlib.Path) -> tuple[float | None, float]:
  """Trains; returns (held-out nats per byte, None without masked LM; NDCG@10)."""
  name = f'{list(_WAYS).index(way)}-{seed}'
  start, loss = _MODEL.value, None
  if _WAYS[way] is not None:
    start = home / f'text-{name}'
    given = dict(field.split('=', 1) for field in _FIELDS.value)
    _run('continued', start, init_from=_MODEL.value, data__source=_TEXT.value,
         data__sequences='full_sentences',
         train_steps=_STEPS.value, seed=seed, eval_every=_STEPS.value,
         **{x.replace('.', '__'): y for x, y in {**_WAYS[way], **given}.items()})
    rows = evaluate(home / f'loss-{name}.json', 'masked_lm', _HELD_OUT.value,
                    f'--model={start}')['rows']
    loss = {row['unit']: row['nat'] for row in rows}['byte']
  embedder = home / f'embedder-{name}'
  _run('sentence_embedding', embedder, init_from=start, seed=seed, batch_size=_BATCH,
       max_len=128, train_epochs=0, train_steps=_PAIR_STEPS.value,
       data__train=home / 'pairs.jsonl', data__text_column='query',
       data__text_pair_column='positive')
  exported = home / f'exported-{name}'
  if not exported.exists():
    call('bert_jax.convert', f'--input={embedder}', f'--output={exported}',
         '--to=sentence_transformers')
  scores = evaluate(home / f'search-{name}.json', 'retrieval', _BEIR.value, f'--model={exported}')
  return loss, scores['rows'][-1]['NDCG@10']


def _cell(values: list[float]) -> str:
  error = f' ± {statistics.stdev(values):.4f}' if len(values) > 1 else ''
  return f'{statistics.mean(values):.4f}{error}'


def main(_):
  """Trains all ways with all seeds, and prints the table."""
  home = pathlib.Path(_WORKDIR.value)
  keep_flags(home, 'model', 'text', 'steps', 'pair_steps', 'fields')
  if not (home / 'pairs.jsonl').exists():
    _write_pairs(home / 'pairs.jsonl', _BATCH * _PAIR_STEPS.value)
  before = evaluate(home / 'before.json', 'retrieval', _BEIR.value, f'--model={_MODEL.value}')
  lines = ['| way | held-out nat per byte | NDCG@10 |', '| --- | --- | --- |',
           f'| before | | {before["rows"][-1]["NDCG@10"]:.4f} |']
  for way in _WAYS:
    losses, scores = zip(*(_measure(way, seed, home) for seed in range(_SEEDS.value)))
    loss = '' if None in losses else _cell(losses)
    lines.append(f'| {way} | {loss} | {_cell(scores)} |')
  (home / 'domain.md').write_text('\n'.join(lines) + '\n')
  print('\n'.join(lines))


if __name__ == '__main__':
  app.run(main)
