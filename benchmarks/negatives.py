"""How the source of false next sentences affects NSP and SST-2, with a tiny BERT.

  python -m benchmarks.negatives --records=DIR --sst2=SST-2 --workdir=runs/negatives

Each side is a value of `data.negatives`. All sides continue from one model
(configs/tiny.py trained with masked LM alone) for the same number of steps. The table
shows how well a rule guesses the labels from style alone (the counts of punctuation
marks, capitals and digits in A and in B, and their lengths). It also shows the NSP
accuracy of each side on held-out rows with the same negatives and with similar_style, and
its accuracy on SST-2 after one epoch. Capitals need records with a cased vocabulary:
`prepare --nolowercase`. The same command resumes.
"""

import json
import pathlib
import statistics

from absl import app, flags
from etils import epath
from flax import linen as nn
import jax
from ml_collections import ConfigDict

from benchmarks import calls
from benchmarks import pairs as benchmark
from bert_jax.data import dataset, negatives
from bert_jax.data.pairs import RowLayout
from bert_jax.data.phases import Phases
from bert_jax.data.rows import RowSource
from bert_jax.model import architectures
from bert_jax.objectives import objectives
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.runs import pretrain
from bert_jax.tasks.pretraining import Pretraining
from bert_jax.tasks.pretraining_data import PretrainingData
from bert_jax.training import checkpoint

_RECORDS = benchmark.RECORDS
_SST2 = flags.DEFINE_string('sst2', None, 'Folder of train.tsv(.gz) and dev.tsv.', required=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for the runs.', required=True)
_START_STEPS = flags.DEFINE_integer('start_steps', 2000, 'Of masked LM alone.')
_STEPS = flags.DEFINE_integer('steps', 2000, 'Of each run.')
_SEEDS = flags.DEFINE_integer('seeds', 3, 'Runs of each side.')
_JUDGE = 'similar_style'  # all sides are scored on these rows


def _train(config: str, workdir: pathlib.Path, **overrides):
  if not (workdir / 'finished').exists():
    calls.call('bert_jax.main', f'--config=configs/{config}.py', f'--workdir={workdir}',
               *(f'--config.{k}={v}' for k, v in overrides.items()))
    (workdir / 'finished').touch()


def _config(workdir: pathlib.Path) -> ConfigDict:
  return ConfigDict(json.loads((workdir / 'run.json').read_text())['config'])


def _last(workdir: pathlib.Path, name: str) -> float:
  """Returns the last value of a score of a run."""
  lines = map(json.loads, (workdir / 'metrics.jsonl').read_text().splitlines())
  return [line[name] for line in lines if name in line][-1]


def _style_accuracy(corpus: dataset.Corpus, kind: str, max_len: int) -> float:
  """Returns the accuracy of boosted trees that see only style and length of A and B."""
  layout = RowLayout.create(max_len, True, 'next_sentence', kind)
  pairs, _ = benchmark.epoch(RowSource(corpus.train, layout, 0, corpus.tokenizer), 10**9)
  classes = negatives.token_classes(corpus.tokenizer)
  return benchmark.accuracy_of_rule(benchmark.style_features(corpus.train, pairs, classes),
                                    pairs.label[pairs.has_b], categorical=())


def _nsp_accuracy(workdir: pathlib.Path, corpus: dataset.Corpus, kind: str) -> float:
  """Returns the NSP accuracy of a run on held-out rows with one kind of negatives."""
  c = _config(workdir)
  masking_config = MaskingConfig(**c.masking)
  task = Pretraining(objectives.create('', 'next_sentence', architectures.make_config(c.model)),
                     masking_config, pretrain.vocabulary(corpus, masking_config))
  c.data.negatives = kind
  data = PretrainingData.create(task, corpus, Phases.create((), c.train_steps, c.max_len, 64),
                                c.data, seed=0, eval_batches=0)
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  params, _ = checkpoint.restore_params(epath.Path(workdir), nn.unbox(shapes))
  measure = jax.jit(lambda batch: task.measure(params, None, batch))
  return data.evaluate(measure, c.train_steps)['nsp_accuracy']


def main(_):
  """Trains, scores, and prints a table."""
  home = pathlib.Path(_WORKDIR.value)
  calls.keep_flags(home, 'records', 'sst2', 'start_steps', 'steps')
  corpus = dataset.open_records(epath.Path(_RECORDS.value))
  (train,) = pathlib.Path(_SST2.value).glob('train.tsv*')
  _train('tiny', home / 'start', **{'data.source': _RECORDS.value, 'objective': 'mlm',
                                    'train_steps': _START_STEPS.value})
  scores = {kind: [] for kind in negatives.NEGATIVES}
  for seed in range(1, _SEEDS.value + 1):
    for kind, of_kind in scores.items():
      run, tuned = home / f'{kind}-{seed}', home / f'{kind}-{seed}-sst2'
      _train('tiny', run, **{
          'data.source': _RECORDS.value, 'data.negatives': kind, 'init_from': home / 'start',
          'seed': seed, 'train_steps': _STEPS.value, 'eval_every': _STEPS.value, 'log_every': 100})
      _train('sequence_classification', tuned, **{
          'init_from': run, 'seed': seed, 'data.format': 'glue/sst2', 'data.train': train,
          'data.eval': f'{_SST2.value}/dev.tsv', 'train_epochs': 1,
          'optimizer.learning_rate': 5e-4, 'model.scan_unroll': 2, 'log_every': 100})
      of_kind.append((_nsp_accuracy(run, corpus, kind), _nsp_accuracy(run, corpus, _JUDGE),
                      _last(run, 'eval_mlm_loss'), _last(tuned, 'eval_accuracy')))
      print(kind, seed, *of_kind[-1], flush=True)
  max_len = _config(home / 'start').max_len
  print('| `data.negatives` | guessed by style | NSP accuracy, same negatives | on '
        f'`{_JUDGE}` | MLM loss | SST-2 |\n| --- | --- | --- | --- | --- | --- |')
  for kind, of_kind in scores.items():
    cells = [f'{statistics.mean(x):.3f}' + (f' ± {statistics.stdev(x):.3f}' if len(x) > 1 else '')
             for x in zip(*of_kind)]
    print(f'| `{kind}` | {_style_accuracy(corpus, kind, max_len):.3f} |', ' | '.join(cells), '|')


if __name__ == '__main__':
  app.run(main)
