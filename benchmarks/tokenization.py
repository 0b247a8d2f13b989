"""Compares our token ids with an independent WordPiece, line by line over whole corpora.

  python -m benchmarks.tokenization --reference=ENV/bin/python --vocab=vocab.txt[,...] \
      --text='corpus/*.txt.gz' --lines=50000

ENV is an environment with transformers 4.57, whose slow `BertTokenizer` is the pure
Python code of google-research/bert. Ours is the Rust library `tokenizers`. Vocabularies
with capitals are cased.
"""

import glob
import gzip
import itertools
import json
import subprocess

from absl import app, flags

from bert_jax.data.tokenizers import reader as tokenizer_reader

_REFERENCE = flags.DEFINE_string('reference', None, 'Python with transformers 4.57.', required=True)
_VOCAB = flags.DEFINE_list('vocab', None, 'Vocabulary files.', required=True)
_TEXT = flags.DEFINE_list('text', None, 'Globs of text files, gzipped or not.', required=True)
_LINES = flags.DEFINE_integer('lines', 50_000, 'Non-empty lines of each glob.')

_SLOW = """
import json, sys
from transformers.models.bert.tokenization_bert import BertTokenizer
slow = BertTokenizer(sys.argv[1], do_lower_case=sys.argv[2] == 'True')
for line in sys.stdin:
  tokens = slow.basic_tokenizer.tokenize(json.loads(line))
  pieces = [p for t in tokens for p in slow.wordpiece_tokenizer.tokenize(t)]
  print(json.dumps(slow.convert_tokens_to_ids(pieces)))
"""


def _lines(pattern: str) -> list[str]:
  def every():
    for path in sorted(glob.glob(pattern)):
      with (gzip.open if path.endswith('.gz') else open)(path, 'rt', encoding='utf-8') as file:
        yield from (line.rstrip('\n') for line in file if line.strip())

  return list(itertools.islice(every(), _LINES.value))


def main(_):
  """Prints one line for each vocabulary, and every difference."""
  texts = [line for pattern in _TEXT.value for line in _lines(pattern)]
  for vocab in _VOCAB.value:
    ours = tokenizer_reader.load(vocab)
    done = subprocess.run(
        [_REFERENCE.value, '-c', _SLOW, vocab, str(ours.lowercase)], text=True, check=True,
        input=''.join(json.dumps(text) + '\n' for text in texts), stdout=subprocess.PIPE)
    theirs = map(json.loads, done.stdout.splitlines())
    different = [(text, a, b) for text, a, b in zip(texts, ours.encode_batch(texts), theirs)
                 if a != b]
    print(f'{vocab}: {len(texts):,} lines, {len(different)} different', flush=True)
    for text, a, b in different[:20]:
      at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
      a, b = (ours.tokens(ids[at:at + 6]) for ids in (a, b))
      print(f'  {text[:60]!r}: ours {a}, theirs {b}')


if __name__ == '__main__':
  app.run(main)
