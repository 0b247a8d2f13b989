"""A model as small files: bfloat16 parameters in parts of at most 15 MB.

  python -m benchmarks.parts runs/record/parts runs/record/model

This command joins the parts from `benchmarks.record`. The result is a checkpoint of
bert_jax, with the parameters of the model rounded to bfloat16.
"""

import collections
import dataclasses
import hashlib
import json
import pathlib
import sys

from absl import app
from etils import epath
from flax import traverse_util
import jax.numpy as jnp
import numpy as np
from safetensors import numpy as safetensors

from bert_jax.data.tokenizers import reader
from bert_jax.interop import native
from bert_jax.interop.pretrained import Pretrained
from bert_jax.model import architectures

_BYTES = 15_000_000  # of a part


def _arrays(model: Pretrained) -> dict[str, np.ndarray]:
  flat = traverse_util.flatten_dict(model.params, sep='/')
  return {name: np.asarray(flat[name]) for name in sorted(flat)}


def digest(model: Pretrained) -> str:
  """SHA-256 over the names, shapes and float32 values of all parameters."""
  whole = hashlib.sha256()
  for name, array in _arrays(model).items():
    whole.update(f'{name} {array.shape}'.encode())
    whole.update(np.ascontiguousarray(array, '<f4').tobytes())
  return whole.hexdigest()


def write(model: Pretrained, folder: pathlib.Path):
  """Writes the parameters, the tokenizer and the sizes of the model."""
  folder.mkdir(parents=True, exist_ok=True)
  parts: list[dict[str, np.ndarray]] = [{}]
  for name, array in _arrays(model).items():
    # As whole numbers: the NumPy side of safetensors has no bfloat16.
    short = np.asarray(jnp.asarray(array, jnp.bfloat16)).view(np.uint16)
    # The matrices of all layers are one array, which may need several parts.
    rows = max(1, _BYTES * len(short) // short.nbytes)
    for start in range(0, len(short), rows):
      piece = short[start:start + rows]
      if sum(x.nbytes for x in parts[-1].values()) + piece.nbytes > _BYTES:
        parts.append({})
      parts[-1][f'{name}:{start:06}'] = piece
  for number, part in enumerate(parts):
    safetensors.save_file(part, folder / f'{number:03}.safetensors')
  model.tokenizer.save(epath.Path(folder / 'tokenizer'))
  (folder / 'model.json').write_text(json.dumps(dataclasses.asdict(model.config)))


def read(folder: pathlib.Path) -> Pretrained:
  """Reads what `write` wrote."""
  pieces = collections.defaultdict(list)
  for file in sorted(folder.glob('*.safetensors')):
    for name, short in sorted(safetensors.load_file(file).items()):
      pieces[name.rpartition(':')[0]].append(short)
  params = {name: np.asarray(np.concatenate(x).view(jnp.bfloat16), np.float32)
            for name, x in pieces.items()}
  config = architectures.make_config(json.loads((folder / 'model.json').read_text()))
  return Pretrained(config, traverse_util.unflatten_dict(params, sep='/'),
                    reader.load(epath.Path(folder / 'tokenizer')))


def main(arguments):
  """Joins parts."""
  if len(arguments) != 3:
    raise app.UsageError('give the folder of the parts and the folder to write')
  native.save(read(pathlib.Path(arguments[1])), epath.Path(arguments[2]))


if __name__ == '__main__':
  app.run(main, argv=sys.argv)
