"""Compares GLUE with PyTorch: repeats the runs of `evaluate --suite=glue` there.

  python -m bert_jax.evaluate --model=MODEL --suite=glue --data=GLUE --output=OUT.json
  python -m benchmarks.glue --scores=OUT.json

MODEL is a Hugging Face folder. For each run in OUT.runs, PyTorch fine-tunes the same
model on the same files with the recipe of its run.json, as a transformers script does:
its own tokenizer, padded batches, its own shuffling and dropout. Both sides choose the
learning rate and the epoch on the held-out part of train, and are scored on the
development file. Needs torch and transformers.
"""

import json
import math
import statistics
from typing import Any

from absl import app, flags
from etils import epath
import numpy as np
import torch
import transformers

from bert_jax.labelled import glue
from bert_jax.tasks import metrics
from bert_jax.training import optimizer as optimizer_lib

_SCORES = flags.DEFINE_string('scores', None, 'The --output of evaluate.', required=True)


class _Examples:
  """The tokenized examples of a GLUE file."""

  def __init__(self, path: str, task: glue.Glue, split: str, tokenizer, max_len: int):
    rows = list(glue.read(path, task, split))
    texts = [row.values[task.text] for row in rows]
    pairs = [row.values[task.text_pair] for row in rows] if task.text_pair else None
    self._encoded = tokenizer(texts, pairs, truncation=True, max_length=max_len)
    self._tokenizer = tokenizer
    values = [row.values[task.label] for row in rows]
    self.labels = np.array([float(v) if task.problem == 'regression' else task.written.index(v)
                            for v in values])

  def batch(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
    """Returns the padded inputs of some examples."""
    return self._tokenizer.pad({name: [x[i] for i in numbers] for name, x in self._encoded.items()},
                               return_tensors='pt')


def _optimizer(model: torch.nn.Module, settings: optimizer_lib.OptimizerConfig):
  """AdamW without weight decay of biases and norms."""
  groups = {True: [], False: []}
  for name, parameter in model.named_parameters():
    groups[name.endswith('bias') or 'LayerNorm' in name].append(parameter)
  return torch.optim.AdamW(
      [{'params': groups[False], 'weight_decay': settings.weight_decay},
       {'params': groups[True], 'weight_decay': 0.0}],
      lr=settings.learning_rate, betas=(settings.b1, settings.b2), eps=settings.eps)


@torch.inference_mode()
def _score(model: torch.nn.Module, examples: _Examples, task: glue.Glue) -> float:
  model.eval()
  numbers = np.arange(len(examples.labels))
  logits = np.concatenate([model(**examples.batch(numbers[i:i + 32])).logits.numpy()
                           for i in range(0, len(numbers), 32)])
  if task.problem == 'regression':
    return metrics.regression(examples.labels, logits[:, 0])[task.metric]
  return metrics.single_label(examples.labels, logits.argmax(1), len(task.labels))[task.metric]


def _fine_tune(config: dict[str, Any], model_folder: str) -> tuple[float, float]:
  """Returns the scores of the best epoch: (held-out part of train, development file)."""
  task = glue.find(config['data']['format'])
  settings = optimizer_lib.OptimizerConfig(**config['optimizer'])
  torch.manual_seed(config['seed'])
  rng = np.random.default_rng(config['seed'])
  tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
  regression = task.problem == 'regression'
  model = transformers.AutoModelForSequenceClassification.from_pretrained(
      model_folder, num_labels=1 if regression else len(task.labels),
      problem_type=task.problem if regression else 'single_label_classification')
  train, *evals = (
      _Examples(path, task, split, tokenizer, config['max_len'])
      for path, split in zip((config['data']['train'], *config['data']['eval'].split(',')),
                             ('train', 'eval', 'eval')))
  optimizer, size = _optimizer(model, settings), config['batch_size']
  steps_of_epoch = len(train.labels) // size
  epochs = round(config['train_epochs'])
  if epochs != config['train_epochs']:
    raise SystemExit(f'train_epochs={config["train_epochs"]}: give whole epochs')
  schedule = transformers.get_linear_schedule_with_warmup(
      optimizer, round(settings.warmup_ratio * steps_of_epoch * epochs), steps_of_epoch * epochs)
  labels = torch.tensor(train.labels).float() if regression else torch.tensor(train.labels).long()
  scores = []
  for _ in range(epochs):
    model.train()
    order = rng.permutation(len(train.labels))
    for i in range(steps_of_epoch):
      numbers = order[i * size:(i + 1) * size]
      model(**train.batch(numbers), labels=labels[numbers]).loss.backward()
      if settings.clip_norm:
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
      optimizer.step()
      schedule.step()
      optimizer.zero_grad()
    scores.append(tuple(_score(model, examples, task) for examples in evals))
  return max(scores, key=lambda pair: pair[0])  # only the held-out part chooses the epoch


def _both(folder: epath.Path, model_folder: str) -> dict[str, dict[str, list[tuple[float, float]]]]:
  """Returns {learning rate: {side: scores over seeds}} for the runs of a task."""
  scores = {}
  for run in sorted(folder.iterdir()):
    theirs = run / 'pytorch.json'
    if not theirs.exists():
      config = json.loads((run / 'run.json').read_text())['config']
      theirs.write_text(json.dumps(_fine_tune(config, model_folder)))
      print(f'{folder.name}/{run.name}: {theirs.read_text()}', flush=True)
    sides = scores.setdefault(run.name.rpartition('-')[0], {'bert_jax': [], 'PyTorch': []})
    sides['bert_jax'].append(json.loads((run / 'scores.json').read_text()))
    sides['PyTorch'].append(json.loads(theirs.read_text()))
  return scores


def main(_):
  """Makes the missing PyTorch runs and prints the table."""
  runs = epath.Path(_SCORES.value).with_suffix('.runs')
  model_folder = json.loads(epath.Path(_SCORES.value).read_text())['model']
  print('| task | score | bert_jax | PyTorch | difference | two standard errors |\n' + '| --- ' * 6
        + '|')
  for folder in sorted(runs.glob('*-model')):
    scores, shown = _both(folder, model_folder), []
    for side in ('bert_jax', 'PyTorch'):
      best = max(scores.values(), key=lambda sides: statistics.mean(x for x, _ in sides[side]))
      shown.append([dev for _, dev in best[side]])
    if min(map(len, shown)) < 2:
      raise app.UsageError(f'--scores={_SCORES.value} has one seed: a bound needs two')
    means = [statistics.mean(x) for x in shown]
    bound = 2 * math.sqrt(sum(statistics.variance(x) / len(x) for x in shown))
    columns = [f'{statistics.mean(x):.4f} +- {statistics.stdev(x):.4f}' for x in shown]
    name = folder.name.removesuffix('-model')
    print(f'| {name} | {glue.find(f"glue/{name}").metric} | {" | ".join(columns)} | '
          f'{means[0] - means[1]:+.4f} | {bound:.4f} |')


if __name__ == '__main__':
  app.run(main)
