"""A report on a corpus before anyone pays for a run: its contents and its faults."""

from collections.abc import Iterator
import re
import tempfile
from typing import NamedTuple

from etils import epath
import numpy as np

from bert_jax.data import corpus, encode, preparation, records
from bert_jax.data import pairs as pairs_lib
from bert_jax.data import survey as survey_lib
from bert_jax.runtime import console

_CJK = re.compile('[\u3400-\u9fff\u3040-\u30ff]')  # characters written without spaces
_BUCKETS = 2**np.arange(1, 17)  # of histograms
# Of the rows whose labels are counted.
_LAYOUT = pairs_lib.Layout.create(128, True, 'next_sentence')


class CorpusStatistics(NamedTuple):
  """Results of a check. Numbers about tokens are those of the sample."""

  survey: survey_lib.Survey
  lines: int
  repeated_lines: int  # copies of lines, without the first of each
  sample: float  # share of the text that was tokenised
  sentences: np.ndarray  # [S] tokens in each sentence
  documents: np.ndarray  # [E] sentences in each document
  counts: np.ndarray  # [V] how often each entry occurs
  unk_id: int
  cjk: float  # share of Chinese and Japanese characters
  labels: np.ndarray  # [2] pairs whose B follows A, and whose B is from another document
  plateau: float | None  # nat

  @property
  def unknown(self) -> float:
    """The share of [UNK] among the tokens."""
    return self.counts[self.unk_id] / max(self.counts.sum(), 1)


def _count_lines(documents: Iterator[str], distinct: survey_lib.Distinct) -> Iterator[str]:
  """Passes the documents on, and counts their lines."""
  for document in documents:
    for line in document.split('\n'):
      if line := line.strip():
        distinct.add(survey_lib.text_hash(line.encode()))
    yield document


def _count_labels(encoded: list[encode.Encoded], vocab_size: int) -> np.ndarray:
  """Labels of the next-sentence pairs in one window of rows."""
  with tempfile.TemporaryDirectory() as folder:
    directory = epath.Path(folder)
    shard = preparation.write_shard(directory, 'sample-00000', vocab_size, encoded)['entry']
    manifest = {'splits': {'sample': [shard]}, 'vocab_size': vocab_size, 'digest': ''}
    split = records.open_split(directory, manifest, 'sample', verify=False)
    blocks = np.random.default_rng(0).permutation(split.num_blocks)[:64]
    pairs, _, _ = pairs_lib.make_pairs(split, blocks, _LAYOUT, (0,))
    return np.bincount(pairs.label[pairs.has_b], minlength=2)


def check(settings: corpus.Settings) -> CorpusStatistics:
  """Reads a corpus once, and tokenises at most 256 MiB of it.

  Raises:
    UserError: the text cannot be read, or the vocabulary not used.
  """
  with tempfile.TemporaryDirectory() as scratch:
    source = corpus.open_source(settings, epath.Path(scratch))
    lines = survey_lib.Distinct()
    documents = preparation.with_progress(source.read(), 'reading')
    survey = survey_lib.survey(_count_lines(documents, lines), settings.heldout)
    if not survey.documents:
      preparation.check_documents(settings.source, survey)
    tokenizer = preparation.make_tokenizer(settings, source, survey)
    encoder = encode.Encoder(tokenizer, settings)
    documents = preparation.with_progress(source.read(), 'tokenising', survey.size)
    sampled = (d for d in documents if survey.in_vocabulary_text(d) or survey.is_held_out(d))
    encoded, size, cjk, characters = [], 0, 0, 0
    heldout_counts = np.zeros(tokenizer.vocab_size, np.int64)
    for batch in encode.batches(sampled):
      encoded.append(encoder.documents(batch))
      size += encoded[-1].size
      cjk += sum(len(_CJK.findall(d)) for d in batch)
      characters += sum(map(len, batch))
      heldout = encoder.documents(filter(survey.is_held_out, batch))
      heldout_counts += np.bincount(heldout.tokens, minlength=tokenizer.vocab_size)
  counts = sum(np.bincount(e.tokens, minlength=tokenizer.vocab_size) for e in encoded)
  return CorpusStatistics(
      survey=survey, lines=lines.total, repeated_lines=lines.total - lines.different(),
      sample=size / max(survey.size, 1), sentences=np.concatenate([e.lengths for e in encoded]),
      documents=np.concatenate([e.counts for e in encoded]), counts=counts,
      unk_id=tokenizer.unk_id, cjk=cjk / max(characters, 1),
      labels=(_count_labels(encoded, tokenizer.vocab_size) if counts.sum() > 1
              else np.zeros(2, int)),
      plateau=preparation.cross_entropy(heldout_counts, counts - heldout_counts))


def warnings(stats: CorpusStatistics, settings: corpus.Settings) -> Iterator[str]:
  """The faults of a corpus, each with its reason and remedy."""
  s = stats.survey
  if s.different == 1:
    yield ('all text is one document, so no next sentence can come from another one: put a blank '
           'line between documents, or give JSON lines')
  elif np.mean(stats.documents == 1) > 0.5:
    yield (f'{np.mean(stats.documents == 1):.0%} of the documents are one sentence, so it has no '
           'next one: blank lines belong between documents, not between sentences')
  if stats.unknown > 0.01:
    yield (f'{stats.unknown:.1%} of the tokens are [UNK]: the vocabulary does not fit the text; '
           'give another --vocab, or train one with --vocab_size')
  if stats.repeated_lines > 0.05 * stats.lines:
    yield (f'{stats.repeated_lines / stats.lines:.0%} of the lines are copies of others (menus, '
           'headings, licences?): a model learns them by heart; remove them')
  if s.copies > 0.01 * s.documents:
    yield (f'{s.copies:,} documents are exact copies of others: remove them, the '
           'evaluation is about texts that were not seen')
  if np.mean(stats.sentences > 256) > 0.01:
    yield (f'{np.mean(stats.sentences > 256):.1%} of the sentences have more than 256 tokens: is '
           f'--language={settings.language} right, and has the text marks at sentence ends?')
  if stats.cjk > 0.3 and settings.language in ('en', ''):
    yield (f'{stats.cjk:.0%} of the characters are Chinese or Japanese: give --language=zh or ja, '
           'or sentences and words are not found')
  share = stats.labels[0] / max(stats.labels.sum(), 1)
  if stats.labels.sum() and not 0.4 < share < 0.6 and s.different > 1:
    yield (f'{share:.0%} of the pairs would be true next sentences, not half: too few documents '
           'share most of the text, so that few B can come from another one')


def histogram(values: np.ndarray) -> Iterator[str]:
  """A line with a bar for each power of two that occurs."""
  bucket = np.searchsorted(_BUCKETS, values, side='right')
  shares = np.bincount(bucket, minlength=len(_BUCKETS) + 1) / max(len(values), 1)
  used = np.flatnonzero(shares)
  for i in range(used[0], used[-1] + 1) if len(used) else ():
    low = 1 if i == 0 else int(_BUCKETS[i - 1])
    high = f'- {int(_BUCKETS[i]) - 1:,}' if i < len(_BUCKETS) else 'and more'
    yield f'{low:>8,} {high:<8} {shares[i]:6.1%}  {"#" * round(50 * shares[i])}'


def print_report(settings: corpus.Settings):
  """Checks a corpus and prints the results."""
  stats = check(settings)
  s = stats.survey
  about = '' if stats.sample > 0.999 else 'about '
  scale = 1 / stats.sample if stats.sample else 0
  lines = [
      ('text', f'{s.size / 1e6:,.1f} MB in {stats.lines:,} lines'),
      ('documents', f'{s.documents:,}, of them {s.copies:,} exact copies'),
      ('copied lines', f'{stats.repeated_lines:,} ({stats.repeated_lines / stats.lines:.1%})'),
      ('sentences', f'{about}{len(stats.sentences) * scale:,.0f}'),
      ('tokens', f'{about}{stats.counts.sum() * scale:,.0f}, {stats.unknown:.2%} unknown; '
                 f'{np.count_nonzero(stats.counts):,} of {len(stats.counts):,} entries are used'),
      ('pairs', f'{stats.labels[0]:,} true next sentences and {stats.labels[1]:,} others in a '
                'sample'),
      ('plateau', 'nothing is held out' if stats.plateau is None else
       f'{stats.plateau:.3f} nat: the MLM loss of a model that knows the token frequencies only')]
  console.print_lines(lines)
  for name, values in (('tokens in a sentence', stats.sentences),
                       ('sentences in a document', stats.documents)):
    print(f'  {name}')
    for line in histogram(values):
      print(f'  {line}')
  console.print_lines(('WARNING', warning) for warning in warnings(stats, settings))
