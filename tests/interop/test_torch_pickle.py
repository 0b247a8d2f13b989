"""pytorch_model.bin without torch: the bits that torch.save writes, and no code is run."""

import collections
import io
import json
import os
import pathlib
import pickle
import re
import zipfile

from etils import epath
import numpy as np
import pytest
from safetensors.numpy import load_file
import torch

from bert_jax.errors import UserError
from bert_jax.interop import huggingface, torch_pickle
from bert_jax.interop import load as load_lib
from tests.interop import torch_bert
from tests.interop.test_huggingface import assert_same


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
  return torch_pickle.load_file(epath.Path(path))


def bits(x: torch.Tensor) -> bytes:
  x = x.detach().contiguous()
  return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy().tobytes()


def test_every_kind_of_tensor_to_the_bit(tmp_path):
  torch.manual_seed(0)
  whole = torch.randn(5, 7)
  tied = torch.nn.Parameter(torch.randn(4, 3))
  state = {'contiguous': whole, 'transposed': whole.T, 'part': whole[1:4, 2:5],
           'steps': torch.arange(24).reshape(4, 6)[::2, 1::3], 'half': torch.randn(9).half(),
           'bf16': torch.randn(3, 2, 4).bfloat16().permute(2, 0, 1),
           'expanded': whole[0].expand(3, 7), 'scalar': torch.tensor(2.5),
           'empty': torch.zeros(0, 3), 'a': tied, 'b': tied, 'long': torch.tensor([2**40, -1]),
           'double': torch.randn(3, dtype=torch.float64).expand(1, 3), 'bool': whole.T > 0,
           **{str(kind): torch.arange(-3, 3).to(kind)[::2]
              for kind in (torch.int32, torch.int16, torch.int8, torch.uint8)}}
  torch.save(state, tmp_path / 'x.bin')
  arrays = read(tmp_path / 'x.bin')
  assert list(arrays) == list(state)
  for name, x in state.items():
    assert arrays[name].shape == tuple(x.shape) and arrays[name].tobytes() == bits(x), name
    assert str(arrays[name].dtype) == str(x.dtype).removeprefix('torch.')
  assert np.shares_memory(arrays['part'], arrays['transposed'])
  assert np.shares_memory(arrays['a'], arrays['b'])
  assert not arrays['a'].flags.writeable


def test_state_dict_of_a_module(tmp_path):
  module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
  torch.save(module.state_dict(), tmp_path / 'x.bin')  # an OrderedDict with _metadata
  arrays = read(tmp_path / 'x.bin')
  assert list(arrays) == ['0.weight', '0.bias', '1.weight', '1.bias']
  assert all(arrays[name].tobytes() == bits(x) for name, x in module.state_dict().items())


class Code:
  """Touches a file when it is unpickled by a reader that runs code."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return os.system, (f'touch {self.path}',)


@pytest.mark.parametrize('protocol', [2, 4])
def test_code_is_refused_by_name_and_does_not_run(tmp_path, protocol):
  touched = tmp_path / 'touched'
  state = {'x': torch.zeros(2), 'code': Code(touched), 'other': collections.Counter('a')}
  torch.save(state, tmp_path / 'x.bin', pickle_protocol=protocol)
  with pytest.raises(UserError, match=r'names collections\.Counter, posix\.system, which') as error:
    read(tmp_path / 'x.bin')
  assert '\n' not in str(error.value) and not touched.exists()


def rewrite(path: pathlib.Path, **files: bytes):
  """The same zip file with the content of some files changed."""
  with zipfile.ZipFile(path) as old:
    content = {name: old.read(name) for name in old.namelist()}
  folder = next(iter(content)).split('/')[0]
  content |= {f'{folder}/{name.replace("_pkl", ".pkl")}': x for name, x in files.items()}
  with zipfile.ZipFile(path, 'w') as new:
    for name, x in content.items():
      new.writestr(name, x)


def test_a_hidden_name_is_refused_and_does_not_run(tmp_path):
  path, touched = tmp_path / 'x.bin', tmp_path / 'touched'
  torch.save({'x': torch.zeros(2)}, path)

  def push(text):
    return b'X' + len(text).to_bytes(4, 'little') + text.encode()

  # The last two strings are a known name, but POP takes them away before STACK_GLOBAL.
  program = b''.join([b'\x80\x04', *map(push, ('posix', 'system', 'collections', 'OrderedDict')),
                      b'00\x93', push(f'touch {touched}'), b'\x85R.'])
  rewrite(path, data_pkl=program)
  with pytest.raises(UserError, match='it names posix.system, which no state dict needs'):
    read(path)
  assert not touched.exists()


class Storage:
  """What a persistent id in a file of torch.save stands for."""

  def __init__(self, *pid):
    self.pid = pid


def pickled(tensor_arguments: tuple) -> bytes:
  """A data.pkl with one tensor of arguments that torch would not write."""
  class Tensor:
    def __reduce__(self):
      return torch._utils._rebuild_tensor_v2, tensor_arguments

  class Pickler(pickle.Pickler):
    def persistent_id(self, x):
      return x.pid if isinstance(x, Storage) else None

  file = io.BytesIO()
  Pickler(file, 2).dump({'x': Tensor()})
  return file.getvalue()


@pytest.mark.parametrize('shape, strides, offset, message', [
    ((2, 3), (3, 1), 1, r'a tensor \[2, 3\] ends outside its storage of 6'),
    ((2,), (-1,), 3, 'are not sizes and strides'),
    ((2**62, 2**62), (1, 1), 0, 'ends outside'),
    ((2, 3), (3,), 0, 'are not sizes and strides')])
def test_a_tensor_outside_its_storage_is_refused(tmp_path, shape, strides, offset, message):
  path = tmp_path / 'x.bin'
  torch.save({'x': torch.zeros(2, 3)}, path)
  storage = Storage('storage', torch.FloatStorage, '0', 'cpu', 6)
  rewrite(path, data_pkl=pickled((storage, offset, shape, strides, False, {})))
  with pytest.raises(UserError, match=message):
    read(path)


def cut(path: pathlib.Path):
  path.write_bytes(path.read_bytes()[:-200])


def flip(path: pathlib.Path):
  content = bytearray(path.read_bytes())
  content[content.index(np.float32(1.5).tobytes() * 4)] ^= 1
  path.write_bytes(content)


def legacy(path: pathlib.Path):
  torch.save({'x': torch.zeros(2)}, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize('breaks, message', [
    (cut, 'damaged or not a state dict of torch: File is not a zip file'),
    (flip, 'damaged or not a state dict of torch: Bad CRC-32'),
    (legacy, r'is not a zip file, which torch.save writes since 1.6.*model.safetensors'),
    (lambda path: rewrite(path, byteorder=b'big'), 'written on a big-endian machine'),
    (lambda path: rewrite(path, data_pkl=b'\x80\x02}q\x00'), 'damaged or not a state dict'),
    (lambda path: torch.save([torch.zeros(2)], path), 'it must hold tensors by name'),
    (lambda path: torch.save({'x': {'y': torch.zeros(2)}}, path), 'it must hold tensors by name'),
    (lambda path: path.unlink(), 'No such file')])
def test_other_files(tmp_path, breaks, message):
  path = tmp_path / 'x.bin'
  torch.save({'x': torch.full((8,), 1.5)}, path)
  breaks(path)
  with pytest.raises(UserError, match=message) as error:
    read(path)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('tensor, names', [
    (torch.ones(2).to(torch.float8_e4m3fn), 'torch.float8_e4m3fn'),
    (torch.ones(2).to(torch.uint16), 'torch.uint16'),
    (torch.eye(2).to_sparse(), 'rebuild_sparse_tensor'),
    (torch.ones(2).expand(3, 2), r'a tensor \[3, 2\] that repeats the 2 elements of its storage'),
    (torch.ones(1).expand(2**20, 2**20), 'that repeats the 1 elements'),
    (torch.arange(4.).as_strided((3, 3), (1, 0)), 'that repeats the 4 elements')])
def test_unsupported_tensors_are_refused_with_a_command_that_converts_them(tmp_path, tensor, names):
  path = tmp_path / 'pytorch_model.bin'
  torch.save({'x': tensor, 'y': torch.arange(4.).reshape(2, 2).T}, path)
  with pytest.raises(UserError, match=f'holds tensors of an unknown kind.*{names}') as error:
    read(path)
  if tensor.numel() > 2**20:
    return
  command = re.search('python -c "(.*)"$', str(error.value))[1]
  exec(command, {})
  written = load_file(str(tmp_path / 'model.safetensors'))
  np.testing.assert_array_equal(written['x'], tensor.to_dense().float().numpy())
  np.testing.assert_array_equal(written['y'], [[0, 2], [1, 3]])


def test_a_state_dict_of_doubles_and_integers_gives_the_same_model(tmp_path):
  theirs = torch_bert.make('BertForPreTraining', tmp_path)
  expected = huggingface.load(epath.Path(tmp_path))
  (tmp_path / 'model.safetensors').unlink()
  state = {name: x.double() for name, x in theirs.state_dict().items()}
  state['bert.embeddings.position_ids'] = torch.arange(512, dtype=torch.int32).expand(1, -1)
  torch.save(state, tmp_path / 'pytorch_model.bin')
  assert_same(huggingface.load(epath.Path(tmp_path)), expected)


def test_a_folder_with_only_pickles_is_read_whole_or_in_shards(tmp_path):
  theirs = torch_bert.make('BertForPreTraining', tmp_path)
  expected = huggingface.load(epath.Path(tmp_path))
  (tmp_path / 'model.safetensors').unlink()
  state = theirs.state_dict()
  torch.save(state, tmp_path / 'pytorch_model.bin')
  assert_same(huggingface.load(epath.Path(tmp_path)), expected)
  (tmp_path / 'pytorch_model.bin').unlink()
  index, names = {}, sorted(state)
  for i, part in enumerate((names[:20], names[20:])):
    file = f'pytorch_model-{i:05d}-of-00002.bin'
    torch.save({name: state[name] for name in part}, tmp_path / file)
    index |= dict.fromkeys(part, file)
  (tmp_path / 'pytorch_model.bin.index.json').write_text(json.dumps({'weight_map': index}))
  assert_same(huggingface.load(epath.Path(tmp_path)), expected)


def test_the_hub_is_asked_for_a_pickle_only_without_safetensors(tmp_path, monkeypatch):
  import huggingface_hub
  theirs, asked = torch_bert.make('BertModel', tmp_path), []

  def download(name, allow_patterns):
    asked.append('pytorch_model*.bin' in allow_patterns)
    return str(tmp_path)

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', download)
  expected = load_lib.load('org/model')
  assert asked == [False]
  (tmp_path / 'model.safetensors').unlink()
  torch.save(theirs.state_dict(), tmp_path / 'pytorch_model.bin')
  assert_same(load_lib.load('org/model'), expected)
  assert asked == [False, False, True]
