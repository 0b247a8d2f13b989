"""bert_jax: the BERT code base for JAX."""

from __future__ import annotations

from collections.abc import Mapping
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from ml_collections import ConfigDict

  from bert_jax.inference.bert import Bert

__version__ = '0.1.0'  # pyproject.toml reads it here


# Local imports, so that `import bert_jax` does not start JAX.


def from_pretrained(directory: str, step: int | None = None,
                    allow_older: bool = False, dtype: str | None = None) -> Bert:
  """Loads a trained model.

  Args:
    directory: a workdir, a checkpoint of bert_jax, a Hugging Face folder or hub name.
    step: the step of a checkpoint in a workdir; None = the best one, else the newest.
    allow_older: if this checkpoint is damaged, take the newest intact one before it.
    dtype: the dtype of matrix products: float32, bfloat16, or auto = bfloat16 if the
      device is fastest with it; None = the model's own, float32 for published models.

  Raises:
    UserError: `directory` has no intact model.
  """
  from bert_jax.inference import bert
  return bert.load(directory, step, allow_older, dtype)


def train(config: str | os.PathLike | ConfigDict, workdir: str | os.PathLike,
          fields: Mapping[str, Any] | None = None) -> Bert:
  """Trains a model, or resumes the run in the workdir, and loads the result.

  Args:
    config: the name of a config of bert_jax ('tiny'), a config file, or a config.
    workdir: a folder, local or gs://.
    fields: new values for fields of the config: {'optimizer.learning_rate': 1e-4}. As on
      the command line, each must have an effect.

  Raises:
    UserError: a mistake in the config, the data or the workdir.
  """
  from bert_jax import config as config_lib
  from bert_jax import config_files
  from bert_jax.config_fields import changed
  from bert_jax.errors import UserError
  from bert_jax.runs import run

  workdir = os.path.expanduser(os.fspath(workdir))
  if isinstance(config, str | os.PathLike):
    config = config_files.load(config_files.find(os.fspath(config)))
  fields = dict(fields or {})
  config_lib.check_overrides(config, [f'--config.{name}' for name in fields])
  defaults = config_lib.flat(config)
  try:
    wanted = changed(config, fields)
  except TypeError as e:  # a value of another type
    raise UserError(f'fields: {e}') from e
  run.run(wanted, workdir, {name: defaults[name] for name in fields})
  return from_pretrained(workdir)
