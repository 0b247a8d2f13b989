"""Compares fine-tuning with PyTorch transformers: losses, quality and time.

  python -m benchmarks.finetune --mode=parity --data=DATA --model=MODEL --workdir=runs/finetune
  python -m benchmarks.finetune --mode=quality --data=DATA --model=MODEL --workdir=runs/finetune

MODEL is a Hugging Face folder. DATA has a folder for each data set (see TASKS). In
`parity`, both sides make 50 steps from the same head on the same batches without dropout.
They take turns after each step, and losses, predictions and times are compared. `quality`
trains each side with dropout for several seeds and compares the means of the scores and
of the held-out losses after the last step. Both append one line per task (and seed and
side) to WORKDIR/MODE.jsonl, resume after a stop, and print a table.
"""

import dataclasses
import json
import pathlib
import runpy
import time
from typing import Any, NamedTuple

from absl import app, flags
from etils import epath
from flax import linen as nn
import jax
import numpy as np
from scipy import stats

from benchmarks import torch_finetune, turns
from benchmarks.calls import keep_flags
from bert_jax import config_fields
from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.data.tokens import Tokens
from bert_jax.interop import huggingface
from bert_jax.interop import load as load_lib
from bert_jax.interop.pretrained import Pretrained
from bert_jax.labelled import table
from bert_jax.model import architectures
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.encoder import Encoder
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.runs import finetune, initial, model_fields
from bert_jax.tasks import question_answering
from bert_jax.tasks.finetuning_data import Output, by_example
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import state as state_lib

_MODE = flags.DEFINE_enum('mode', 'parity', ['parity', 'quality'], 'What is compared.')
_DATA = flags.DEFINE_string('data', None, 'Folder of data sets.', required=True)
_MODEL = flags.DEFINE_string('model', None, 'Hugging Face folder.', required=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for results.', required=True)
_TASKS = flags.DEFINE_list('tasks', None, 'Some of the tasks; by default all.')
_STEPS = flags.DEFINE_integer('steps', 50, 'Steps of --mode=parity.')
_BATCH_SIZE = flags.DEFINE_integer('batch_size', 0, 'Of parity; 0 = that of the config.')
_LAYERS = 12  # layers in each iteration of the scan, as in a run of several minutes
_QUALITY_SIDES, _QUALITY_SEEDS = ('bert_jax', 'torch'), 3


class Case(NamedTuple):
  """One data set."""

  config: str
  train: str
  eval: str
  overrides: dict[str, Any]
  score: str
  quality: dict[str, Any] = {}  # overrides of the quality runs; {} = no such run
  layers: int = 0  # first layers of the model for quality; 0 = all
  chinese: bool = False  # a random tiny model with the published Chinese vocabulary
  most: tuple[int, int] = (0, 0)  # examples to train on and to evaluate; 0 = all


TASKS = {
    'sst2': Case('sequence_classification', 'sst2/train.tsv.gz', 'sst2/dev.tsv',
                 {'data.format': 'glue/sst2'}, 'accuracy',
                 {'train_epochs': 1.0, 'optimizer.learning_rate': 1e-4}, most=(8000, 0)),
    'mrpc': Case('sequence_classification', 'mrpc/train.tsv', 'mrpc/dev.tsv',
                 {'data.format': 'glue/mrpc'}, 'f1',
                 {'train_epochs': 2.0, 'optimizer.learning_rate': 1e-4, 'batch_size': 16}),
    'stsb': Case('sequence_classification', 'stsb/train.tsv', 'stsb/dev.tsv',
                 {'data.format': 'glue/stsb'}, 'spearman',
                 {'train_epochs': 1.0, 'optimizer.learning_rate': 1e-4}),
    'rte': Case('sequence_classification', 'rte/train.tsv', 'rte/dev.tsv',
                {'data.format': 'glue/rte'}, 'accuracy'),
    'cola': Case('sequence_classification', 'cola/train.tsv', 'cola/dev.tsv',
                 {'data.format': 'glue/cola'}, 'matthews'),
    'wnut17': Case('token_classification', 'ner_wnut17/train.conll', 'ner_wnut17/dev.conll', {},
                   'f1', {'train_epochs': 2.0, 'optimizer.learning_rate': 2e-4}),
    'squad': Case('question_answering', 'squad_v1.1/train-v1.1.json.gz',
                  'squad_v1.1/dev-v1.1.json.gz', {'max_len': 256}, 'f1',
                  {'train_epochs': 1.0, 'optimizer.learning_rate': 1e-4, 'batch_size': 16},
                  layers=2, most=(800, 200)),
    'squad_384': Case('question_answering', 'squad_v1.1/train-v1.1.json.gz',
                      'squad_v1.1/dev-v1.1.json.gz', {'max_len': 384}, 'f1', most=(800, 200)),
    'commonsenseqa': Case('multiple_choice', 'commonsenseqa_v1.0/train.jsonl.gz',
                          'commonsenseqa_v1.0/dev.jsonl', {'data.format': 'commonsenseqa'},
                          'accuracy'),
    'chnsenticorp': Case('sequence_classification', 'zh_chnsenticorp/train.tsv.gz',
                         'zh_chnsenticorp/dev.tsv', {}, 'accuracy', chinese=True),
    'zh_ner': Case('token_classification', 'zh_ner_uner_gsdsimp/train.iob2.gz',
                   'zh_ner_uner_gsdsimp/dev.iob2',
                   {'data.text_column': '1', 'data.label_column': '2'}, 'f1', chinese=True),
}


def _some(path: str, most: int) -> str:
  """Returns a file with `most` examples of another file, drawn once; 0 = that file."""
  if not most:
    return path
  target = epath.Path(_WORKDIR.value) / f'{most}-{epath.Path(path).name.removesuffix(".gz")}'
  if target.exists():
    return str(target)
  text, rng = table.read_text(path), np.random.default_rng(0)
  if path.removesuffix('.gz').endswith('.json'):
    content = json.loads(text)
    paragraphs = [{'context': p['context'], 'qas': [qa]} for article in content['data']
                  for p in article['paragraphs'] for qa in p['qas']]
    drawn = [paragraphs[i] for i in rng.permutation(len(paragraphs))[:most]]
    text = json.dumps({'data': [{'paragraphs': drawn}]})
  else:
    header, *lines = text.rstrip('\n').split('\n')
    text = '\n'.join([header, *(lines[i] for i in rng.permutation(len(lines))[:most])]) + '\n'
  target.write_text(text)
  return str(target)


def _chinese_model() -> str:
  """Makes a random tiny BERT with the published Chinese vocabulary."""
  folder = epath.Path(_WORKDIR.value) / 'chinese'
  if not (folder / 'config.json').exists():
    tokenizer = tokenizer_reader.load(epath.Path(_DATA.value) / 'vocab/bert-base-chinese-vocab.txt')
    config = BertConfig(vocab_size=tokenizer.vocab_size, hidden_size=128, num_layers=2, num_heads=2,
                        intermediate_size=512)
    tokens = np.zeros((1, 8), np.int32)
    params = nn.unbox(Encoder(config).init(jax.random.key(0), Tokens(*[tokens] * 4), tokens[:, :1]))
    huggingface.save(Pretrained(config, {'params': {'bert': params['params']}}, tokenizer), folder)
  return str(folder)


def _first_layers(layers: int) -> str:
  """Writes the model with only its first layers."""
  folder = epath.Path(_WORKDIR.value) / f'{layers}-layers'
  if not (folder / 'config.json').exists():
    model = load_lib.load(_MODEL.value)
    bert = dict(model.params['params']['bert'])
    bert['layers'] = jax.tree.map(lambda x: x[:layers], bert['layers'])
    huggingface.save(dataclasses.replace(
        model, config=dataclasses.replace(model.config, num_layers=layers),
        params={'params': {**model.params['params'], 'bert': bert}}), folder)
  return str(folder)


def _config(case: Case, overrides: dict[str, Any]):
  c = runpy.run_path(f'configs/{case.config}.py')['get_config']()
  data = epath.Path(_DATA.value)
  c.update_from_flattened_dict({
      'init_from': _chinese_model() if case.chinese else _MODEL.value,
      'data.train': _some(str(data / case.train), case.most[0]),
      'data.eval': _some(str(data / case.eval), case.most[1]), **case.overrides, **overrides})
  return c


class JaxRun:
  """A run of bert_jax, step by step."""

  def __init__(self, config, train_steps: int = 0):
    mesh = mesh_lib.make_mesh(**config.mesh)
    model = load_lib.load(config.init_from)
    config = config_fields.changed(config, model_fields.sizes_if_unset(config, vars(model.config)))
    job = finetune.make_job(config, model, mesh, epath.Path(_WORKDIR.value))
    self.config, self.task, self.data = config, job.task, job.data
    self.model, self.train_steps = model, train_steps or job.train_steps
    self.settings = optimizer_lib.OptimizerConfig(**config.optimizer)
    optimizer = optimizer_lib.make_optimizer(self.settings, self.train_steps)
    init, abstract = state_lib.make_init(self.task, optimizer, mesh, config.sharding)
    state = init(state_lib.root_key(config.seed))
    self.state = state._replace(params=initial.from_model(state.params, job.start, 'model'))
    self._mesh = mesh
    self._step = state_lib.make_train_step(self.task, optimizer, mesh, config.sharding, abstract,
                                           seed=config.seed,
                                           accumulation=self.settings.accumulation)
    self._eval = state_lib.make_eval_step(self.task, mesh, config.sharding)
    self.seconds, self.compiling, self.shapes = 0.0, 0.0, set()

  def save(self, folder: epath.Path):
    """Exports the current model for transformers."""
    huggingface.save(Pretrained(
        architectures.make_config(self.config.model), jax.device_get(self.state.params),
        self.model.tokenizer, self.config.task, self.data.files.labels,
        self.data.files.problem), folder)

  def step(self, number: int) -> float:
    """Makes one update and returns the loss; new shapes count as compilation."""
    began = time.perf_counter()
    batch = self.data.rows(number)
    self.state, metrics = self._step(self.state, mesh_lib.put_batch(batch, self._mesh))
    total, count = jax.device_get(metrics['loss'])
    seconds = time.perf_counter() - began
    new = batch.tokens.ids.shape not in self.shapes
    self.shapes.add(batch.tokens.ids.shape)
    self.compiling += seconds if new else 0
    self.seconds += 0 if new else seconds
    return float(total / count)

  def evaluate(self) -> dict[str, float]:
    """Returns the scores on the evaluation file."""
    return self.data.evaluate(self.measure, 0)

  def measure(self, batch):
    """Returns the result of the evaluation step on one batch."""
    return self._eval(self.state, mesh_lib.put_batch(batch, self._mesh))


def _outputs(run: JaxRun) -> list[Output]:
  """Returns the predictions of the model on the evaluation file."""
  return [Output(located, jax.device_get(run.measure(located.batch))[1])
          for located in run.data.evals[0].batches.in_order()]


def _torch_outputs(run: JaxRun, theirs: torch_finetune.TorchRun) -> list[Output]:
  """Returns the predictions of PyTorch, with the logits in the layout of our batches."""
  (split,), task = run.data.evals, run.config.task
  logits, first = theirs.logits(split), split.batches.features.first
  outputs = []
  for located in split.batches.in_order():
    if task in ('token_classification', 'question_answering'):
      text_ids = located.batch.tokens.text_ids
      values = np.zeros((*text_ids.shape, logits[0].shape[-1]), np.float32)
      for row, slot in zip(*np.nonzero(located.index >= 0)):
        values[row][text_ids[row] == slot + 1] = logits[located.index[row, slot]]
    else:
      shown = np.stack([np.concatenate(logits[first[i]:first[i + 1]]) for i in located.examples])
      values = np.pad(shown, ((0, len(located.batch.members) - len(shown)), (0, 0)))
    outputs.append(Output(located, values))
  return outputs


def _reduced(run: JaxRun, outputs: list[Output]) -> list[Output]:
  return [output._replace(logits=np.asarray(run.task.reduced(output.logits)))
          for output in outputs]


def _torch_scores(run: JaxRun, outputs: list[Output]) -> dict[str, float]:
  """As `JaxRun.evaluate`."""
  total, count = np.sum([run.task.metrics(output.logits, output.located.batch)['loss']
                         for output in outputs], axis=0)
  return {'loss': float(total / count),
          **run.data.files.scores(run.data.evals[0], _reduced(run, outputs))}


def _predictions(run: JaxRun, outputs: list[Output]) -> list[Any]:
  """Classes, numbers, tags or answers."""
  (split,), labels = run.data.evals, run.data.files.labels
  if run.config.task == 'token_classification':
    sentences = run.data.files.predicted(split, outputs)
    return [tag for tags in sentences for tag in tags]
  if run.config.task == 'question_answering':
    candidates = run.data.files.candidates(split, outputs)
    return list(question_answering.predicted(split.examples, candidates, None).values())
  logits = by_example(outputs)
  return logits[:, 0].tolist() if labels == ('value',) else logits.argmax(1).tolist()


def _same(ours: list[Any], theirs: list[Any]) -> float:
  """The share of equal predictions; numbers count as equal within 0.05."""
  return float(np.mean([abs(a - b) < 0.05 if isinstance(a, float) else a == b
                        for a, b in zip(ours, theirs, strict=True)]))


def _parity(name: str, case: Case) -> dict[str, Any]:
  """Makes steps of both sides in turns."""
  steps = _STEPS.value
  fields = {'model.dropout': 0.0, 'model.attention_dropout': 0.0, 'model.scan_unroll': _LAYERS}
  if jax.default_backend() == 'gpu':
    fields['model.dtype'] = 'bfloat16'  # as autocast on the other side
  if _BATCH_SIZE.value:
    fields['batch_size'] = _BATCH_SIZE.value
  run = JaxRun(_config(case, fields), steps)
  folder = epath.Path(_WORKDIR.value) / 'heads' / name
  run.save(folder)
  arguments = (run.config.task, run.data, str(folder), run.settings, steps, 0.0, 0)
  torch_finetune.TorchRun(*arguments).step(0)  # warms up; not counted
  theirs = torch_finetune.TorchRun(*arguments)
  losses = [(run.step(0), theirs.step(0))]
  theirs.seconds = 0.0
  with turns.alone():
    losses += [(run.step(i), theirs.step(i)) for i in range(1, steps)]
  losses = np.array(losses)
  timed = steps - len(run.shapes)
  return {'worst_loss': float(np.abs(losses[:, 0] - losses[:, 1]).max()),
          'first_loss': losses[0].tolist(), 'last_loss': losses[-1].tolist(),
          'same': _same(_predictions(run, _outputs(run)),
                        _predictions(run, _reduced(run, _torch_outputs(run, theirs)))),
          'ms': 1e3 * run.seconds / timed / run.config.batch_size,
          'torch_ms': 1e3 * theirs.seconds / (steps - 1) / run.config.batch_size,
          'compilations': len(run.shapes), 'compiling': run.compiling,
          'fill': run.data.train.batches.fill()}


def _quality(case: Case, seed: int, side: str) -> dict[str, Any]:
  """Runs one side with dropout."""
  cut = {'init_from': _first_layers(case.layers)} if case.layers else {}
  run = JaxRun(_config(case, {**case.quality, **cut, 'seed': seed}))
  if side == 'bert_jax':
    for i in range(run.train_steps):
      run.step(i)
    scores = run.evaluate()
  else:
    folder = epath.Path(_WORKDIR.value) / 'heads' / f'{case.train.partition("/")[0]}-{seed}'
    run.save(folder)
    theirs = torch_finetune.TorchRun(run.config.task, run.data, str(folder), run.settings,
                                     run.train_steps, 0.1, seed)
    for i in range(run.train_steps):
      theirs.step(i)
    scores = _torch_scores(run, _torch_outputs(run, theirs))
  return {'scores': scores, 'steps': run.train_steps}


def _print_parity(lines: list[dict[str, Any]]):
  print('| task | worst difference of the losses | same predictions | ms an example | PyTorch | '
        'compilations |\n| --- | --- | --- | --- | --- | --- |')
  for x in lines:
    print(f'| {x["task"]} | {x["worst_loss"]:.1e} | {x["same"]:.2%} | {x["ms"]:.1f} | '
          f'{x["torch_ms"]:.1f} ({x["torch_ms"] / x["ms"]:.2f} times) | {x["compilations"]} in '
          f'{x["compiling"]:.0f} s |')


def _print_quality(lines: list[dict[str, Any]]):
  """The bound covers 99% of the differences between equal sides (two-sided t-test)."""
  print('| task | seeds | score | bert_jax | PyTorch | difference | bound |\n' + '| --- ' * 7 + '|')
  for name in dict.fromkeys(x['task'] for x in lines):
    for score in (TASKS[name].score, 'loss'):
      a, b = (np.array([x['scores'][score] for x in lines
                        if (x['task'], x['side']) == (name, side)]) for side in _QUALITY_SIDES)
      n = len(a)
      if n < 2 or len(b) != n:
        continue
      bound = stats.t.ppf(0.995, 2 * n - 2) * np.sqrt((a.var(ddof=1) + b.var(ddof=1)) / n)
      shown = (f'{x.mean():.4f} +- {x.std(ddof=1):.4f}' for x in (a, b))
      print(f'| {name} | {n} | {score} | {" | ".join(shown)} | {a.mean() - b.mean():+.4f} | '
            f'{bound:.4f} |')


def main(_):
  """Runs the missing cases and prints the table."""
  turns.busy()
  keep_flags(pathlib.Path(_WORKDIR.value), 'data', 'model', 'steps', 'batch_size')
  path = epath.Path(_WORKDIR.value) / f'{_MODE.value}.jsonl'
  lines = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
  names = _TASKS.value or [n for n, c in TASKS.items() if _MODE.value == 'parity' or c.quality]
  todo = [{'task': name} for name in names]
  if _MODE.value == 'quality':
    todo = [{'task': name, 'seed': seed, 'side': side} for name in names
            for seed in range(_QUALITY_SEEDS) for side in _QUALITY_SIDES]
  for key in todo:
    if any(key.items() <= line.items() for line in lines):
      continue
    case = TASKS[key['task']]
    results = (_parity(key['task'], case) if _MODE.value == 'parity'
             else _quality(case, key['seed'], key['side']))
    lines.append({**key, **results})
    with path.open('a') as file:
      file.write(json.dumps(lines[-1]) + '\n')
    print(json.dumps(lines[-1]), flush=True)
  (_print_parity if _MODE.value == 'parity' else _print_quality)(lines)


if __name__ == '__main__':
  app.run(main)
