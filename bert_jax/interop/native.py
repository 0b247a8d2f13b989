"""Reads workdirs of runs, and reads and writes the checkpoints of `convert`.

Such a checkpoint is a folder with `bert.json` (everything but the arrays), `params/`
(orbax), `tokenizer/`, and `sentence/` if the model defines how to embed or score texts.
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
from bert_jax.interop import (
  cross_layout,
  late_layout,
  layout,
  pretrained,
  sentence_layout,
  sparse_layout,
  text_layout,
)
from bert_jax.interop.pretrained import Pretrained, fitted, head_groups
from bert_jax.model import architectures
from bert_jax.model.bert_config import BertConfig
from bert_jax.objectives import objectives
from bert_jax.objectives.objective import abstract_variables
from bert_jax.reporting import metrics_log
from bert_jax.runtime import sealed
from bert_jax.tasks import late_interaction, task_list
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
  """Writes a checkpoint, and creates its folder."""
  directory = checkpoint.absolute(directory)
  directory.mkdir(parents=True, exist_ok=True)
  model.tokenizer.save(directory / 'tokenizer')
  with ocp.StandardCheckpointer() as writer:
    writer.save(directory / 'params', model.params)
  # The digests let `load` detect files that were changed or damaged.
  content = {'model': dataclasses.asdict(model.config),
             'groups': model.groups,
             'task': model.task,
             'labels': model.labels,
             'problem': model.problem,
             'facts': model.facts,
             'tokenizer': sealed.digests(directory / 'tokenizer'),
             'arrays': integrity.arrays({'params': model.params})}
  if model.text_layout:
    model.text_layout.write(directory / _SENTENCE, model.config.hidden_size)
    content[_SENTENCE] = sealed.digests(directory / _SENTENCE)
  # Last: a folder with this file is complete.
  (directory / CHECKPOINT_FILE).write_text(
      json.dumps(sealed.seal(content), indent=2) + '\n')


def load(directory: epath.Path) -> Pretrained:
  """Reads a checkpoint that `save` wrote.

  Raises:
    UserError: a file or an array is missing, damaged, or does not fit `bert.json`.
  """
  path = directory / CHECKPOINT_FILE
  content = sealed.read(path)
  config = _config(content.get('model'), path)
  sealed.check(directory / 'tokenizer', content.get('tokenizer', {}))
  groups, labels = content.get('groups', ()), tuple(content.get('labels', ()))
  task = content.get('task', '')
  kind = task_list.WITH_HEAD.get(task)
  # A newer version of bert_jax may have written groups or tasks that are unknown here.
  unknown = sorted(
      set(groups) - {*layout.GROUPS, *(kind.parameter_groups if kind else ())})
  require(not unknown and (not task or kind),
          f'{path}: unknown groups {unknown} or task {content.get("task")!r}')
  tokenizer = fitted(tokenizer_reader.load(directory / 'tokenizer'), config, directory)
  abstract = checkpoint.on_one_device(
      nn.unbox(layout.abstract_params(config, groups, len(labels), task)))
  try:
    params = integrity.read(
        checkpoint.absolute(directory), {'params': abstract}, content)['params']
  except integrity.Damaged as e:
    raise UserError(f'{directory} is damaged: {e}') from e
  text_layout = None
  if _SENTENCE in content:
    sealed.check(directory / _SENTENCE, content[_SENTENCE])
    text_layout = sentence_layout.read(directory / _SENTENCE, config, tokenizer)
  return Pretrained(config=config,
                    params=params,
                    tokenizer=tokenizer,
                    task=task,
                    labels=labels,
                    problem=content.get('problem', ''),
                    facts=content.get('facts', {}),
                    text_layout=text_layout)


def _scores(workdir: epath.Path, step: int) -> dict[str, float]:
  """Returns the scores of the newest evaluation up to a step, from metrics.jsonl."""
  for entry in reversed(metrics_log.read_metrics(workdir / 'metrics.jsonl')):
    scores = {name.removeprefix('eval_'): value for name, value in entry.items()
              if name.startswith('eval_')}
    if scores and entry['step'] <= step:
      return scores
  return {}


def _text_layout(fields: dict[str, Any],
                 config: BertConfig) -> text_layout.TextLayout | None:
  """Returns how the model of a run reads texts; None = the task has no such layout."""
  pooling, max_len = fields.get('data', {}).get('pooling'), fields.get('max_len')
  if pooling:
    return sentence_layout.SentenceLayout((pooling,), max_len=config.max_positions)
  if fields.get('task') == late_interaction.LateKind.name:
    return late_layout.of_run(fields['data'], max_len)
  return {'sparse_embedding': sparse_layout.SparseLayout(max_len=max_len),
          'reranking': cross_layout.CrossLayout(cross_layout.SIGMOID, max_len=max_len),
          }.get(fields.get('task'))


def load_workdir(directory: epath.Path, step: int | None = None,
                 allow_older: bool = False) -> Pretrained:
  """Reads a checkpoint of a run; see `load.load` for `step` and `allow_older`.

  Raises:
    UserError: the checkpoint is missing or damaged, or does not fit `run.json`.
  """
  path = directory / WORKDIR_FILE
  run = sealed.read(path)
  sealed.check(directory / 'tokenizer', run.get('tokenizer', {}))
  fields = run.get('config', {})
  config = _config(fields.get('model'), path)
  folder = directory / 'tokenizer'
  tokenizer = fitted(tokenizer_reader.load(folder), config, folder)
  data, task, labels = (
      fields.get('data', {}), fields.get('task'), tuple(run.get('labels', ())))
  pretrains = task == 'pretrain'
  if pretrains:
    name = fields.get('objective', '')
    # A student has the parameters of a masked LM. Its teacher is not needed here.
    name = 'mlm' if name == 'distillation' else name
    objective = objectives.create(name, data.get('sequences'), config)
    abstract = abstract_variables(objective)
  else:
    abstract = layout.abstract_params(
        config, head_groups(config, task), len(labels), task)
  # Checkpoints of LoRA hold only the trained variables. The base model is saved once.
  factors = lora.LoraConfig(**fields.get('lora', {}))
  if factors.rank:
    abstract = jax.eval_shape(
        lambda x: lora.init_trained(x, factors, jax.random.key(0)), abstract)
  params, step = checkpoint.restore_params(directory, nn.unbox(abstract), step,
                                           allow_older)
  if factors.rank:
    params = lora.merge(params, load(directory / checkpoint.BASE).params, factors)
  facts = {'source': str(directory),
           'data': data.get('source') or data.get('train'),
           'steps': step,
           'command': run.get('command'),
           'scores': _scores(directory, step)}
  # The answers of a fine-tuned model depend on more than its parameters.
  if pretrains:
    params = objective.exported(params)
  else:
    facts |= {'task': task, 'max_len': fields.get('max_len'),
              'null_threshold': run.get('null_threshold')}
    facts |= {name: run[name] for name in ('highest_grade', 'reads_pairs') if name in run}
    facts |= {name: data[name] for name in pretrained.FACTS_OF_DATA if name in data}
  kind = task_list.WITH_HEAD.get(task)
  return Pretrained(config=config,
                    params=params,
                    tokenizer=tokenizer,
                    task=kind.model_task or task if kind else '',
                    labels=labels,
                    problem=run.get('problem', ''),
                    facts=facts,
                    text_layout=_text_layout(fields, config))
