"""Mutated files from strangers: every reader reads them or reports the mistake in one line.

A child process reads one input after another, because native readers may abort or hang; then the
parent starts another child at the next input.
`python -m tests.faults.fuzz READER FIRST COUNT FOLDER` is the child.
"""

from collections.abc import Callable
import gzip
import io
import json
import pathlib
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time

from etils import epath
from flax import linen as nn
import jax
import numpy as np
import sentencepiece
import tokenizers

from bert_jax import config as config_lib
from bert_jax.data import corpus
from bert_jax.data.tokenizers import reader, training
from bert_jax.errors import UserError
from bert_jax.inference import json_lines as lines_lib
from bert_jax.interop import huggingface, layout
from bert_jax.interop.pretrained import Pretrained
from bert_jax.labelled import choices, conll, squad, table
from bert_jax.model.modern import ModernConfig
from tests import conftest, made_tasks, published
from tests.faults.runs import Bench, Trial

BATCH = 1000  # inputs of a trial
SECONDS, MIB = 10, 1024  # that one input may take
# Pieces that parsers stumble over.
_PIECES = (
    b'\x00', b'\xff\xfe', b'\xed\xa0\x80', b'"', b'\\', b'{', b'}', b'[' * 5000, b'{"a":' * 5000,
    b'null', b'true', b'-1', b'1e999', b'NaN', b'4294967296', b'9' * 5000, b'\\ud800', b'""', b'[]',
    b'{}', b'\r', b'\n\n', b'\t', b'\x1f\x8b', b'\xef\xbb\xbf', b'../../x', b'/etc/passwd',
    b'a' * 100_000, b' ' * 10_000, b'\n' * 10_000)


def mutate(rng: random.Random, content: bytes) -> bytes:
  """One to four changes."""
  content = bytearray(content)
  for _ in range(rng.randint(1, 4)):
    at, length = rng.randrange(len(content) + 1), rng.choice((1, 4, 30, 300))
    way = rng.randrange(8)
    if way == 0 and content:
      content[min(at, len(content) - 1)] ^= 1 << rng.randrange(8)
    elif way == 1:
      del content[at:at + length]
    elif way == 2:
      content[at:at] = content[at:at + length] * rng.choice((1, 3, 50))
    elif way == 3:
      content[at:at] = rng.randbytes(length)
    elif way == 4:
      content[at:at + rng.choice((0, 1, 5))] = rng.choice(_PIECES)
    elif way == 5 and rng.random() < 0.3:
      del content[at:]
    elif way == 6:
      # Replace a whole word or number.
      words = [i for i in range(len(content)) if chr(content[i]).isalnum()][:10_000]
      if words:
        start = end = rng.choice(words)
        while end < len(content) and chr(content[end]).isalnum():
          end += 1
        content[start:end] = rng.choice(_PIECES[9:22])
    else:
      other = rng.randrange(len(content) + 1)
      content[at:at + length], content[other:other + length] = (
          content[other:other + length], content[at:at + length])
  return bytes(content)


def _drain(examples):
  for _ in examples:
    pass


def _folder(folder: pathlib.Path, whole: str, name: str,
            load: Callable = huggingface.load) -> tuple[bytes, Callable]:
  """The content of a file, and a reader of its folder (of a model, say) with other content."""

  def read(content):
    place = folder / f'changed {whole} {name}'
    if not place.exists():
      shutil.copytree(folder / whole, place)
    (place / name).write_bytes(content)
    load(epath.Path(place))
  return (folder / whole / name).read_bytes(), read


# Files of tokenizers in the shapes of published folders.
_PUBLISHED = (('r-bert', 'special_tokens_map.json'), ('added-tokens', 'added_tokens.json'),
              ('added-decoder', 'tokenizer_config.json'), ('xlm-r', 'tokenizer.json'),
              ('deberta-v3', 'spm.model'))


def readers(folder: pathlib.Path) -> dict[str, tuple[bytes, Callable[[bytes], None]]]:
  """A sound file for each reader, and the reader of a file's content."""
  def by_path(name, read):
    def reader(content):
      path = folder / name
      path.write_bytes(content)
      read(str(path))
    return (folder / f'sound-{name}').read_bytes(), reader

  tags = config_lib.finetuning('token_classification').data
  options = config_lib.finetuning('multiple_choice').data

  def lines(path):
    with open(path, 'rb') as stream:
      _drain(lines_lib.read(stream, path, ('text',)))

  return {
      'corpus': by_path('corpus.txt', lambda p: _drain(corpus.read_file(p, 'text', 'text'))),
      'corpus.gz': by_path('corpus.txt.gz', lambda p: _drain(corpus.read_file(p, 'text', 'text'))),
      'corpus.jsonl': by_path('corpus.jsonl',
                              lambda p: _drain(corpus.read_file(p, 'jsonl', 'text'))),
      'wikitext': by_path('wiki.txt', lambda p: _drain(corpus.read_file(p, 'wikitext', 'text'))),
      'vocab': by_path('vocab.txt', reader.load),
      'sentencepiece': by_path('spiece.model', reader.load),
      'tokenizer.json': _folder(folder, 'model', 'tokenizer.json'),
      'tokenizer_config': _folder(folder, 'model', 'tokenizer_config.json'),
      'config.json': _folder(folder, 'model', 'config.json'),
      'safetensors': _folder(folder, 'model', 'model.safetensors'),
      'modern config.json': _folder(folder, 'modern', 'config.json'),
      'bpe tokenizer.json': _folder(folder, 'bpe', 'tokenizer.json', reader.load),
      'bpe vocab.json': _folder(folder, 'merges', 'vocab.json', reader.load),
      'bpe merges.txt': _folder(folder, 'merges', 'merges.txt', reader.load),
      **{f'{whole} {name}': _folder(folder, whole, name, reader.load)
         for whole, name in _PUBLISHED},
      'squad': by_path('squad.json', squad.read),
      'conll': by_path('tags.conll', lambda p: _drain(conll.read(p, tags))),
      'choices': by_path('choices.jsonl', lambda p: _drain(choices.read(p, options))),
      'csv': by_path('rows.csv', lambda p: _drain(table.read(p, 'auto', 'train'))),
      'tsv.gz': by_path('rows.tsv.gz', lambda p: _drain(table.read(p, 'auto', 'train'))),
      'predict': by_path('predict.jsonl', lines),
  }


NAMES = ('corpus', 'corpus.gz', 'corpus.jsonl', 'wikitext', 'vocab', 'sentencepiece',
         'tokenizer.json', 'tokenizer_config', 'config.json', 'safetensors', 'squad', 'conll',
         'choices', 'csv', 'tsv.gz', 'predict', 'modern config.json', 'bpe tokenizer.json',
         'bpe vocab.json', 'bpe merges.txt', *map(' '.join, _PUBLISHED))


def make_seeds(folder: pathlib.Path):
  """Writes a sound file for each reader."""
  folder.mkdir(parents=True)
  documents = conftest.make_documents(6)
  text = conftest.write_corpus(folder / 'sound-corpus.txt', documents)
  (folder / 'sound-corpus.txt.gz').write_bytes(gzip.compress(pathlib.Path(text).read_bytes()))
  (folder / 'sound-corpus.jsonl').write_text(''.join(
      json.dumps({'text': '\n'.join(d), 'id': i}) + '\n' for i, d in enumerate(documents)))
  (folder / 'sound-predict.jsonl').write_text('{"text": "one", "n": 1}\n{"text": "zwei ü"}\n')
  (folder / 'sound-wiki.txt').write_text(''.join(
      f' = Title {i} = \n\n' + '\n'.join(d) + '\n' for i, d in enumerate(documents)))
  made_tasks.model(folder / 'model', hidden_size=8, num_layers=1, num_heads=1, intermediate_size=8)
  _make_modern(folder)
  for name, _ in _PUBLISHED:
    published.FOLDERS[name].write(folder / name)
  vocab = made_tasks._VOCAB
  (folder / 'sound-vocab.txt').write_text('\n'.join(vocab) + '\n')
  buffer = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(s for d in conftest.make_documents(60) for s in d),
      model_writer=buffer, vocab_size=80, pad_id=0, unk_id=1, bos_id=-1, eos_id=-1,
      hard_vocab_limit=False, control_symbols=['[CLS]', '[SEP]', '[MASK]'], minloglevel=2)
  (folder / 'sound-spiece.model').write_bytes(buffer.getvalue())
  made_tasks.questions(folder / 'sound-squad.json', 6)
  made_tasks.tags(folder / 'sound-tags.conll', 12)
  made_tasks.choices(folder / 'sound-choices.jsonl', 8)
  made_tasks.sequences(folder / 'rows.tsv', 12)
  rows = (folder / 'rows.tsv').read_text()
  (folder / 'sound-rows.tsv.gz').write_bytes(gzip.compress(rows.encode()))
  (folder / 'sound-rows.csv').write_text(rows.replace('\t', ','))


def _make_modern(folder: pathlib.Path):
  """A ModernBERT, and a BPE in both of its forms."""
  texts = [s for d in conftest.make_documents(6) for s in d]
  tokenizer = training.train('bpe', lambda: texts, 300, False)
  tokenizer.save(epath.Path(folder / 'bpe'))
  config = ModernConfig(vocab_size=tokenizer.vocab_size, hidden_size=8, num_layers=4, num_heads=1,
                        intermediate_size=8, max_positions=16)
  abstract = nn.unbox(layout.abstract_params(config, ('pooler', 'mlm')))
  params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), abstract)
  huggingface.save(Pretrained(config, params, tokenizer), epath.Path(folder / 'modern'))
  (folder / 'merges').mkdir()
  tokenizers.Tokenizer.from_file(str(folder / 'bpe/tokenizer.json')).model.save(
      str(folder / 'merges'))


def child(name: str, first: int, count: int, folder: pathlib.Path):
  """Reads inputs; prints the number of each before it, and any error after it."""
  content, read = readers(folder)[name]
  read(content)
  for number in range(first, first + count):
    print(f'#{number}', flush=True)
    changed = mutate(random.Random(f'{name} {number}'), content)
    before, began, wrong = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic(), ''
    try:
      read(changed)
    except UserError as e:
      # `ending.end` joins the lines of a message.
      if len(str(e)) > 2000:
        wrong = f'a message of {len(str(e))} characters'
    except BaseException as e:  # anything else is a finding
      wrong = f'{type(e).__name__}: {str(e)[:200]}'
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    if not wrong and (grown > MIB or time.monotonic() - began > SECONDS):
      wrong = f'took {time.monotonic() - began:.0f} s and {grown} MiB'
    if wrong:
      print(f'!{wrong}', flush=True)


def _read_in_children(name: str, first: int, end: int, place: pathlib.Path) -> list[str]:
  """The failures of a reader on inputs `first` to `end - 1`."""
  findings = []
  while first < end:
    last = first  # a child that dies at once names no input
    running = subprocess.Popen(
        [sys.executable, '-m', 'tests.faults.fuzz', name, str(first), str(end - first), str(place)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors='replace')
    hung = False
    try:
      out, err = running.communicate(timeout=60 + SECONDS + 0.1 * BATCH)
    except subprocess.TimeoutExpired:
      running.kill()
      hung, (out, err) = True, running.communicate()
    for line in out.splitlines():
      last = int(line[1:]) if line.startswith('#') else last
      if line.startswith('!'):
        findings.append(f'{name} {last}: {line[1:]}')
    if running.returncode:
      how = 'hung' if hung else f'ended the process with {running.returncode}: {err[-200:]}'
      findings.append(f'{name} {last}: {how}')
    first = last + 1 if running.returncode else end
  return findings


def fuzz(bench: Bench, number: int) -> Trial:
  """A batch of inputs of one reader."""
  seeds, name = bench.folder / 'sound files', NAMES[number % len(NAMES)]
  if not seeds.exists():
    make_seeds(seeds)
  batch = number // len(NAMES)
  with tempfile.TemporaryDirectory() as temporary:
    place = pathlib.Path(temporary) / 'files'
    shutil.copytree(seeds, place)
    findings = _read_in_children(name, batch * BATCH, (batch + 1) * BATCH, place)
  return Trial(name if not findings else f'{name}: {len(findings)} findings', not findings,
               '; '.join(findings)[:600])


if __name__ == '__main__':
  child(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4]))
