"""JSON files that know whether they are whole: the checksum of the content is in the content."""

from collections.abc import Mapping
import hashlib
import json
from typing import Any

from etils import epath

from bert_jax.errors import UserError
from bert_jax.runtime import storage

_FIELD = 'checksum'


def _digest(content: bytes) -> str:
  return hashlib.blake2b(content, digest_size=16).hexdigest()


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
  """`content`, which JSON can hold, with its checksum."""
  return {**content, _FIELD: _digest(json.dumps(content, sort_keys=True).encode())}


def read(path: epath.Path) -> dict[str, Any]:
  """The content of a sealed file.

  Raises:
    UserError: it cannot be read, or is not as it was written.
  """
  content = storage.read_json(path)
  found = content.pop(_FIELD, None)
  if found != seal(content)[_FIELD]:
    raise UserError(f'{path} is damaged: its content has not the checksum that it was written with')
  return content


def digests(folder: epath.Path) -> dict[str, str]:
  """The digest of each file of a folder, by its name."""
  return {path.name: _digest(path.read_bytes()) for path in sorted(folder.iterdir())}


def check(folder: epath.Path, known: Mapping[str, str]):
  """Raises UserError if a file of a folder is not that of `digests`."""
  for name, digest in known.items():
    path = folder / name
    if not path.exists():
      raise UserError(f'{path} is missing')
    if _digest(path.read_bytes()) != digest:
      raise UserError(f'{path} is damaged: it is not what was written')
