"""Reads pytorch_model.bin, the zip file that torch.save writes, without torch.

A pickle is a program: it may call any function that it names. This reader knows the few
names that a state dict needs. It refuses a file with any other name before any code of
the file runs.
"""

import collections
import io
import math
import pickle
import pickletools
import re
from typing import Any, NamedTuple
import zipfile

from etils import epath
import jax.numpy as jnp
import numpy as np

from bert_jax.errors import UserError, require

_DTYPES = {f'torch.{name}Storage': np.dtype(kind) for name, kind in (
    ('Double', np.float64), ('Float', np.float32), ('Half', np.float16),
    ('BFloat16', jnp.bfloat16), ('Long', np.int64), ('Int', np.int32),
    ('Short', np.int16), ('Char', np.int8), ('Byte', np.uint8), ('Bool', np.bool_))}
_TENSOR, _PARAMETER = 'torch._utils._rebuild_tensor_v2', 'torch._utils._rebuild_parameter'
_DICT = 'collections.OrderedDict'
_KNOWN = {*_DTYPES, _TENSOR, _PARAMETER, _DICT}
# torch's names for tensors that this reader does not know: complex, quantized, sparse,
# float8.
_OTHER_TENSORS = re.compile(
    r'torch\.(_utils\._rebuild_\w+|storage\.UntypedStorage|serialization\._get_layout'
    r'|\w+Storage|Size|per_\w+_affine|(float|u?int)\d\w*)')


class _Unread(Exception):
  """The file holds tensors that torch can read and this reader cannot."""


class _Tensor(NamedTuple):
  """The arguments of a tensor. A pickle can set attributes of arrays, not of tuples."""

  storage: tuple[str, str]  # (torch's name for the dtype, name of the file)
  offset: int  # in elements of the storage, like the strides
  shape: tuple[int, ...]
  strides: tuple[int, ...]


def _globals(content: bytes) -> set[str]:
  """Returns the dotted names that a pickle imports, without running it."""
  names, memo, strings = set(), {}, ['', '']
  # A name may be an argument of an opcode, or the last two strings on the stack, which
  # may come from the memo. Therefore strings and memo are tracked too.
  for opcode, value, _ in pickletools.genops(content):
    if opcode.name in ('GLOBAL', 'INST'):
      names.add(value.replace(' ', '.'))
    elif opcode.name == 'STACK_GLOBAL':  # since protocol 4
      names.add('.'.join(strings[-2:]))
    elif opcode.name.startswith('EXT'):
      names.add(f'the extension {value}')
    elif opcode.name == 'MEMOIZE':
      memo[len(memo)] = strings[-1]
    elif 'PUT' in opcode.name:
      memo[value] = strings[-1]
    elif 'GET' in opcode.name:
      strings.append(memo.get(value, ''))
    elif isinstance(value, str):
      strings.append(value)
  return names


class _StateDict(pickle.Unpickler):
  """An unpickler that calls nothing but its methods and OrderedDict."""

  def find_class(self, module: str, name: str) -> Any:
    name = f'{module}.{name}'
    # The second line of defense, for a name that `_globals` did not see.
    if name not in _KNOWN:
      raise pickle.UnpicklingError(f'it names {name}, which no state dict needs')
    known = {_DICT: collections.OrderedDict,
             _TENSOR: self._tensor,
             _PARAMETER: self._parameter}
    return known.get(name, name)  # a dtype stays a name

  def persistent_load(self, pid: Any) -> tuple[str, str]:
    kind, dtype, key, *_ = pid
    if kind != 'storage' or dtype not in _DTYPES or not isinstance(key, str):
      raise pickle.UnpicklingError(f'{pid!r:.80} is not a storage')
    return dtype, key

  def _tensor(self, storage, offset, shape, strides, *_) -> _Tensor:
    return _Tensor(storage, offset, tuple(shape), tuple(strides))

  def _parameter(self, tensor, *_) -> _Tensor:
    return tensor


def _array(tensor: _Tensor, storages: dict[str, np.ndarray]) -> np.ndarray:
  """Returns a view of the storage; raises ValueError for a tensor outside the storage."""
  dtype, key = tensor.storage
  flat = storages[key].view(_DTYPES[dtype])
  numbers = (tensor.offset, *tensor.shape, *tensor.strides)
  # as_strided checks nothing: wrong numbers would read arbitrary memory.
  if (any(type(x) is not int or x < 0 for x in numbers)
      or len(tensor.shape) != len(tensor.strides)):
    raise ValueError(f'{numbers} are not sizes and strides')
  last = tensor.offset + sum(
      (n - 1) * step for n, step in zip(tensor.shape, tensor.strides))
  if math.prod(tensor.shape) and last >= flat.size:
    raise ValueError(
        f'a tensor {list(tensor.shape)} ends outside its storage of {flat.size}')
  # Strides of 0 would let a small file fill the memory.
  if math.prod(tensor.shape) > flat.size:
    raise _Unread(f'a tensor {list(tensor.shape)} that repeats the {flat.size} elements '
                  'of its storage')
  return np.lib.stride_tricks.as_strided(
      flat[tensor.offset:], tensor.shape,
      [flat.itemsize * step for step in tensor.strides],
      writeable=False)


def _read(file: zipfile.ZipFile, path: epath.Path) -> dict[str, np.ndarray]:
  (folder,) = (name.removesuffix('data.pkl') for name in file.namelist()
               if name.endswith('/data.pkl') and name.count('/') == 1)
  # Older versions of torch do not write the byte order.
  order = (file.read(f'{folder}byteorder')
           if f'{folder}byteorder' in file.namelist() else b'little')
  require(order == b'little',
          f'{path} was written on a big-endian machine: load it with torch and save it '
          'as safetensors')
  content = file.read(f'{folder}data.pkl')
  # Check the names before any code of the file runs.
  refused = sorted(_globals(content) - _KNOWN)
  if refused and all(map(_OTHER_TENSORS.fullmatch, refused)):
    raise _Unread(', '.join(refused))
  require(not refused,
          f'{path} names {", ".join(refused)}, which no state dict of tensors needs: the '
          'file is refused, and none of its code ran')
  state = _StateDict(io.BytesIO(content)).load()
  require(isinstance(state, dict)
          and all(isinstance(name, str) and isinstance(x, _Tensor)
                  for name, x in state.items()),
          f'{path} is not a state dict: it must hold tensors by name and nothing else')
  storages = {key: np.frombuffer(file.read(f'{folder}data/{key}'), np.uint8)
              for key in {x.storage[1] for x in state.values()}}
  return {name: _array(x, storages) for name, x in state.items()}


def _remedy(path: epath.Path) -> str:
  return (
      f'write {path.parent}/model.safetensors, where torch is installed: python -c '
      '"import torch, safetensors.torch as s; s.save_file({n: x.to_dense().dequantize()'
      f".contiguous().clone() for n, x in torch.load('{path}', weights_only=True)"
      f".items()}}, '{path.parent}/model.safetensors')\"")


def load_file(path: epath.Path) -> dict[str, np.ndarray]:
  """Reads a state dict: arrays by name, in the dtypes of the file.

  Raises:
    UserError: the file has another format, is damaged, names anything but tensors, or
      holds tensors of an unknown kind.
  """
  try:
    with path.open('rb') as file:
      require(file.read(2) == b'PK',
              f'{path} is not a zip file, which torch.save writes since 1.6: '
              f'{_remedy(path)}')
      with zipfile.ZipFile(file) as content:
        return _read(content, path)
  except UserError:
    raise
  except _Unread as e:
    raise UserError(
        f'{path} holds tensors of an unknown kind ({e}): {_remedy(path)}') from e
  # A damaged pickle may raise any exception.
  except Exception as e:
    raise UserError(f'{path} is damaged or not a state dict of torch: {e}') from e
