"""The part of --help about the config: how to override fields, and where they are."""

import pathlib
import textwrap

import bert_jax
from bert_jax.commands import config_flag

_EXAMPLE = """
Override any field of the config:
  python -m bert_jax.main --config=tiny --workdir=runs/mine --config.train_steps=500 \\
      --config.optimizer.learning_rate=1e-3"""
# {group: (its content, the files that explain its fields)}; '' = fields without a group.
GROUPS = {
    '': ('length, rows, evaluations, checkpoints, initial model, devices', 'fields/'),
    'data': ('the text or the examples, and the vocabulary', 'fields/, tasks/'),
    'model': ('architecture, sizes, dropout, precision, memory', 'model/bert_config.py'),
    'masking': ('which tokens a pretraining run predicts', 'objectives/masking.py'),
    'optimizer': ('learning rate and schedule, weight decay', 'training/optimizer.py'),
    'lora': ('low-rank factors on a frozen encoder', 'training/lora.py'),
    'mesh': ('the devices on each axis', 'fields/'),
}


def text() -> str:
  """An example, the groups of fields with their files, and the names of the configs."""
  home = pathlib.Path(bert_jax.__file__).parent
  lines = [_EXAMPLE, '', f'Fields of the config, explained in these files of {home}:']
  for group, (content, file) in GROUPS.items():
    flag = f'--config.{group}.FIELD' if group else '--config.FIELD'
    lines.append(f'  {flag:<25} {content} ({file})')
  configs = textwrap.fill(f'Configs: {", ".join(config_flag.names())}', 100)
  return '\n'.join([*lines, '', configs])
