"""Reads and writes bert_jax's own folders: the workdir of a run, and checkpoints of `convert`.

Such a checkpoint is a folder with `bert.json` (all but the arrays), `params/` (orbax),
`tokenizer/`, and `sentence/` where the model has its own way to the vector of a text.
"""

import dataclasses
import json
from typing import Any

from etils import epath
from flax import linen as nn
import jax
import orbax.checkpoint as ocp

from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.errors import UserError, require
from bert_jax.interop import cross_layout, layout, pretrained, sentence_layout
from bert_jax.interop.cross_layout import CrossLayout
from bert_jax.interop.pretrained import Pretrained, fitted, head_groups
from bert_jax.interop.sentence_layout import SentenceLayout
from bert_jax.interop.sparse_layout import SparseLayout
from bert_jax.model import architectures
from bert_jax.model.bert_config import BertConfig
from bert_jax.objectives import objectives
from bert_jax.objectives.objective import abstract_variables
from bert_jax.reporting import metrics_log
from bert_jax.runtime import sealed
from bert_jax.tasks import task_list
from bert_jax.training import checkpoint, integrity, lora

CHECKPOINT_FILE = 'bert.json'
WORKDIR_FILE = 'run.json'
_SENTENCE = 'sentence'


def _config(fields: Any, path: epath.Path) -> BertConfig:
  try:
    return architectures.make_config(fields)
  except (AttributeError, TypeError) as e:
    raise UserError(f'{path} does not describe a model: {e}') from e


def save(model: Pretrained, directory: epath.Path):
  """Writes a checkpoint; makes the folder if there is none."""
  directory = checkpoint.absolute(directory)
  directory.mkdir(parents=True, exist_ok=True)
  model.tokenizer.save(directory / 'tokenizer')
  with ocp.StandardCheckpointer() as writer:
    writer.save(directory / 'params', model.params)
  content = {'model': dataclasses.asdict(model.config), 'groups': model.groups, 'task': model.task,
             'labels': model.labels, 'problem': model.problem, 'facts': model.facts,
             'tokenizer': sealed.digests(directory / 'tokenizer'),
             'arrays': integrity.arrays({'params': model.params})}
  if model.sentence:
    model.sentence.write(directory / _SENTENCE, model.config.hidden_size)
    content[_SENTENCE] = sealed.digests(directory / _SENTENCE)
  (directory / CHECKPOINT_FILE).write_text(json.dumps(sealed.seal(content), indent=2) + '\n')


def load(directory: epath.Path) -> Pretrained:
  """Reads a checkpoint.

  Raises:
    UserError: something is missing, or does not fit `bert.json`.
  """
  path = directory / CHECKPOINT_FILE
  content = sealed.read(path)
  config = _config(content.get('model'), path)
  sealed.check(directory / 'tokenizer', content.get('tokenizer', {}))
  groups, labels = content.get('groups', ()), tuple(content.get('labels', ()))
  task = content.get('task', '')
  kind = task_list.WITH_HEAD.get(task)
  unknown = sorted(set(groups) - {*layout.GROUPS, *(kind.parameter_groups if kind else ())})
  require(not unknown and (not task or kind),
          f'{path}: unknown groups {unknown} or task {content.get("task")!r}')
  tokenizer = fitted(tokenizer_reader.load(directory / 'tokenizer'), config, directory)
  abstract = checkpoint.on_one_device(
      nn.unbox(layout.abstract_params(config, groups, len(labels), task)))
  try:
    params = integrity.read(checkpoint.absolute(directory), {'params': abstract}, content)['params']
  except integrity.Damaged as e:
    raise UserError(f'{directory} is damaged: {e}') from e
  sentence = None
  if _SENTENCE in content:
    sealed.check(directory / _SENTENCE, content[_SENTENCE])
    sentence = sentence_layout.read(directory / _SENTENCE, config, tokenizer)
  return Pretrained(config, params, tokenizer, task, labels,
                    content.get('problem', ''), content.get('facts', {}), sentence)


def _scores(workdir: epath.Path, step: int) -> dict[str, float]:
  """The newest evaluation in metrics.jsonl up to a step."""
  for entry in reversed(metrics_log.read_metrics(workdir / 'metrics.jsonl')):
    scores = {n.removeprefix('eval_'): v for n, v in entry.items() if n.startswith('eval_')}
    if scores and entry['step'] <= step:
      return scores
  return {}


def load_workdir(directory: epath.Path, step: int | None = None,
                 allow_older: bool = False) -> Pretrained:
  """Reads a checkpoint of a run; `step` and `allow_older` choose it as in `load.load`.

  Raises:
    UserError: there is no checkpoint yet, it is damaged, or it does not fit `run.json`.
  """
  path = directory / WORKDIR_FILE
  run = sealed.read(path)
  sealed.check(directory / 'tokenizer', run.get('tokenizer', {}))
  fields = run.get('config', {})
  config = _config(fields.get('model'), path)
  folder = directory / 'tokenizer'
  tokenizer = fitted(tokenizer_reader.load(folder), config, folder)
  data, task, labels = fields.get('data', {}), fields.get('task'), tuple(run.get('labels', ()))
  pretrains = task == 'pretrain'
  if pretrains:
    name = fields.get('objective', '')
    # A student's parameters are those of any masked LM.
    name = 'mlm' if name == 'distillation' else name
    objective = objectives.create(name, data.get('sequences'), config)
    abstract = abstract_variables(objective)
  else:
    abstract = layout.abstract_params(config, head_groups(config, task), len(labels), task)
  factors = lora.LoraConfig(**fields.get('lora', {}))
  if factors.rank:
    abstract = jax.eval_shape(lambda x: lora.trained(x, factors, jax.random.key(0)), abstract)
  params, step = checkpoint.restore_params(directory, nn.unbox(abstract), step, allow_older)
  if factors.rank:
    params = lora.merge(params, load(directory / checkpoint.BASE).params, factors)
  facts = {'source': str(directory), 'data': data.get('source') or data.get('train'), 'steps': step,
           'command': run.get('command'), 'scores': _scores(directory, step)}
  if pretrains:
    params = objective.exported(params)
  else:
    facts |= {'task': task, 'max_len': fields.get('max_len'),
              'null_threshold': run.get('null_threshold')}
    if 'highest_grade' in run:
      facts['highest_grade'] = run['highest_grade']
    facts |= {name: data[name] for name in pretrained.FACTS_OF_DATA if name in data}
  kind = task_list.WITH_HEAD.get(task)
  sentence = None
  if data.get('pooling'):
    sentence = SentenceLayout((data['pooling'],), max_len=config.max_positions)
  elif task == 'sparse_embedding':
    sentence = SparseLayout(max_len=fields.get('max_len'))
  elif task == 'reranking':
    sentence = CrossLayout(cross_layout.SIGMOID, max_len=fields.get('max_len'))
  return Pretrained(config, params, tokenizer, kind.model_task or task if kind else '', labels,
                    run.get('problem', ''), facts, sentence)
