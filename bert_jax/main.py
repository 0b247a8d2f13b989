"""Trains a model: python -m bert_jax.main --config=configs/tiny.py --workdir=DIR"""

from absl import flags

from bert_jax import errors
from bert_jax.commands import config_flag
from bert_jax.runtime import console

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run, local or gs://.')


def _main(argv: list[str]):
  errors.require(config_flag.is_given() and _WORKDIR.value is not None,
                 'give both --config=configs/tiny.py (or another) and --workdir=DIR')
  config = config_flag.get()
  console.outlive_readers()
  from bert_jax.runs import run  # after the flags: JAX is slow to import
  try:
    run.run(config, _WORKDIR.value, config_flag.given())
  except Exception as e:
    # Imported here, because only this error needs the planner.
    from bert_jax.planning import out_of_memory
    if not out_of_memory.describes(e) or config.task != 'pretrain' or config.init_from:
      raise
    raise errors.Failed(out_of_memory.explain(config, config_flag.given())) from e


if __name__ == '__main__':
  config_flag.run_command(_main)
