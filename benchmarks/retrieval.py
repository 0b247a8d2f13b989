"""Compares search, late interaction and reranking with sentence-transformers, on SQuAD.

  python -m benchmarks.retrieval --train=train-v1.1.json.gz --dev=dev-v1.1.json.gz \\
      --model=sentence-transformers/all-MiniLM-L6-v2 --workdir=runs/retrieval

A question is a query, and its paragraph is the only relevant document. Other paragraphs
of the same article are negatives. The corpus has all paragraphs of the development file.
Both sides fine-tune an embedder (contrastive loss within the batch and with one
negative), a model of late interaction (the same examples and loss, the same new
projection) and a cross-encoder (binary cross-entropy over a paragraph and three
negatives), for the same steps on the same examples. `bert_jax.evaluate` scores both:
NDCG@10 of the search before and after fine-tuning, and of its best 100 documents in the
order of the cross-encoder. Seconds cover the whole training, including imports, reading
and compilation. --seeds repeats all trainings, and --kinds selects the models. The same
command resumes. Needs torch and sentence-transformers.
"""

from collections.abc import Iterator
import json
import math
import os
import pathlib
import shutil
import time
from typing import Any

from absl import app, flags
from etils import epath
import numpy as np

from benchmarks import calls
from bert_jax.inference import beir
from bert_jax.labelled import table
from bert_jax.tasks import metrics

_TRAIN = flags.DEFINE_string('train', None, "SQuAD's training file.", required=True)
_DEV = flags.DEFINE_string('dev', None, "SQuAD's development file.", required=True)
_MODEL = flags.DEFINE_string('model', None, 'To start from.', required=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for data and runs.', required=True)
_STEPS = flags.DEFINE_integer('steps', 200, 'Of the embedder; the cross-encoder, whose head is '
                              'new, takes twice as many.')
_QUERIES = flags.DEFINE_integer('queries', 200, 'Questions of the development file.')

_SEEDS = flags.DEFINE_integer('seeds', 1, 'Runs of each side and kind.')
_KINDS = flags.DEFINE_multi_enum('kinds', ['embedder', 'late', 'reranker'],
                                 ['embedder', 'late', 'reranker'], 'To train.')

_SIDES = {'pytorch': 'sentence-transformers', 'bert_jax': 'bert_jax'}
_NEGATIVES = 3  # of a query of the cross-encoder
_BATCH = {'embedder': 16, 'late': 16, 'reranker': 8}  # queries per step
_LONGER = {'embedder': 1, 'late': 1, 'reranker': 2}  # times --steps
_CONFIGS = {'embedder': 'sentence_embedding', 'late': 'late_interaction',
            'reranker': 'reranking'}
_RATE, _LENGTH = 5e-5, 128


def _articles(path: str) -> list[list[tuple[str, list[str]]]]:
  """Returns the articles with enough paragraphs: lists of (paragraph, its questions)."""
  articles = [[(paragraph['context'], [qa['question'] for qa in paragraph['qas']])
               for paragraph in article['paragraphs']]
              for article in json.loads(table.read_text(path))['data']]
  return [article for article in articles if len(article) > _NEGATIVES]


def _examples(rng: np.random.Generator, count: int) -> Iterator[dict[str, Any]]:
  """Yields questions in random order, with their paragraph and three of its article."""
  pairs = [(article, i, question) for article in _articles(_TRAIN.value)
           for i, (_, questions) in enumerate(article) for question in questions]
  for number in rng.permutation(len(pairs))[:count]:
    article, i, question = pairs[number]
    others = rng.choice([j for j in range(len(article)) if j != i], _NEGATIVES, replace=False)
    negatives = [article[j][0] for j in others]
    yield {'query': question, 'positive': article[i][0], 'negative': negatives[0],
           'positives': [article[i][0]], 'negatives': negatives}


def _write_data(home: pathlib.Path):
  """Writes HOME/beir in BEIR's layout, and the training examples."""
  rng = np.random.default_rng(0)
  for name in ('embedder', 'reranker'):  # late interaction takes the embedder's
    size = _BATCH[name]
    lines = [json.dumps(example) for example in _examples(rng, size * _STEPS.value * _LONGER[name])]
    (home / f'{name}.jsonl').write_text('\n'.join(lines) + '\n')
  paragraphs = [paragraph for article in _articles(_DEV.value) for paragraph in article]
  asked = [(question, i) for i, (_, questions) in enumerate(paragraphs) for question in questions]
  chosen = [asked[i] for i in rng.permutation(len(asked))[:_QUERIES.value]]
  (home / 'beir/qrels').mkdir(parents=True, exist_ok=True)
  for name, texts in (('corpus', [text for text, _ in paragraphs]),
                      ('queries', [question for question, _ in chosen])):
    lines = [json.dumps({'_id': f'{name[0]}{i}', 'text': text}) for i, text in enumerate(texts)]
    (home / f'beir/{name}.jsonl').write_text('\n'.join(lines) + '\n')
  lines = ['query-id\tcorpus-id\tscore']
  lines += [f'q{i}\tc{paragraph}\t1' for i, (_, paragraph) in enumerate(chosen)]
  (home / 'beir/qrels/test.tsv').write_text('\n'.join(lines) + '\n')


def _train(side: str, kind: str, seed: int, home: pathlib.Path) -> float:
  """Trains a model unless it is done; returns the seconds."""
  folder = f'{home}/{side}/{kind}-{seed}'
  result = home / f'{side}-{kind}-{seed}.json'
  if result.exists():
    return json.loads(result.read_text())
  steps, start = _STEPS.value * _LONGER[kind], _MODEL.value
  data = f'{home}/{"reranker" if kind == "reranker" else "embedder"}.jsonl'
  fields = {'batch_size': _BATCH[kind], 'rate': _RATE, 'length': _LENGTH, 'seed': seed}

  def pytorch(output, steps, start):
    calls.call('benchmarks.torch_retrieval', f'--kind={kind}', f'--model={start}', f'--data={data}',
               f'--output={output}', f'--steps={steps}',
               *(f'--{name}={value}' for name, value in fields.items()))

  if kind == 'late':  # both sides begin with the same projection
    start = f'{home}/start/late-{seed}'
    if not pathlib.Path(start).exists():
      pytorch(start, 0, _MODEL.value)
  shutil.rmtree(folder, ignore_errors=True)  # a resumed run would not take the whole time
  began = time.monotonic()
  if side == 'pytorch':
    pytorch(folder, steps, start)
  else:
    columns = {} if kind == 'reranker' else {
        'data.text_column': 'query', 'data.text_pair_column': 'positive',
        'data.negative_column': 'negative'}
    overrides = columns | {
        'init_from': start, 'data.train': data, 'train_epochs': 0, 'train_steps': steps,
        'batch_size': _BATCH[kind], 'max_len': _LENGTH, 'seed': seed,
        'optimizer.learning_rate': _RATE}
    calls.call('bert_jax.main', f'--config=configs/{_CONFIGS[kind]}.py', f'--workdir={folder}',
               *(f'--config.{name}={value}' for name, value in overrides.items()))
  result.write_text(json.dumps(time.monotonic() - began))
  return json.loads(result.read_text())


def _ndcg(path: pathlib.Path, home: pathlib.Path) -> np.ndarray:
  """Returns NDCG@10 of each query in a run file."""
  qrels = beir.load(epath.Path(home / 'beir'), 'test').qrels
  hits = {query: [] for query in qrels}
  for line in path.read_text().splitlines():
    query, _, document, *_ = line.split()
    hits[query].append(qrels[query].get(document, 0))
  return np.array([metrics.ranking(np.array(hits[query]), np.array(list(of.values())))[
      'ndcg_10'] for query, of in qrels.items()])


def _score(name: str, home: pathlib.Path, *flags: str) -> np.ndarray:
  """Returns NDCG@10 of each query."""
  output = home / f'scores/{name}.json'
  if not output.exists():
    calls.call('bert_jax.evaluate', '--suite=retrieval', f'--data={home}/beir',
               f'--output={output}', *flags)
  return _ndcg(output.with_suffix('.run'), home)


def _row(title: str, of_seeds: list[np.ndarray], seconds: list[float]) -> str:
  scores = np.mean(of_seeds, axis=0)  # of each query
  error = scores.std(ddof=1) / math.sqrt(len(scores))
  seeds = ' '.join(f'{x.mean():.4f}' for x in of_seeds)
  mean = f'{np.mean(seconds):.0f}' if seconds else ''
  return f'| {title} | {scores.mean():.4f} ± {error:.4f} | {seeds} | {mean} |'


def main(_):
  """Makes the data, trains and scores both sides, and prints a table."""
  home = pathlib.Path(_WORKDIR.value)
  calls.keep_flags(home, 'train', 'dev', 'model', 'steps', 'queries')
  # The seconds of both sides include compilation.
  os.environ['JAX_ENABLE_COMPILATION_CACHE'] = 'false'
  if not (home / 'beir/qrels/test.tsv').exists():
    _write_data(home)
  rows = [_row('before fine-tuning', [_score(
      'zero_shot', home, f'--model={_MODEL.value}', '--max_len=256')], [])]
  for kind in _KINDS.value:
    for side, title in _SIDES.items():
      seconds, scores = [], []
      for seed in range(_SEEDS.value):
        seconds.append(_train(side, kind, seed, home))
        model = f'{home}/{side}/{kind}-{seed}'
        if kind == 'reranker':  # reorders the hits of the embedder of the same seed
          name = f'{side}-embedder-{seed}'
          _score(f'{name}-reranked', home, f'--model={home}/{side}/embedder-{seed}',
                 f'--rerank={model}', '--max_len=256')
          scores.append(_ndcg(home / f'scores/{name}-reranked.reranked.run', home))
        else:
          length = ['--max_len=256'] if kind == 'embedder' else []
          scores.append(_score(f'{side}-{kind}-{seed}', home, f'--model={model}', *length))
      rows.append(_row(f'{kind}, {title}', scores, seconds))
  print('| model | NDCG@10 | of each seed | seconds of training |\n| --- | --- | --- | --- |')
  print('\n'.join(rows))


if __name__ == '__main__':
  app.run(main)
