"""Speed of text to tokens and of tokens to batches, and peak memory.

  python -m benchmarks.data --english='corpus/en/*.txt.gz' --english_vocab=vocab.txt \\
      --chinese='corpus/zh/*.txt.gz' --chinese_vocab=vocab-zh.txt

The peer of `prepare` is `tokenizers`, which only encodes the same text on the same cores.
Both sides alternate, and the medians of the rounds are compared.
"""

import contextlib
import glob
import gzip
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from absl import app, flags
from etils import epath
import numpy as np

from bert_jax.data import corpus, dataset, loader, preparation, records, rows
from bert_jax.data.pairs import RowLayout
from bert_jax.data.tokenizers import reader as tokenizer_reader

_ENGLISH = flags.DEFINE_string('english', None, 'Glob of English text.', required=True)
_ENGLISH_VOCAB = flags.DEFINE_string('english_vocab', None, 'Its vocab.txt.', required=True)
_CHINESE = flags.DEFINE_string('chinese', None, 'Glob of Chinese text.')
_CHINESE_VOCAB = flags.DEFINE_string('chinese_vocab', None, 'Its vocab.txt.')
_ROUNDS = flags.DEFINE_integer('rounds', 3, 'Measurements of each side.')
_MEMORY = flags.DEFINE_float('memory', 0.0, 'Also prepare this many GB of repeated text and '
                             'report the peak memory of all processes.')


def _text(pattern: str) -> str:
  return ''.join((gzip.open if f.endswith('.gz') else open)(f, 'rt', encoding='utf-8').read()
                 for f in sorted(glob.glob(pattern)))


@contextlib.contextmanager
def _timed(seconds: list[float]):
  began = time.perf_counter()
  yield
  seconds.append(time.perf_counter() - began)


def compare(name: str, file: str, vocab: str, folder: str, **settings):
  """Compares prepare with raw encoding of one file; keeps the last records."""
  lines = open(file, encoding='utf-8').read().split('\n')
  size = os.path.getsize(file) / 1e6
  tokenizer = tokenizer_reader.load(vocab).library
  raw, ours = [], []
  for _ in range(_ROUNDS.value):
    with _timed(raw):
      for start in range(0, len(lines), 5_000):
        tokenizer.encode_batch_fast(lines[start:start + 5_000], add_special_tokens=False)
    shutil.rmtree(folder, ignore_errors=True)
    with _timed(ours):
      preparation.prepare(preparation.Settings(file, vocab=vocab, **settings), folder)
  raw, ours = (size / statistics.median(x) for x in (raw, ours))
  print(f'prepare, {name}: {ours:.2f} MB/s, tokenizers.encode_batch_fast {raw:.2f} MB/s: '
        f'{ours / raw:.2f} of it', flush=True)


def measure_loader(folder: str):
  """Measures real tokens per CPU second, from records to batches through Grain."""
  split = dataset.open_records(epath.Path(folder))
  for max_len in (128, 512):
    for pack in (True, False):
      layout = RowLayout.create(max_len, pack, 'next_sentence')
      source = rows.RowSource(split.train, layout, 0, split.tokenizer)
      batches = loader.batches(lambda step: source.batch(step, 256), 0, 10**9)
      next(batches)
      began, cpu, tokens = time.perf_counter(), time.process_time(), 0
      while time.perf_counter() - began < 5:
        tokens += int((next(batches).tokens.text_ids > 0).sum())
      cpu = time.process_time() - cpu
      print(f'loader, {max_len}, {"packed" if pack else "unpacked"}: {tokens / cpu / 1e6:.1f} '
            f'million real tokens a second and core, {source.sample().fill:.1%} of the rows',
            flush=True)


def measure_seek():
  """Measures the time to the first batch at a late step, with 100 million sentences."""
  with tempfile.TemporaryDirectory() as folder:
    path = epath.Path(folder)
    pattern = np.random.default_rng(0).integers(5, 46, 1_000_000).astype(np.uint16)
    with (path / 's.sentences.bin').open('wb') as file:
      for _ in range(100):
        file.write(pattern.tobytes())
    np.arange(0, 10**8, 20).tofile(path / 's.documents.bin')
    first = np.arange(0, 10**8 + 1, 400)
    within = np.concatenate([[0], np.cumsum(pattern, dtype=np.int64)])
    tokens = first // 1_000_000 * within[-1] + within[first % 1_000_000]
    blocks = np.stack([tokens, first, first // 20], 1)
    for name, size in (('tokens', 2 * tokens[-1]), ('words', tokens[-1] // 8 + 1)):
      with (path / f's.{name}.bin').open('wb') as file:
        file.truncate(int(size))  # sparse: it holds no text
    types = (np.uint16, np.uint8, np.uint16, np.int64)
    shard = records.Shard(*(records.map_file(path / f's.{name}.bin', np.dtype(dtype))
                            for name, dtype in zip(records.Shard._fields, types)), blocks)
    tokenizer = tokenizer_reader.load(_ENGLISH_VOCAB.value)
    for max_len in (128, 512):
      began = time.perf_counter()
      source = rows.RowSource(records.Records([shard], ''),
                              RowLayout.create(max_len, True, 'next_sentence'), 0, tokenizer)
      source.batch(123_456_789, 256)
      print(f'seek in 10^8 sentences, rows of {max_len}: {time.perf_counter() - began:.3f} s',
            flush=True)


def _memory_of_tree(pid: int) -> float:
  """Returns the proportional memory of a process and its children, in MB (Linux)."""
  total = 0.0
  children = {pid}
  for stat in glob.glob('/proc/[0-9]*/stat'):
    with contextlib.suppress(OSError):
      fields = open(stat).read().rpartition(')')[2].split()
      if int(fields[1]) == pid:
        children.add(int(stat.split('/')[2]))
  for child in children:
    with contextlib.suppress(OSError):
      for line in open(f'/proc/{child}/smaps_rollup'):
        if line.startswith('Pss:'):
          total += int(line.split()[1]) / 1e3
  return total


def measure_memory(text: str, gigabytes: float):
  """Measures the peak memory of the prepare command on a long, repeated text."""
  with tempfile.TemporaryDirectory() as folder:
    file = os.path.join(folder, 'long.txt')
    with open(file, 'w', encoding='utf-8') as out:
      part = 0
      while out.tell() < gigabytes * 1e9:  # new documents each time, so that no document is a copy
        out.write(text.replace('\n\n', f'\nPart {part}.\n\n'))
        part += 1
    command = [sys.executable, '-m', 'bert_jax.prepare', f'--input={file}',
               f'--vocab={_ENGLISH_VOCAB.value}', f'--output={folder}/records']
    peak, began = 0.0, time.perf_counter()
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    waiter = threading.Thread(target=running.wait)
    waiter.start()
    while waiter.is_alive():
      peak = max(peak, _memory_of_tree(running.pid))
      waiter.join(0.2)
    size = os.path.getsize(file) / 1e6
    assert running.returncode == 0
    print(f'prepare, {size:,.0f} MB: {size / (time.perf_counter() - began):.2f} MB/s, peak '
          f'{peak:,.0f} MB in all processes', flush=True)


def main(_):
  """Runs every measurement."""
  with tempfile.TemporaryDirectory() as folder:
    write = lambda name, text: epath.Path(os.path.join(folder, name)).write_text(text)
    english = _text(_ENGLISH.value)
    write('en.txt', english)
    compare('English', f'{folder}/en.txt', _ENGLISH_VOCAB.value, f'{folder}/records')
    measure_loader(f'{folder}/records')
    split = lambda document: '\n'.join(corpus.Settings('').sentences(document))
    write('lines.txt', '\n\n'.join(map(split, english.split('\n\n'))))
    compare('English, lines are sentences', f'{folder}/lines.txt', _ENGLISH_VOCAB.value,
            f'{folder}/records', lines_are_sentences=True)
    if _CHINESE.value:
      write('zh.txt', _text(_CHINESE.value))
      compare('Chinese with words', f'{folder}/zh.txt', _CHINESE_VOCAB.value, f'{folder}/records',
              language='zh')
  measure_seek()
  if _MEMORY.value:
    measure_memory(english, _MEMORY.value)


if __name__ == '__main__':
  app.run(main)
