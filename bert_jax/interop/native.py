"""bert_jax's own folders: the workdir of a run, and the checkpoint that `convert` writes.

A checkpoint is a folder with `bert.json` (the model and what is known of it), `params/` (orbax) and
`tokenizer/`.
"""

import dataclasses
import json
from typing import Any

from etils import epath
from flax import linen as nn
import orbax.checkpoint as ocp

from bert_jax.data import tokenizer as tokenizer_lib
from bert_jax.errors import UserError
from bert_jax.interop import layout
from bert_jax.interop.pretrained import HEAD_TASKS
from bert_jax.interop.pretrained import Pretrained
from bert_jax.interop.pretrained import check_vocabulary
from bert_jax.model.config import BertConfig
from bert_jax.training import checkpoint

CHECKPOINT_FILE = 'bert.json'
WORKDIR_FILE = 'run.json'


def _read(path: epath.Path) -> dict[str, Any]:
  try:
    content = json.loads(path.read_bytes())
  except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
    raise UserError(f'{path} cannot be read: {e}') from e
  if not isinstance(content, dict):
    raise UserError(f'{path} holds no JSON object')
  return content


def _config(fields: Any, path: epath.Path) -> BertConfig:
  known = BertConfig.__dataclass_fields__
  try:
    return BertConfig(**{name: value for name, value in fields.items() if name in known})
  except (AttributeError, TypeError) as e:
    raise UserError(f'{path} does not describe a model: {e}') from e


def save(model: Pretrained, directory: epath.Path):
  """Writes a checkpoint into a folder, which is made if it is not there."""
  directory = checkpoint.absolute(directory)
  directory.mkdir(parents=True, exist_ok=True)
  model.tokenizer.save(directory / 'tokenizer')
  with ocp.StandardCheckpointer() as writer:
    writer.save(directory / 'params', model.params)
  content = {'model': dataclasses.asdict(model.config), 'groups': model.groups, 'task': model.task,
             'labels': model.labels, 'facts': model.facts}
  (directory / CHECKPOINT_FILE).write_text(json.dumps(content, indent=2) + '\n')


def load(directory: epath.Path) -> Pretrained:
  """Reads a checkpoint.

  Raises:
    UserError: something is missing, or does not fit `bert.json`.
  """
  path = directory / CHECKPOINT_FILE
  content = _read(path)
  config = _config(content.get('model'), path)
  groups, labels = content.get('groups', ()), tuple(content.get('labels', ()))
  unknown = sorted(set(groups) - set(layout.GROUPS))
  if unknown or content.get('task', '') not in ('', *HEAD_TASKS):
    raise UserError(f'{path}: unknown groups {unknown} or task {content.get("task")!r}')
  tokenizer = tokenizer_lib.load(directory / 'tokenizer')
  check_vocabulary(config, tokenizer, directory)
  abstract = checkpoint.on_one_device(
      nn.unbox(layout.abstract_params(config, groups, len(labels))))
  try:
    with ocp.StandardCheckpointer() as reader:
      params = reader.restore(checkpoint.absolute(directory) / 'params', abstract)
  except (OSError, ValueError, KeyError) as e:
    raise UserError(f'{directory}/params cannot be read: {e}') from e
  return Pretrained(config, params, tokenizer, content.get('task', ''), labels,
                    content.get('facts', {}))


def _scores(workdir: epath.Path) -> dict[str, float]:
  """The newest evaluation in metrics.jsonl."""
  path, found = workdir / 'metrics.jsonl', {}
  if path.exists():
    for line in path.read_text().splitlines():
      entry = json.loads(line)
      if any(name.startswith('eval_') for name in entry):
        found = {n.removeprefix('eval_'): v for n, v in entry.items() if n.startswith('eval_')}
  return found


def load_workdir(directory: epath.Path) -> Pretrained:
  """Reads the newest checkpoint of a run.

  Raises:
    UserError: there is none yet, or it does not fit `run.json`.
  """
  path = directory / WORKDIR_FILE
  run = _read(path)
  fields = run.get('config', {})
  config = _config(fields.get('model'), path)
  tokenizer = tokenizer_lib.load(directory / 'tokenizer')
  check_vocabulary(config, tokenizer, directory / 'tokenizer')
  data = fields.get('data', {})
  pairs = data.get('sequences') != 'full_sentences'
  groups = ('pooler', 'mlm', 'nsp') if pairs else ('mlm',)
  abstract = nn.unbox(layout.abstract_params(config, groups))
  params, step = checkpoint.restore_params(directory, abstract)
  facts = {'source': str(directory), 'data': data.get('source'), 'steps': step,
           'command': run.get('command'), 'scores': _scores(directory)}
  return Pretrained(config, params, tokenizer, facts=facts)
