import json
import subprocess
import sys

import numpy as np
import pytest

from bert_jax.data import records
from bert_jax.errors import UserError
from tests.data import made


def _write(folder, vocab_size=70_000, block=records.BLOCK):
  writer = records.ShardWriter(made.path(folder), 'train-00000', vocab_size, block)
  words = np.array([1, 0, 1, 1, 0, 1, 1, 0, 0, 1, 1], bool)
  writer.add(np.array([1, 2, 69_999]), words[:3], np.array([2, 1]), np.array([2]))
  writer.add(np.arange(10, 18), words[3:], np.array([3, 1, 4]), np.array([1, 2]))
  entry = writer.close()
  manifest = {'tokenizer': 'x', 'vocab_size': vocab_size, 'splits': {'train': [entry]},
              'settings': {}, 'documents': 3, 'bytes': 0, 'unigram_entropy': None, 'notes': []}
  records.write_manifest(made.path(folder), manifest)
  return records.read_manifest(made.path(folder))


def test_round_trip(tmp_path):
  manifest = _write(tmp_path)
  split = records.open_split(made.path(tmp_path), manifest, 'train')
  assert (split.num_tokens, split.num_sentences, split.num_documents) == (11, 5, 3)
  assert split.tokens(np.arange(11)).tolist() == [1, 2, 69_999, *range(10, 18)]
  assert split.word_starts(np.arange(11)).tolist() == [1, 0, 1, 1, 0, 1, 1, 0, 0, 1, 1]
  lengths, starts, document = split.block(0)
  assert lengths.tolist() == [2, 1, 3, 1, 4] and starts.tolist() == [0, 2, 3] and document == 0
  assert (tmp_path / 'train-00000.tokens.bin').stat().st_size == 44  # four bytes a token
  small = records.open_split(made.path(tmp_path), _write(tmp_path, 60_000), 'train', verify=False)
  assert (tmp_path / 'train-00000.tokens.bin').stat().st_size == 22 and small.num_tokens == 11


@pytest.mark.parametrize('shards', [1, 2, 3])
def test_block_and_document_numbers_continue_across_shards(shards):
  documents = [[5, 5], [30, 30, 30, 30], [7], [9, 9, 9], [4]]
  split = made.make_records(documents, block=16, shards=shards)
  assert split.tokens(np.arange(split.num_tokens)).tolist() == list(
      range(made.FIRST, made.FIRST + 168))
  lengths, of_document = [], []
  for i in range(split.num_blocks):
    block, starts, document = split.block(i)
    assert split.blocks[i + 1, 0] - split.blocks[i, 0] == block.sum()
    inside = document + np.searchsorted(starts, np.arange(len(block)), side='right')
    of_document += (inside - (len(starts) > 0 and starts[0] == 0)).tolist()
    lengths += block.tolist()
  assert lengths == [n for d in documents for n in d]
  assert of_document == [i for i, d in enumerate(documents) for _ in d]
  assert split.blocks[-1].tolist() == [168, 11, 5]
  # Long documents are cut between sentences, others are whole.
  assert max(split.block(i)[0].sum() for i in range(split.num_blocks)) <= 40


def test_sentences_too_long_to_store_are_split():
  longest = records.LONGEST_SENTENCE
  lengths, pieces = records.cut(np.array([3, 2 * longest + 5, 7]), longest)
  assert lengths.tolist() == [3, longest, longest, 5, 7] and pieces.tolist() == [1, 3, 1]


def test_damaged_records_are_refused(tmp_path):
  manifest = _write(tmp_path)
  path = tmp_path / 'train-00000.tokens.bin'
  whole = path.read_bytes()
  path.write_bytes(whole[:-1])
  with pytest.raises(UserError, match='tokens.bin has 43 bytes, 44 were written'):
    records.open_split(made.path(tmp_path), manifest, 'train')
  path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
  with pytest.raises(UserError, match='tokens.bin was changed after it was prepared'):
    records.open_split(made.path(tmp_path), manifest, 'train')
  path.unlink()
  with pytest.raises(UserError, match='tokens.bin cannot be read'):
    records.open_split(made.path(tmp_path), manifest, 'train')
  (tmp_path / 'manifest.json').write_text(json.dumps({**manifest, 'version': 99}))
  with pytest.raises(UserError, match='version 99'):
    records.read_manifest(made.path(tmp_path))
  (tmp_path / 'manifest.json').write_text('{')
  with pytest.raises(UserError, match='no complete token records'):
    records.read_manifest(made.path(tmp_path))


def test_the_digest_is_reproducible_and_covers_the_tokenizer(tmp_path):
  manifest = _write(tmp_path)
  assert manifest['digest'] == records.digest(manifest) == _write(tmp_path)['digest']
  assert manifest['digest'] != records.digest({**manifest, 'tokenizer': 'y'})


# Sparse files stand in for 2.5 billion tokens; only the index is real. A process of its own shows
# its peak memory (VmHWM, because ru_maxrss starts at the parent's value).
_SEEK = '''
import sys, time
import numpy as np
from bert_jax.data import pairs, records, rows
from tests.data import made
folder = made.path(sys.argv[1])
types = (np.uint16, np.uint8, np.uint16, np.int64, np.int64)
arrays = [records.map_file(folder / f's.{name}.bin', np.dtype(dtype))
          for name, dtype in zip(records.Shard._fields, types)]
shard = records.Shard(*arrays[:4], np.array(arrays[4]).reshape(-1, 3))
for max_len in (128, 512):
  began = time.process_time()
  corpus = records.Records([shard], '')
  source = rows.RowSource(corpus, pairs.RowLayout(max_len, 8), 0, made.TOKENIZER)
  batch = source.batch(123_456_789, 256)
  print(time.process_time() - began, (batch.tokens.text_ids > 0).mean())
status = open('/proc/self/status').read()
print(int(status.split('VmHWM:')[1].split()[0]) / 1e3)
'''


def test_seeking_in_an_index_of_100_million_sentences(tmp_path):
  rng = np.random.default_rng(0)
  pattern = rng.integers(5, 46, 1_000_000).astype(np.uint16)
  with (tmp_path / 's.sentences.bin').open('wb') as file:
    for _ in range(100):
      file.write(pattern.tobytes())
  np.arange(0, 100_000_000, 20).astype(np.int64).tofile(tmp_path / 's.documents.bin')
  first = np.arange(0, 100_000_001, 400)
  within = np.concatenate([[0], np.cumsum(pattern, dtype=np.int64)])
  tokens = first // 1_000_000 * within[-1] + within[first % 1_000_000]
  np.stack([tokens, first, first // 20], 1).astype(np.int64).tofile(tmp_path / 's.blocks.bin')
  for name, size in (('tokens', 2 * tokens[-1]), ('words', tokens[-1] // 8 + 1)):
    with (tmp_path / f's.{name}.bin').open('wb') as file:
      file.truncate(int(size))
  done = subprocess.run([sys.executable, '-c', _SEEK, str(tmp_path)], capture_output=True,
                        text=True, check=True)
  *seeks, memory = done.stdout.splitlines()
  assert len(seeks) == 2
  for seek in seeks:
    seconds, fill = map(float, seek.split())
    assert seconds < 1 and fill > 0.95
  assert float(memory) < 500  # MB
