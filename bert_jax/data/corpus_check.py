"""Reports the contents and faults of a corpus before a run."""

from collections.abc import Iterator
import re
import tempfile
from typing import NamedTuple

from etils import epath
import numpy as np

from bert_jax.data import corpus, encode, preparation, records
from bert_jax.data.pairs import RowLayout, make_pairs
from bert_jax.data.survey import Distinct, Survey, survey_of, text_hash
from bert_jax.data.tokenizers import training
from bert_jax.runtime import console

_CJK = re.compile('[\u3400-\u9fff\u3040-\u30ff]')  # scripts without spaces
_BUCKETS = 2**np.arange(1, 17)  # the boundaries between the bars of histograms
# The layout of the rows whose labels the report counts.
_LAYOUT = RowLayout.create(128, True, 'next_sentence')


class CorpusStatistics(NamedTuple):
  """The results of a check. Fields from `sample` on are about the tokenized sample."""

  survey: Survey
  lines: int
  repeated_lines: int  # copies of lines, without the first one
  sample: float  # share of the text in the sample, which is tokenized
  sentences: np.ndarray  # [S] tokens in each sentence
  documents: np.ndarray  # [E] sentences in each document
  counts: np.ndarray  # [V] how often each entry occurs
  unknown: float  # share of [UNK] among the tokens
  cjk: float  # share of Chinese and Japanese characters
  labels: np.ndarray  # [2] number of pairs: B follows A, B is from another document
  plateau: float | None  # nats, see `preparation.cross_entropy`; None = nothing held out


def check(settings: corpus.Settings) -> CorpusStatistics:
  """Surveys a corpus; tokenizes about 256 MiB of its text, and the held-out documents."""
  with tempfile.TemporaryDirectory() as scratch:
    folder = epath.Path(scratch)
    source = corpus.open_source(settings, folder)
    lines = Distinct()

    def counting_lines():
      for document in preparation.with_progress(source.read(), 'reading'):
        for line in filter(None, map(str.strip, document.split('\n'))):
          lines.add(text_hash(line.encode()))
        yield document

    survey = survey_of(counting_lines(), settings.heldout)
    # A single document is an error for a run, but only a warning here.
    if not survey.documents:
      preparation.check_documents(settings.source, 0, 0)
    tokenizer = preparation.make_tokenizer(settings, source, survey)
    encoder = encode.Encoder(tokenizer, settings)
    cjk = characters = 0
    heldout_counts = np.zeros(tokenizer.vocab_size, np.int64)

    def encoded_sample():
      nonlocal cjk, characters
      documents = preparation.with_progress(source.read(), 'tokenizing', survey.size)
      sampled = (d for d in documents
                 if survey.in_vocabulary_text(d) or survey.is_held_out(d))
      for batch in encode.batches(sampled):
        cjk += sum(len(_CJK.findall(d)) for d in batch)
        characters += sum(map(len, batch))
        heldout = encoder.documents(filter(survey.is_held_out, batch))
        heldout_counts[:] += np.bincount(heldout.tokens, minlength=tokenizer.vocab_size)
        yield encoder.documents(batch)

    sample = preparation.write_shard(folder, 'sample-00000', tokenizer.vocab_size,
                                     encoded_sample())
    preparation.check_tokens(settings.source, sample['counts'])
    manifest = {'splits': {'sample': [sample['entry']]},
                'vocab_size': tokenizer.vocab_size, 'digest': ''}
    # The memory maps stay valid after the folder is deleted.
    split = records.open_split(folder, manifest, 'sample', verify=False)
  labels = np.zeros(2, int)
  # 64 blocks are enough to estimate the share of each label.
  if split.num_tokens > 1:
    blocks = np.random.default_rng(0).permutation(split.num_blocks)[:64]
    pairs, _, _ = make_pairs(split, blocks, _LAYOUT, (0,))
    labels = np.bincount(pairs.label[pairs.has_b], minlength=2)
  shard, counts = split.shards[0], np.array(sample['counts'])
  return CorpusStatistics(
      survey=survey,
      lines=lines.total,
      repeated_lines=lines.total - lines.different(),
      sample=sample['size'] / max(survey.size, 1),
      sentences=shard.sentences,
      documents=np.diff(shard.documents, append=split.num_sentences),
      counts=counts,
      unknown=counts[tokenizer.unk_id] / max(counts.sum(), 1),
      cjk=cjk / max(characters, 1),
      labels=labels,
      plateau=preparation.cross_entropy(heldout_counts, counts - heldout_counts))


def warnings(stats: CorpusStatistics, settings: corpus.Settings) -> Iterator[str]:
  """Yields the faults of a corpus, each with its reason and remedy."""
  s = stats.survey
  # High thresholds: users ignore warnings that normal text causes.
  if s.different == 1:
    yield ('all text is one document, so no next sentence can come from another '
           'document: put a blank line between documents, or give JSON lines')
  elif np.mean(stats.documents == 1) > 0.5:
    yield (f'{np.mean(stats.documents == 1):.0%} of the documents have only one '
           'sentence: put blank lines between documents, not between sentences')
  if stats.unknown > 0.01:
    yield (f'{stats.unknown:.1%} of the tokens are [UNK]: the vocabulary does not fit '
           'the text; give another --vocab, or train one with --vocab_size')
  if stats.repeated_lines > 0.05 * stats.lines:
    yield (f'{stats.repeated_lines / stats.lines:.0%} of the lines are copies of others '
           '(menus, headings, licenses?): a model memorizes them; remove them')
  if s.copies > 0.01 * s.documents:
    yield (f'{s.copies:,} documents are exact copies of others: remove them, because an '
           'evaluation needs text that the model has not seen')
  if np.mean(stats.sentences > 256) > 0.01:
    yield (f'{np.mean(stats.sentences > 256):.1%} of the sentences have more than 256 '
           f'tokens: is --language={settings.language} right, and does the text have '
           'punctuation at sentence ends?')
  if stats.cjk > 0.3 and settings.language == 'en':
    yield (f'{stats.cjk:.0%} of the characters are Chinese or Japanese: give '
           '--language=zh or ja; otherwise sentences and words are not split correctly')
  share = stats.labels[0] / max(stats.labels.sum(), 1)
  if stats.labels.sum() and not 0.4 < share < 0.6 and s.different > 1:
    yield (f'{share:.0%} of the pairs would be true next sentences, not half: a few '
           'documents have most of the text, so few B can come from another document')


def histogram(values: np.ndarray) -> Iterator[str]:
  """Yields a line with a bar for each power of two in the range of `values`, [N] int."""
  bucket = np.searchsorted(_BUCKETS, values, side='right')
  shares = np.bincount(bucket, minlength=len(_BUCKETS) + 1) / max(len(values), 1)
  used = np.flatnonzero(shares)
  for i in range(used[0], used[-1] + 1) if len(used) else ():
    low = 1 if i == 0 else int(_BUCKETS[i - 1])
    high = f'- {int(_BUCKETS[i]) - 1:,}' if i < len(_BUCKETS) else 'and more'
    yield f'{low:>8,} {high:<8} {shares[i]:6.1%}  {"#" * round(50 * shares[i])}'


def print_report(settings: corpus.Settings):
  """Checks a corpus and prints the results."""
  if not settings.vocab:  # before the text is read
    training.check(settings.tokenizer, settings.vocab_size)
  stats = check(settings)
  s = stats.survey
  about = '' if stats.sample > 0.999 else 'about '
  scale = 1 / stats.sample if stats.sample else 0
  lines = [
      ('text', f'{s.size / 1e6:,.1f} MB in {stats.lines:,} lines'),
      ('documents', f'{s.documents:,}, of them {s.copies:,} exact copies'),
      ('copied lines',
       f'{stats.repeated_lines:,} ({stats.repeated_lines / stats.lines:.1%})'),
      ('sentences', f'{about}{len(stats.sentences) * scale:,.0f}'),
      ('tokens',
       f'{about}{stats.counts.sum() * scale:,.0f}, {stats.unknown:.2%} unknown; '
       f'{np.count_nonzero(stats.counts):,} of {len(stats.counts):,} entries are used'),
      ('pairs',
       f'{stats.labels[0]:,} true next sentences and {stats.labels[1]:,} others in a '
       'sample'),
      ('plateau',
       'nothing is held out' if stats.plateau is None else
       f'{stats.plateau:.3f} nat: the MLM loss of a model that knows only the token '
       'frequencies'),
  ]
  console.print_lines(lines)
  for name, values in (('tokens in a sentence', stats.sentences),
                       ('sentences in a document', stats.documents)):
    print(f'  {name}')
    for line in histogram(values):
      print(f'  {line}')
  console.print_lines(('WARNING', warning) for warning in warnings(stats, settings))
