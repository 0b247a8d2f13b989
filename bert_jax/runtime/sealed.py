"""JSON files that contain the checksum of their content."""

from collections.abc import Mapping
import hashlib
import json
from typing import Any

from etils import epath

from bert_jax.errors import require
from bert_jax.runtime import storage

_FIELD = 'checksum'


def _digest(content: bytes) -> str:
  return hashlib.blake2b(content, digest_size=16).hexdigest()


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
  """Adds the checksum to `content`."""
  return {**content, _FIELD: _digest(json.dumps(content, sort_keys=True).encode())}


def read(path: epath.Path) -> dict[str, Any]:
  """The content of a sealed file; raises UserError if it is not as it was written."""
  content = storage.read_json(path)
  checksum = content.pop(_FIELD, None)
  require(checksum == seal(content)[_FIELD],
          f'{path} is damaged: its content has not the checksum that it was written with')
  return content


def digests(folder: epath.Path) -> dict[str, str]:
  """The digest of each file in a folder and those in it, by its path from there."""
  return {str(path.relative_to(folder)): _digest(path.read_bytes())
          for path in sorted([*folder.glob('*'), *folder.glob('*/*')]) if not path.is_dir()}


def check(folder: epath.Path, expected: Mapping[str, str]):
  """Raises UserError if a file of a folder has not its expected digest."""
  for name, digest in expected.items():
    path = folder / name
    require(path.exists(), f'{path} is missing')
    require(_digest(path.read_bytes()) == digest,
            f'{path} is damaged: it is not what was written')
