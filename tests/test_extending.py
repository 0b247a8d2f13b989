"""Each addition takes exactly the files and lines that docs/extending.md names."""

import dataclasses
import functools
import inspect
import pathlib
import re
import tokenize

from etils import epath
from flax import linen as nn
import jax
import numpy as np
import pytest

import bert_jax
from bert_jax.data.tokens import Tokens
from bert_jax.errors import UserError
from bert_jax.evaluation import suites
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interop import families, huggingface, layout, native
from bert_jax.interop.pretrained import Pretrained
from bert_jax.model import architectures, attention_kernels
from bert_jax.objectives import objectives
from bert_jax.runs import run
from bert_jax.tasks import task_kind, task_list
from tests import conftest, made_tasks
from tests.extensions import last_norm, last_norm_names, loops

PACKAGE = pathlib.Path(bert_jax.__file__).parent
SIZES = {'hidden_size': 32, 'num_layers': 2, 'num_heads': 4, 'intermediate_size': 64,
         'max_positions': 64}


@pytest.fixture
def architecture(monkeypatch):
  """Adds an entry to each of two lists."""
  monkeypatch.setitem(architectures.ALL, 'last_norm', architectures.Architecture(
      last_norm.LastNormConfig, last_norm.LastNorm))
  monkeypatch.setitem(families.ALL, 'last_norm', last_norm_names.LAST_NORM)


def tokens(rows: int, length: int) -> Tokens:
  """Rows of two texts and padding."""
  ids = np.random.default_rng(0).integers(5, 50, (rows, length)).astype(np.int32)
  at = np.arange(length, dtype=np.int32) * np.ones_like(ids)
  half = length // 2
  text_ids = np.where(at < half, 1, np.where(at < length - 3, 2, 0)).astype(np.int32)
  return Tokens(ids, np.zeros_like(ids), np.where(at < half, at, at - half), text_ids)


def test_a_new_architecture_is_saved_and_loaded_in_every_layout(architecture, tmp_path):
  tokenizer = made_tasks.tokenizer()
  config = architectures.make_config(
      {**SIZES, 'architecture': 'last_norm', 'vocab_size': tokenizer.vocab_size})
  encoder, batch = architectures.make_encoder(config), tokens(2, 16)
  params = nn.unbox(jax.jit(encoder.init)(jax.random.key(0), batch, batch.ids[:, :1]))
  encode = jax.jit(functools.partial(encoder.apply, method='encode'))
  hidden = np.asarray(encode(params, batch))
  np.testing.assert_allclose(hidden.mean(-1), 0, atol=1e-6)  # the last norm
  np.testing.assert_allclose(hidden.std(-1), 1, atol=1e-3)
  params['params']['last_norm']['scale'] = np.arange(32, dtype=np.float32)
  model = Pretrained(config, jax.device_get({'params': {'bert': params['params']}}), tokenizer)
  tensors = layout.to_tensors(model.params, config)  # without the padding of the vocabulary
  np.testing.assert_array_equal(tensors['encoder.last_norm.weight'], np.arange(32))
  for library in (huggingface, native):
    folder = epath.Path(tmp_path / library.__name__)
    library.save(model, folder)
    again = library.load(folder)
    assert again.config == config
    read = layout.to_tensors(again.params, config)
    assert read.keys() == tensors.keys()
    assert all(np.array_equal(read[name], tensors[name]) for name in tensors)


@pytest.mark.slow
def test_a_new_architecture_trains_and_encodes(architecture, corpus_file, tmp_path):
  config = conftest.tiny_config(corpus_file, **{
      'model.architecture': 'last_norm', 'optimizer.warmup_steps': 1, 'train_steps': 2,
      'eval_every': 2, 'checkpoint_every': 2})
  run.run(config, str(tmp_path / 'run'))
  bert = bert_jax.from_pretrained(str(tmp_path / 'run'))
  scale = bert.params['params']['bert']['last_norm']['scale']
  assert np.abs(np.asarray(scale) - 1).max() > 0  # training changed it
  assert np.all(np.isfinite(bert.encode(['w1 w2']).hidden))


# Other files that name an architecture: the objectives for it alone. The readers of tokenizers and
# pipelines have their own names for it.
ELSEWHERE = {'electra': {'objectives/objectives.py'},
             'deberta-v2': {'objectives/objectives.py', 'objectives/disentangled_sharing.py'},
             'roberta': {'runs/initial.py'}, 'distilbert': {'runs/initial.py'}}
OWN = {'deberta-v2': 'deberta', 'modernbert': 'modern'}  # the stems of their files


@pytest.mark.parametrize('name', sorted(architectures.ALL.keys() - {'bert'}))
def test_an_architecture_is_named_only_in_its_files_and_two_lists(name):
  stem = OWN.get(name, name)
  allowed = {f'model/{stem}.py', 'model/architectures.py', f'interop/{stem}_names.py',
             'interop/families.py', *ELSEWHERE.get(name, ())}
  naming = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob('*.py')
            if re.search(f"['\"]{name}['\"]", path.read_text())}
  naming = {path for path in naming
            if not path.startswith('data/tokenizers/') and path != 'interop/text_layout.py'}
  assert naming <= allowed and 'model/architectures.py' in naming


def test_a_new_attention_kernel_runs_where_it_is_available(monkeypatch):
  config = architectures.make_config({**SIZES, 'vocab_size': 50})
  encoder, batch = architectures.make_encoder(config), tokens(2, 16)
  params = jax.jit(encoder.init)(jax.random.key(0), batch, batch.ids[:, :1])

  def encode():  # traced anew
    return jax.jit(functools.partial(encoder.apply, params, method='encode'))(batch)

  plain = encode()
  calls = []

  def attend(*args):
    calls.append(args)
    return loops.attend(*args)

  monkeypatch.setitem(attention_kernels.ALL, 'loops', attention_kernels.Kernel(
      loops.obstacle, attend, ('cpu',), drops=True))
  assert attention_kernels.choose_path(config, 16) == (
      'loops', 'it does not store the attention weights')
  fast, real = encode(), batch.text_ids > 0
  traced = len(calls)
  assert traced > 0
  np.testing.assert_allclose(fast[real], plain[real], atol=1e-5)
  assert attention_kernels.choose_path(config, 15) == ('xla', '15 is odd')
  encoder.apply(params, batch, method='states')  # without the kernel
  assert len(calls) == traced
  cannot_drop = attention_kernels.ALL['loops']._replace(drops=False)
  monkeypatch.setitem(attention_kernels.ALL, 'loops', cannot_drop)
  assert attention_kernels.choose_path(config, 16)[1] == 'attention_dropout=0.1 (0 allows loops)'
  with pytest.raises(UserError, match='loops is not available: 15 is odd'):
    monkeypatch.setattr(attention_kernels, 'CHOICES', (*attention_kernels.CHOICES, 'loops'))
    attention_kernels.choose_path(dataclasses.replace(config, attention='loops'), 15)


EXTENDING = (PACKAGE.parent / 'docs' / 'extending.md').read_text()


def lines_with(word: str, name: str) -> list[str]:
  """The lines of a file of the package that contain a word."""
  return re.findall(rf'^.*\b{word}\b.*$', (PACKAGE / name).read_text(), re.MULTILINE)


def files_with(*words: str) -> set[str]:
  """The files of the package that contain at least one of the words, also in strings."""
  pattern = re.compile(rf'\b({"|".join(words)})\b')
  return {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob('*.py')
          if pattern.search(path.read_text())}


@pytest.mark.parametrize('task, classes', [
    ('multiple_choice', ('MultipleChoice', 'ChoiceFiles', 'ChoiceKind', 'BertForMultipleChoice'))])
def test_a_task_needs_one_file_and_one_entry(task, classes):
  """The file covers training, predictions, conversion and runs that start from the head."""
  own, listed = f'tasks/{task}.py', 'tasks/task_list.py'
  assert files_with(task, *classes) == {own, listed}
  kind = task_list.WITH_HEAD[task]
  assert {kind.__module__, kind.files.__module__, kind.head.__module__} == {
      f'bert_jax.tasks.{task}'}
  assert len(lines_with(task, listed)) == 2  # its import and its entry
  assert kind.fields and kind.transformers and kind.parameter_groups
  assert f'`bert_jax/{own}`' in EXTENDING  # readers start from it


def test_an_objective_needs_one_file_and_one_entry():
  """Besides, only the comment of the config field names it."""
  own, listed = 'objectives/disentangled_sharing.py', 'objectives/objectives.py'
  field = 'fields/pretraining_fields.py'
  name, objective = 'replaced_tokens_gdes', objectives.ALL['replaced_tokens_gdes'].create
  assert objective.__module__ == 'bert_jax.objectives.disentangled_sharing'
  words = (name, 'disentangled_sharing', objective.__name__)
  assert files_with(*words) == {own, listed, field}
  assert len(lines_with(objective.__name__, listed)) == 2  # its import and its entry
  assert all(line.lstrip().startswith('#') for word in words for line in lines_with(word, field))
  assert {f'`bert_jax/{path}`' for path in (own, listed, field)} <= set(
      re.findall('`[^`]+`', EXTENDING))


def test_a_suite_needs_one_file_and_one_entry():
  """Besides, only the help texts of the command name it."""
  own, listed, command = 'evaluation/minimal_pairs.py', 'evaluation/suites.py', 'evaluate.py'
  assert 'minimal_pairs' in suites.SUITES and (PACKAGE / own).exists()
  assert files_with('minimal_pairs') - {own} == {listed, command}
  lines = lines_with('minimal_pairs', listed)
  assert len(lines) == 2  # its import and its entry
  with (PACKAGE / command).open() as file:
    names = {x.string for x in tokenize.generate_tokens(file.readline) if x.type == tokenize.NAME}
  assert 'suites' in names and 'minimal_pairs' not in names  # it is only in help texts
  assert {f'`bert_jax/{path}`' for path in (own, listed, command)} <= set(
      re.findall('`[^`]+`', EXTENDING))


def test_a_loaded_model_has_the_members_that_tasks_need():
  init = inspect.getsource(LoadedModel.__init__)
  of_instances = set(re.findall(r'self\.(\w+)(?=[^=(]* = )', init))  # __init__ assigns these
  protocol = task_kind.TrainedModel
  names = set(protocol.__annotations__) | {
      name for name, x in vars(protocol).items()
      if (callable(x) or isinstance(x, property)) and not name.startswith('_')}
  assert len(names) == 11
  assert all(hasattr(LoadedModel, name) for name in names - of_instances)
