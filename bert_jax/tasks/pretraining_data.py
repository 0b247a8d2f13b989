"""The host half of pretraining: rows of a corpus, and evaluations on held-out text."""

from collections.abc import Callable, Iterator
import dataclasses
import functools

from flax import linen as nn
import jax
from ml_collections import ConfigDict
import numpy as np

from bert_jax.data import mixture
from bert_jax.data.dataset import Corpus
from bert_jax.data.pairs import RowLayout
from bert_jax.data.phases import Phases
from bert_jax.data.records import Records
from bert_jax.data.rows import Rows, RowSource, first_rows
from bert_jax.errors import require
from bert_jax.objectives import causal_rows, losses
from bert_jax.objectives.objective import abstract_variables
from bert_jax.parallel.mesh import Feed
from bert_jax.tasks.pretraining import EVAL_SEED, Pretraining

_FEW_PAIRS = 0.05  # pairs per row; with fewer, the pair head hardly trains
_MOST_UNCHANGED = 0.9  # share of true next sentences; above it, too few are false


def _asks_about_pairs(task: Pretraining) -> bool:
  return bool({'nsp_loss', 'sop_loss'} & set(task.loss_weights))


def _why_no_pair(records: Records | mixture.MixedRecords, max_len: int) -> str:
  corpora = records.corpora if isinstance(records, mixture.MixedRecords) else (records,)
  if all(corpus.num_sentences == corpus.num_documents for corpus in corpora):
    return ('every document is one sentence, so none has a next one: blank lines belong '
            'between documents, not between sentences. Take them out, or give '
            'data.sequences=full_sentences')
  return (
      f'no two neighboring sentences fit into a row of {max_len}: no pair can be built. '
      'Raise max_len, or give data.sequences=full_sentences')


def _check_predictions(task: Pretraining, corpus: Corpus, phases: Phases):
  """Raises UserError if the text has no token to predict, or rows are too short."""
  longest = max(phase.max_len for phase in phases)
  require(
      task.masking.max_predictions <= longest,
      f'masking.max_predictions={task.masking.max_predictions} is more than the '
      f'{longest} tokens of a row: give fewer, or 0 for as many as masking.rate asks for')
  special = list(task.vocabulary.special_ids)
  require(
      corpus.counts.sum() > corpus.counts[special].sum(),
      'every token of the text is [UNK]: masked LM has nothing to predict. Take a '
      'vocabulary made of such text (data.vocab, or the model of init_from), in another '
      '--workdir')


def _warnings(source: RowSource | mixture.MixedRows) -> Iterator[str]:
  """Yields warnings about the pairs in the rows of an objective with a pair head."""
  sample, length = source.sample(), source.layout.max_len
  if sample.pairs < _FEW_PAIRS:
    yield (
        f'one in {1 / sample.pairs:,.0f} rows of {length} has a pair to ask about, the '
        'others train masked LM alone: raise max_len, or give '
        'data.sequences=full_sentences')
  elif (source.layout.sequences == 'next_sentence'
        and sample.unchanged > _MOST_UNCHANGED):
    yield (
        f'{sample.unchanged:.0%} of the pairs in rows of {length} are true next '
        'sentences, not half: there are too few documents, so few second sentences can '
        'come from another document')


@dataclasses.dataclass(frozen=True)
class PretrainingData:
  """The host half: the rows of a tokenized corpus."""

  task: Pretraining
  corpus: Corpus
  phases: Phases
  eval_batches: int  # upper bound on the batches of an evaluation; 0 = every held-out row
  train_rows: tuple[RowSource, ...]  # one source for each phase
  eval_rows: tuple[RowSource, ...]  # one for each phase; empty without held-out text
  feed: Feed = Feed()  # the part of a batch that this process feeds

  def __getstate__(self):
    """The state for worker processes, which only make rows and need no teacher."""
    # A teacher consists of JAX arrays: unpickling them would start JAX in every worker.
    return {**vars(self), 'task': dataclasses.replace(self.task, frozen={})}

  @classmethod
  def create(cls, task: Pretraining, corpus: Corpus, phases: Phases, data: ConfigDict, *,
             seed: int, eval_batches: int, feed: Feed = Feed()) -> 'PretrainingData':
    """Makes a row source for each phase, by the config group `data`.

    Raises:
      UserError: the objective needs pairs and none fits into a row, the text has nothing
        to predict, or `masking.max_predictions` exceeds the tokens of a row.
    """

    def sources(records, seed):
      layouts = [
          RowLayout.create(phase.max_len, data.pack, data.sequences, data.negatives)
          for phase in phases
      ]
      words = task.masking.unit != 'token'
      if isinstance(records, mixture.MixedRecords):
        return mixture.mixed_rows(records, layouts, phases, seed, corpus.tokenizer,
                                  words=words)
      return tuple(RowSource(records, layout, seed, corpus.tokenizer, words)
                   for layout in layouts)

    train = sources(corpus.train, seed)
    if isinstance(corpus.train, mixture.MixedRecords):
      unread = mixture.unread(data.source, train[0].plan)
      corpus = corpus._replace(notes=(*corpus.notes, *unread))
    _check_predictions(task, corpus, phases)
    for phase, source in zip(phases, train):
      require(not _asks_about_pairs(task) or source.sample().pairs,
              _why_no_pair(corpus.train, phase.max_len))
    # A fixed seed: every run evaluates the same rows.
    return cls(task, corpus, phases, eval_batches, train,
               sources(corpus.heldout, EVAL_SEED) if corpus.heldout.num_tokens else (),
               feed)

  def _rate_at(self, step: int) -> float:
    return self.task.masking.rate_at(step, sum(phase.steps for phase in self.phases))

  def _with_causal(self, rows: Rows, step: int) -> Rows:
    # In a run without causal rows, the compiled step has no `causal` input.
    settings = self.task.masking
    if not settings.causal_rows:
      return rows
    index, phase, within = self.phases.locate(step)
    source = self.train_rows[index]
    # A mixture counts by corpus: by row, all causal rows could fall on one corpus.
    number = (source.ranks(within, phase.batch_size, self.feed.rows(phase.batch_size))
              if isinstance(source, mixture.MixedRows)
              else step * phase.batch_size + rows.row.astype(np.int64))
    share = causal_rows.share_at(settings.causal_rows, settings.causal_steps, step,
                                 sum(phase.steps for phase in self.phases))
    causal = causal_rows.are_causal(number, share)
    return rows._replace(tokens=rows.tokens._replace(causal=causal))

  def _at_rate(self, rows: Rows, rate: float) -> Rows:
    # Without a final rate, the rate is a constant in the compiled step.
    if not self.task.masking.final_rate:
      return rows
    return rows._replace(mask_rate=np.full(rows.row.shape, rate, np.float32))

  @functools.cached_property
  def _first_rows(self) -> tuple[int, ...]:
    """The first row of each phase, counted over the whole run."""
    return first_rows(self.train_rows, [p.steps * p.batch_size for p in self.phases])

  def rows(self, step: int) -> Rows:
    """This process's share of a step's rows, unmasked."""
    index, phase, within = self.phases.locate(step)
    source, share = self.train_rows[index], self.feed.rows(phase.batch_size)
    # A `MixedRows` knows the first row of each of its corpora.
    first = () if isinstance(source, mixture.MixedRows) else (self._first_rows[index],)
    rows = source.batch(within, phase.batch_size, share, *first)
    return self._at_rate(self._with_causal(rows, step), self._rate_at(step))

  @property
  def has_held_out(self) -> bool:
    return bool(self.eval_rows)

  @property
  def lower_is_better(self) -> set[str]:
    return {'loss', *self.task.loss_weights}

  def score_names(self) -> list[str]:
    """The names of the scores that `evaluate` returns."""
    params, frozen = nn.unbox((abstract_variables(self.task.objective), self.task.frozen))
    measured = jax.eval_shape(self.task.measure, params, frozen, self.rows(0))
    return ['loss', *(name for name in measured if name != 'tokens'), 'unigram_entropy']

  def evaluate(self, measure: Callable[[Rows], losses.Metrics],
               step: int) -> dict[str, float | None]:
    """Means over the held-out rows, which must exist, at the length of the last step.

    Masks are fixed. Their rate is always the rate of the last step of the run.
    """
    index, phase, _ = self.phases.locate(max(step - 1, 0))
    share = self.feed.rows(phase.batch_size)
    sums, evaluated = {}, 0
    for rows in self.eval_rows[index].epoch_batches(phase.batch_size, share):
      if self.eval_batches and evaluated == self.eval_batches:
        break
      batch = self._at_rate(rows, self.task.masking.eval_rate)
      metrics = jax.device_get(measure(batch))
      # In a small corpus some batches have only empty rows: they do not count.
      evaluated += bool(metrics.pop('tokens')[0])
      for name, metric in metrics.items():
        sums[name] = np.add(sums.get(name, (0.0, 0.0)), metric)
    return {'loss': losses.mean_loss(sums, self.task.loss_weights), **losses.means(sums),
            'unigram_entropy': self.corpus.unigram_entropy}

  def judged_on(self, step: int) -> str:
    index, phase, _ = self.phases.locate(max(step - 1, 0))
    lengths = {phase.max_len for phase in self.phases}
    most = self.eval_batches * phase.batch_size  # 0 = all rows
    first = f'the first {most:,} ' if 0 < most < self.eval_rows[index].rows else ''
    return f'{first}rows of {phase.max_len}' if first or len(lengths) > 1 else ''

  def flops(self, step: int, tokens: float) -> float:
    _, phase, _ = self.phases.locate(step)
    return tokens * self.task.objective.flops_per_token(phase.max_len,
                                                        self._rate_at(step))

  def describe(self) -> Iterator[tuple[str, str]]:
    c = self.corpus
    yield 'corpus', (
        f'{c.train.num_tokens:,} tokens in {c.train.num_documents:,} documents, held out '
        f'{c.heldout.num_tokens:,} in {c.heldout.num_documents:,}')
    yield 'vocabulary', f'{c.tokenizer.vocab_size:,} entries, {c.tokenizer.kind}'
    for phase, source in zip(self.phases, self.train_rows):
      sample = source.sample()
      yield f'rows of {phase.max_len}', (
          f'{source.rows:,} an epoch, {sample.fill:.1%} real tokens, {sample.pairs:.2f} '
          + {'next_sentence': f'pairs a row, {sample.unchanged:.1%} true next sentences',
             'sentence_order': f'pairs a row, {sample.unchanged:.1%} in order',
             'full_sentences': 'texts a row'}[source.layout.sequences])
      if _asks_about_pairs(self.task):
        yield from (('WARNING', warning) for warning in _warnings(source))
    yield from (('note', note) for note in c.notes)
