"""Runs commands one after another in one process that has imported JAX and all else.

A run ends before its first step. With `checks_only` it ends before it opens its data. Standard
input has one text.
"""

import contextlib
import copy
import importlib
import io
import os
import pkgutil
import runpy
import shlex
import sys
import traceback
from unittest import mock

from absl import flags

from bert_jax import commands
from bert_jax.runs import finetune, run
from bert_jax.training import loop

_TABLES = ('__flags', '__flags_by_module', '__flags_by_module_id', '__key_flags_by_module')
_STDIN = b'{"text": "w1 [MASK] w2"}\n'


def _copied(tables: dict[str, dict]) -> dict[str, dict]:
  return {name: {key: copy.copy(value) if isinstance(value, list) else value
                 for key, value in tables[name].items()} for name in _TABLES}


for _module in pkgutil.iter_modules(commands.__path__):  # some define flags for several commands
  importlib.import_module(f'bert_jax.commands.{_module.name}')
_FLAGS = _copied(flags.FLAGS.__dict__)  # of these modules; a command adds its own


def _leave(status):
  raise SystemExit(status)


def type_it(command: str, checks_only: bool = False) -> tuple[int, str]:
  """The exit status of `MODULE ARGUMENTS`, and what it writes to standard error."""
  module, *arguments = shlex.split(command)
  error, nothing = io.StringIO(), lambda *_, **__: None
  patches = [
      mock.patch.dict(flags.FLAGS.__dict__, _copied(_FLAGS)),
      mock.patch.object(os, '_exit', _leave),
      mock.patch.object(loop, 'train', nothing), mock.patch.object(run, '_checkpoints', nothing),
      mock.patch.object(sys, 'argv', [f'bert_jax/{module}.py', *arguments]),
      mock.patch.object(sys, 'stdin', io.TextIOWrapper(io.BytesIO(_STDIN))),
      contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO())]
  if checks_only:
    patches += [mock.patch.object(run, '_train', lambda asked, *_: asked.config),
                mock.patch.object(finetune, 'finish', nothing)]
  with contextlib.ExitStack() as stack:
    for patch in patches:
      stack.enter_context(patch)
    flags.FLAGS.unparse_flags()
    try:
      runpy.run_module(f'bert_jax.{module}', run_name='__main__', alter_sys=True)
    except SystemExit as e:
      return e.code or 0, error.getvalue()
    except Exception:
      return 1, error.getvalue() + traceback.format_exc()
  return 0, error.getvalue()


def serve(connection, folder: str):
  """Answers (command, checks_only) in a folder until None comes."""
  os.chdir(folder)
  while question := connection.recv():
    connection.send(type_it(*question))
