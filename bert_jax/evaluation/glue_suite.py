"""GLUE: fine-tunes a model on each task of a folder, with several seeds and rates.

Wang et al. 2019, https://arxiv.org/abs/1804.07461. A held-out part of the training file
chooses the learning rate and the best epoch. The development file is only scored.
"""

from collections.abc import Mapping, Sequence
import json
import math
import shutil
import statistics
from typing import Any, NamedTuple

from etils import epath
from flax import linen as nn
import jax
import numpy as np

from bert_jax import config as config_lib
from bert_jax import config_fields
from bert_jax.errors import UserError, require
from bert_jax.evaluation.report import Report
from bert_jax.inference import json_lines
from bert_jax.interop import native
from bert_jax.interop.pretrained import Pretrained
from bert_jax.labelled import glue, table
from bert_jax.model import architectures, encoder
from bert_jax.reporting import metrics_log
from bert_jax.runs import run
from bert_jax.runtime import storage

# The fraction of the training examples that chooses the rate and the epoch.
_APART = 0.1
_MOST_APART = 2000
FOLDER = '.runs'  # the suffix of the folder of the runs, next to the report
_DEV = {'mnli': 'dev_matched'}  # others: dev


class Files(NamedTuple):
  """The files of a task, or splits of tfds:NAME."""

  train: str
  dev: str
  apart: str = ''  # the held-out part of the training examples; '' = not divided yet


class Recipe(NamedTuple):
  """How each task is fine-tuned."""

  seeds: int = 3
  rates: Sequence[float] = (1e-4, 5e-5, 3e-5)
  epochs: float = 3.0
  batch_size: int = 32
  max_len: int = 128
  most: int = 0  # the most training examples of a task; 0 = all


def _file(folder: epath.Path, name: str) -> epath.Path:
  """Finds a file of a task, gzipped or not; raises UserError if it does not exist."""
  for ending in ('.tsv', '.tsv.gz'):
    if (folder / f'{name}{ending}').exists():
      return folder / f'{name}{ending}'
  raise UserError(f'{folder} lacks {name}.tsv: a folder of GLUE has the training and the '
                  'development file of its task')


def _divided(task: str, source: Files, folder: epath.Path, most: int) -> Files:
  """Divides the training examples by a fixed seed; writes train.tsv and apart.tsv."""
  if source.train.startswith('tfds:'):
    end = 100 - round(100 * _APART)
    return Files(f'{source.train}@train[:{end}%]', source.dev,
                 f'{source.train}@train[{end}%:]')
  lines = table.read_text(source.train).rstrip('\n').split('\n')
  # CoLA's file is the only one in GLUE that may lack a header.
  has_header = task != 'cola' or lines[0].startswith('index\t')
  head, rows = lines[:has_header], lines[has_header:]
  order = np.random.default_rng(0).permutation(len(rows))
  apart = min(round(_APART * len(rows)), _MOST_APART)
  require(apart > 0, f'{source.train} has {len(rows)} examples, and a tenth of them chooses the '
          'rate: give more')
  train = order[apart:apart + most] if most else order[apart:]
  folder.mkdir(parents=True, exist_ok=True)
  # In the order of the file: training shuffles the examples itself.
  for name, chosen in (('apart', order[:apart]), ('train', train)):
    content = [*head, *(rows[i] for i in np.sort(chosen))]
    storage.write_whole(folder / f'{name}.tsv', '\n'.join(content) + '\n')
  return Files(str(folder / 'train.tsv'), source.dev, str(folder / 'apart.tsv'))


def find_tasks(data: str, most: int = 0) -> dict[str, Files]:
  """Finds the files of each GLUE task in `data`.

  Args:
    data: a folder in GLUE's layout (SST-2/train.tsv, SST-2/dev.tsv, ...), or tfds:glue.
    most: the most training examples of a task; 0 = all.

  Raises:
    UserError: a task lacks a file, `data` has no task, or `most` is set with tfds:glue.
  """
  tasks = [name.removeprefix('glue/') for name in glue.TASKS]
  if data == 'tfds:glue':
    require(not most, f'--most={most} is for a folder of GLUE: tfds:glue is used whole')
    return {task: Files(f'tfds:glue/{task}', f'tfds:glue/{task}') for task in tasks}
  root = epath.Path(data)
  require(root.is_dir(),
          f'--data={data} is not a folder: give one with the folders of GLUE (SST-2, ...)')
  sources = {}
  for task in tasks:
    # The folder may have the name of the task or of its submission: sst2, SST-2.
    title = glue.TASKS[f'glue/{task}'].submission.removesuffix('.tsv').removesuffix('-m')
    folders = [path for path in root.iterdir()
               if path.name.lower() in (task, title.lower())]
    if folders:
      sources[task] = Files(str(_file(folders[0], 'train')),
                            str(_file(folders[0], _DEV.get(task, 'dev'))))
  require(bool(sources),
          f'--data={data} holds no task of GLUE: its folders are named SST-2, CoLA, ...')
  return sources


def twin_of(model: Pretrained) -> Pretrained:
  """Makes a model with the sizes and the tokenizer of another, but random parameters."""
  tokens = encoder.init_tokens()
  params = architectures.make_encoder(model.config).init(
      jax.random.key(0), tokens, tokens.ids[:, :1])
  params = {'params': {'bert': nn.unbox(params)['params']}}
  return Pretrained(model.config, params, model.tokenizer)


def _begin(model: Pretrained, data: str, sources: Mapping[str, Files], folder: epath.Path,
           recipe: Recipe, names: Sequence[str]):
  """Writes the initial models; raises UserError for the folder of another evaluation.

  A later evaluation may add seeds, rates and tasks.
  """
  job = {'model': json_lines.identity(model), 'data': data, **recipe._asdict()}
  del job['seeds'], job['rates']
  files = {task: [list(storage.size_and_time(epath.Path(path)))
                  for path in (source.train, source.dev)]
           for task, source in sources.items() if not source.train.startswith('tfds:')}
  job_file = folder / 'job.json'
  before = storage.read_json(job_file) if job_file.exists() else job
  files_before = before.pop('files', {})
  require(before == job,
          f'{folder} holds the runs of another model, recipe or folder of tasks: use '
          'another --output')
  for task in files.keys() & files_before.keys():
    began = any((run / 'run.json').exists() for rates in storage.matching(folder, f'{task}-*')
                if rates.is_dir() for run in rates.iterdir())
    require(not began or files[task] == files_before[task],
            f'{folder} holds scores of {task} from before its files in {data} changed: use '
            'another --output')
  folder.mkdir(parents=True, exist_ok=True)
  storage.write_whole(job_file, json.dumps({**job, 'files': files_before | files}))
  for name in names:
    # The checkpoint is written last: it marks a complete folder.
    if not (folder / name / native.CHECKPOINT_FILE).exists():
      shutil.rmtree(folder / name, ignore_errors=True)
      native.save(twin_of(model) if name == 'twin' else model, folder / name)


def _fine_tune(task: str, model: str, files: Files, recipe: Recipe, rate: float,
               seed: int, workdir: epath.Path) -> tuple[float, float]:
  """Returns the scores of the best epoch: (held-out part, development file)."""
  result = workdir / 'scores.json'
  if not result.exists():
    # Without unrolling: compiling dominates the runs on small tasks.
    config = config_fields.changed(config_lib.finetuning('sequence_classification'), {
        'init_from': model, 'data.train': files.train,
        'data.eval': f'{files.apart},{files.dev}', 'data.format': f'glue/{task}',
        'optimizer.learning_rate': rate, 'seed': seed, 'train_epochs': recipe.epochs,
        'batch_size': recipe.batch_size, 'max_len': recipe.max_len,
        'model.scan_unroll': 1})
    run.run(config, str(workdir))
    lines = metrics_log.read_metrics(workdir / 'metrics.jsonl')
    # Scores of the first file of data.eval have no suffix, scores of the second do.
    name = f'eval_{glue.TASKS[f"glue/{task}"].metric}'
    best = max((line for line in lines if line.get(name) is not None),
               key=lambda x: x[name])
    dev = next(key for key in best if key.startswith(f'{name}_'))
    storage.write_whole(result, json.dumps([best[name], best[dev]]))
  return tuple(json.loads(result.read_text()))


def _scores(task: str, model: str, files: Files, recipe: Recipe,
            folder: epath.Path) -> tuple[float, list[float]]:
  """Returns (the chosen rate, the development scores of its seeds)."""
  results = {
      rate: [_fine_tune(task, model, files, recipe, rate, seed, folder / f'{rate:g}-{seed}')
             for seed in range(recipe.seeds)]
      for rate in recipe.rates}
  held_out = {rate: statistics.mean(apart for apart, _ in of_seeds)
              for rate, of_seeds in results.items()}
  best = max(held_out, key=held_out.get)
  return best, [dev for _, dev in results[best]]


def evaluate(model: Pretrained, data: str, path: epath.Path, *, twin: bool = False,
             **recipe_fields: Any) -> Report:
  """Fine-tunes a model on each task; returns the mean and deviation of its scores.

  Args:
    model: the model to fine-tune.
    data: a folder in GLUE's layout, or tfds:glue.
    path: the path of the report. PATH.runs has the runs; finished runs are not repeated.
    twin: also fine-tune a model of the same sizes with random parameters.
    **recipe_fields: fields of `Recipe`.

  Raises:
    UserError: a mistake in the data, or a folder with the runs of another evaluation.
  """
  recipe, folder = Recipe(**recipe_fields), path.with_suffix(FOLDER)
  require(bool(recipe.rates), '--rates is empty: give one learning rate at least')
  # Before any file: a corrected command must find the folder as it was.
  for rate in recipe.rates:
    require(0 < rate < math.inf, f'--rates={rate} must be above 0')
  require(0 < recipe.epochs < math.inf, f'--epochs={recipe.epochs} must be above 0')
  sources = find_tasks(data, recipe.most)
  require(8 <= recipe.max_len <= model.config.max_positions,
          f'--max_len={recipe.max_len} must be at least 8 and at most the '
          f'{model.config.max_positions} positions of the model')
  names = ('model', 'twin') if twin else ('model',)
  _begin(model, data, sources, folder, recipe, names)
  columns = ['task', 'score']
  for name in names:
    columns += [name, f'{name}, deviation', f'{name}, rate']
  rows = []
  for task, source in sources.items():
    files = _divided(task, source, folder / 'data' / task, recipe.most)
    row = [task, glue.TASKS[f'glue/{task}'].metric]
    for name in names:
      rate, scores = _scores(task, str(folder / name), files, recipe,
                             folder / f'{task}-{name}')
      deviation = statistics.stdev(scores) if len(scores) > 1 else None
      row += [statistics.mean(scores), deviation, rate]
    rows.append(row)
  # Each model has three columns; deviations and rates have no mean.
  means = [statistics.mean(row[i] for row in rows) for i in range(2, len(columns), 3)]
  rows.append(['mean', ''] + [value for mean in means for value in (mean, None, None)])
  return Report(recipe._asdict(), columns, rows, 'model')
