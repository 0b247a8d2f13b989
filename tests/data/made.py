"""Records whose tokens say where they come from, for the tests of rows."""

import pathlib
import tempfile
import types

from etils import epath
import numpy as np

from bert_jax.data import records

TOKENIZER = types.SimpleNamespace(cls_id=1, sep_id=2, pad_id=0)
FIRST = 5  # token i of a corpus is FIRST + i, so that all tokens differ


def make_records(documents, block=records.BLOCK, shards=1, words=None) -> records.Records:
  """Records of documents with sentences of these lengths."""
  with tempfile.TemporaryDirectory() as folder:
    entries, token = [], FIRST
    for k, part in enumerate(np.array_split(np.arange(len(documents)), shards)):
      writer = records.ShardWriter(epath.Path(folder), f'all-{k:05}', 1 << 20, block)
      lengths = np.array([n for d in part for n in documents[d]], np.int64)
      tokens = np.arange(token, token + lengths.sum())
      token += len(tokens)
      starts = np.ones(len(tokens), bool) if words is None else words(tokens)
      if len(lengths):
        writer.add(tokens, starts, lengths, np.array([len(documents[d]) for d in part]))
      entries.append(writer.close())
    manifest = {'splits': {'all': entries}, 'vocab_size': 1 << 20, 'digest': ''}
    split = records.open_split(epath.Path(folder), manifest, 'all')
    # Maps of deleted files stay valid on some systems only: copy the small arrays.
    split.shards = tuple(records.Shard(*map(np.array, s)) for s in split.shards)
    return split


def varied(documents=300, seed=0, **kwargs) -> records.Records:
  """Records of documents of 4 to 29 sentences of 3 to 24 tokens."""
  rng = np.random.default_rng(seed)
  return make_records([list(rng.integers(3, 25, rng.integers(4, 30))) for _ in range(documents)],
                      **kwargs)


def arrays(rows) -> dict[str, np.ndarray]:
  """The arrays of a batch of rows by name, without the fields that are None."""
  fields = {**rows.tokens._asdict(), **rows._asdict()}
  return {name: x for name, x in fields.items() if x is not None and name != 'tokens'}


def path(folder) -> epath.Path:
  return epath.Path(pathlib.Path(folder))
