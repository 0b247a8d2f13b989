"""Plans a run: python -m bert_jax.plan --config=FILE --topology=v5e:4x4"""

from absl import flags

from bert_jax import errors
from bert_jax.commands import config_flag, overwrite_flag

_TOPOLOGY = flags.DEFINE_list(
    'topology', ['local'],
    'TPU slices by generation and shape: v4:2x2x1, v5e:4x4, v5p:2x2x4, v6e:4x4, '
    'tpu7x:2x2x1, ...; NVIDIA GPUs by their number on a host: a100:8, h100:8, h200:8, '
    'b200:8, gb200:4, two hosts: h100:2x8; local = the devices of this machine.')
_PRICE = flags.DEFINE_float(
    'price', 0.0, 'Price of a chip-hour; adds the costs.', lower_bound=0)
_SEARCH = flags.DEFINE_bool(
    'search', False,
    'Find the largest batch that fits, for each choice of remat and sharding.')
_EXPLAIN = flags.DEFINE_bool(
    'explain', False, 'Show the operations of a step that move the most memory.')
_OUT = flags.DEFINE_string('out', '', 'A JSON file for all figures.')


def _main(argv: list[str]):
  errors.require(config_flag.is_given(), 'give --config=configs/large.py (or another)')
  config = config_flag.get()
  overwrite = overwrite_flag.get('--out', _OUT.value)
  from bert_jax.planning import planner  # after the flags: JAX is slow to import
  from bert_jax.runtime import storage
  with storage.exclusive('--out', _OUT.value, overwrite=overwrite):
    planner.plan(config, _TOPOLOGY.value, price=_PRICE.value, search=_SEARCH.value,
                 explain=_EXPLAIN.value, out=_OUT.value, given=config_flag.given())


if __name__ == '__main__':
  config_flag.run_command(_main)
