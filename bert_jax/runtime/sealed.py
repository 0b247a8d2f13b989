"""JSON files that carry a checksum of their content."""

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
  """Reads a sealed file; raises UserError if its checksum does not match."""
  # `json.loads` keeps the surrogates of a path that is not UTF-8: they count in the sum.
  content = storage.read_json(path, json.loads)
  checksum = content.pop(_FIELD, None)
  require(checksum == seal(content)[_FIELD],
          f'{path} is damaged: its content does not match its checksum')
  return content


def digests(folder: epath.Path) -> dict[str, str]:
  """Digests of the files in a folder and its direct subfolders, by relative path."""
  return {
      str(path.relative_to(folder)): _digest(path.read_bytes())
      for entry in storage.matching(folder, '*')
      for path in ([*entry.iterdir()] if entry.is_dir() else [entry])
      if not path.is_dir()
  }


def check(folder: epath.Path, expected: Mapping[str, str]):
  """Raises UserError if a file of a folder is missing or has another digest."""
  for name, digest in expected.items():
    path = folder / name
    require(path.exists(), f'{path} is missing')
    require(_digest(path.read_bytes()) == digest,
            f'{path} is damaged: its content does not match its checksum')
