"""Eight fake CPU devices for every test, and the small corpora that the tests share."""

import atexit
import ctypes
import gc
from importlib import metadata
import os
import shutil
import tempfile

# Compiling takes longer than computing. It takes a third of the time without the expensive passes,
# without splitting programs among more threads than the tests have cores, and with XLA's older
# fusion emitters, if XLA still has them.
# JAX_DISABLE_MOST_OPTIMIZATIONS=0 compiles as for users.
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'
if os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1') == '1':
  os.environ['XLA_FLAGS'] += ' --xla_cpu_parallel_codegen_split_count=1'
  if metadata.version('jaxlib').startswith('0.10.'):
    os.environ['XLA_FLAGS'] += ' --xla_cpu_use_fusion_emitters=false'
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['OMP_NUM_THREADS'] = '1'  # waiting threads of PyTorch spin and keep the cores busy
os.environ['EPATH_USE_TF'] = 'false'  # TensorFlow's gs:// cannot use an emulator
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
  # Many tests and their commands compile the same programs: a run of the tests compiles each once.
  _CACHE = tempfile.mkdtemp(prefix='bert_jax_tests_')
  atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
  os.environ['JAX_COMPILATION_CACHE_DIR'] = _CACHE
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.5'
  os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'

from collections.abc import Callable
import pathlib
import signal

from etils import epath
import jax
from jax.sharding import AxisType
import numpy as np
import pytest

from bert_jax.parallel import mesh as mesh_lib
from bert_jax.runtime import host
from tests import tiny

# A shell starts commands in the background with SIGINT ignored, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tracing and compiling make millions of objects, few of them in cycles.
gc.set_threshold(100_000, 50, 100)

WORDS = ['the', 'a', 'his', 'her', 'old', 'new', 'small', 'large', 'red', 'green', 'house', 'river',
         'tree', 'stone', 'bird', 'horse', 'king', 'child', 'runs', 'sees', 'finds', 'takes',
         'gives', 'holds', 'under', 'over', 'near', 'behind', 'and', 'but', 'then', 'slowly']


def make_documents(count: int, seed: int = 0) -> list[list[str]]:
  """Documents of 4 to 13 random sentences, each document with a subject that recurs."""
  rng = np.random.default_rng(seed)
  documents = []
  for i in range(count):
    topic = f'topic{i % 23}'
    documents.append([
        ' '.join([topic, *rng.choice(WORDS, rng.integers(3, 12))]).capitalize() + '.'
        for _ in range(rng.integers(4, 14))])
  return documents


def write_corpus(path: pathlib.Path, documents: list[list[str]]) -> str:
  path.write_text('\n\n'.join('\n'.join(d) for d in documents) + '\n')
  return str(path)


@pytest.fixture(scope='session')
def corpus_file(tmp_path_factory) -> str:
  """A text file of 60 documents."""
  return write_corpus(tmp_path_factory.mktemp('corpus') / 'corpus.txt', make_documents(60))


# The meaning of model.dtype=auto on this machine.
DTYPE = 'bfloat16' if host.has_fast_bfloat16() else 'float32'


def tiny_config(source: str, **overrides):
  """tests/tiny.py on a corpus, with fields given as {'group.field': value}."""
  c = tiny.get_config()
  c.data.source = source
  c.update_from_flattened_dict(overrides)
  return c


def xla_flags(devices: int) -> str:
  """The flags of the tests, for a process with another number of fake devices."""
  return os.environ['XLA_FLAGS'].replace('device_count=8', f'device_count={devices}')


def sub_mesh(data: int, model: int, replica: int = 1) -> jax.sharding.Mesh:
  """A mesh over the first devices only."""
  shape = (replica, data, model)
  return jax.make_mesh(shape, mesh_lib.AXES, axis_types=(AxisType.Auto,) * 3,
                       devices=jax.devices()[:int(np.prod(shape))])


def check_resume(train: Callable[[], None], workdir: pathlib.Path):
  """Loses the last checkpoint of a run and trains again; the bits of step 12 must be equal."""
  from bert_jax.training import integrity  # scripts import this file, too: Orbax is slow to import

  train()
  last = epath.Path(workdir / 'checkpoints' / '12')
  whole = integrity.description(last)['arrays']
  last.rmtree()
  train()
  assert integrity.description(last)['arrays'] == whole


def pytest_sessionstart():
  """Some tests read files of the repository; scripts that import this file stay where they are."""
  os.chdir(pathlib.Path(__file__).parents[1])


@pytest.fixture(scope='session', autouse=True)
def devices():
  """Makes the fake devices first: JAX keeps the first platform that a test asks for."""
  return jax.devices()


@pytest.fixture(scope='session')
def poems(tmp_path_factory) -> pathlib.Path:
  """The folder of a real tfds data set, `poems`, of 40 documents, made without TensorFlow."""
  import tensorflow_datasets as tfds

  class Poems(tfds.core.GeneratorBasedBuilder):
    """Poems of two lines."""

    VERSION = tfds.core.Version('1.0.0')

    def _info(self):
      return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(
          {'text': tfds.features.Text(), 'id': tfds.features.Scalar(np.int64)}))

    def _split_generators(self, dl_manager):
      return {'train': self._generate_examples()}

    def _generate_examples(self):
      for i in range(40):
        yield i, {'text': f'Poem {i} is red.\nIt is short.', 'id': i}

  folder = tmp_path_factory.mktemp('tfds')
  Poems(data_dir=folder, file_format='array_record').download_and_prepare()
  return folder


@pytest.fixture(scope='module', autouse=True)
def memory_of_a_file_is_freed():
  """Frees the programs and the memory of a test file: a whole run would fill gigabytes."""
  yield
  jax.clear_caches()
  gc.collect()
  if hasattr(ctypes.CDLL(None), 'malloc_trim'):  # a run on a CPU keeps the memory that it freed
    ctypes.CDLL(None).malloc_trim(0)
