"""The kind of every parameter of every model, head and objective, in `parameter_kinds.txt`.

After a change, `python -m tests.model.test_parameters` rewrites the file.
"""

from collections.abc import Iterator
import dataclasses
import pathlib
from typing import Any

from flax import traverse_util
import jax
import pytest

from bert_jax.model import architectures, parameters
from bert_jax.model.bert_config import BertConfig
from bert_jax.objectives import objectives
from bert_jax.objectives.objective import abstract_variables
from bert_jax.tasks import task_list
from bert_jax.training import lora
from bert_jax.training import optimizer as optimizer_lib

_TABLE = pathlib.Path(__file__).parent / 'parameter_kinds.txt'
_SIZES = dict(vocab_size=200, hidden_size=32, num_layers=4, num_heads=4, intermediate_size=64,
              max_positions=64)
# Options that add parameters to an architecture.
_MORE = {'albert': [{'embedding_size': 16}],
         'electra': [{'embedding_size': 16, 'generator_size': 0.5}],
         'modernbert': [{}, {'conv_reach': 2}],
         'deberta-v2': [{}, {'conv_kernel_size': 3, 'share_att_key': False,
                             'norm_rel_ebd': 'none'}]}


def configs(name: str) -> Iterator[BertConfig]:
  """A small model of an architecture, and its variants with other parameters."""
  kind = architectures.ALL[name].config
  fields = {field.name for field in dataclasses.fields(kind)}
  for more in _MORE.get(name, [{}]):
    yield kind(**_SIZES, **{field: name for field in ('architecture',) if field in fields}, **more)


def trees(config: BertConfig) -> Iterator[Any]:
  """The parameters of each objective and each head of a model."""
  for name, entry in objectives.ALL.items():
    if entry.trains(config.architecture):
      teacher = config if name == 'distillation' else None
      yield abstract_variables(objectives.create(name, entry.sequences[0], config, teacher))
  for task in task_list.WITH_HEAD.values():
    yield task.abstract_params(config, 3)
  whole = abstract_variables(objectives.create('', 'full_sentences', config))
  yield jax.eval_shape(lambda: lora.init_trained(
      jax.tree.map(lambda x: jax.numpy.zeros(x.shape), whole), lora.LoraConfig(rank=2),
      jax.random.key(0)))


def table() -> str:
  """A line for each parameter: its kind, its path, and the architectures that have it."""
  rows = {}
  for name in architectures.ALL:
    for config in configs(name):
      for tree in trees(config):
        for path, kind in traverse_util.flatten_dict(parameters.kinds(tree), sep='/').items():
          rows.setdefault((path.replace('/generator/', '/'), kind), {})[name] = None
  return ''.join(f'{kind:8}{path}  {" ".join(names)}\n' for (path, kind), names in
                 sorted(rows.items()))


@pytest.mark.medium
def test_every_parameter_has_the_kind_of_the_table():
  assert table() == _TABLE.read_text()


def test_weight_decay_follows_the_kind():
  rows = {line.split()[1]: line.split()[0] for line in _TABLE.read_text().splitlines()}
  assert len(rows) == len(_TABLE.read_text().splitlines())  # no path has two kinds
  assert set(rows.values()) == set(parameters.Kind)
  decays = {}
  for path, kind in rows.items():  # one at a time: the path of a factor lies below its matrix
    tree = traverse_util.unflatten_dict({path: 0.0}, sep='/')
    decays.setdefault(kind, set()).update(jax.tree.leaves(optimizer_lib.has_weight_decay(tree)))
  assert decays == {'bias': {False}, 'norm': {False}, 'matrix': {True}, 'table': {True},
                    'taps': {True}, 'factor': {True}}


@pytest.mark.parametrize('path', ['layers/gate/scale', 'layers/attention/sink', 'layers/kernels'])
def test_an_unknown_parameter_is_refused(path):
  """Without a kind, chance would decide whether it decays and is cast."""
  tree = traverse_util.unflatten_dict({f'params/bert/{path}': 0.0}, sep='/')
  for ask in (parameters.kinds, optimizer_lib.has_weight_decay):
    with pytest.raises(ValueError, match=f'params/bert/{path} is a parameter of no known kind'):
      ask(tree)


if __name__ == '__main__':
  _TABLE.write_text(table())
