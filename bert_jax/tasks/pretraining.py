"""The pretraining task: rows of sentence pairs from a corpus, masked on the device."""

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.data.phases import Phases
from bert_jax.data.prepare import Corpus
from bert_jax.data.rows import Rows
from bert_jax.data.rows import RowSource
from bert_jax.data.tokenizer import special_ids
from bert_jax.model.config import flops_per_token
from bert_jax.model.encoder import Batch
from bert_jax.model.heads import BertForPreTraining
from bert_jax.objectives import masking
from bert_jax.objectives import mlm_nsp
from bert_jax.objectives.losses import Metrics
from bert_jax.parallel import mesh as mesh_lib

_EVAL_SEED = 0  # of held-out rows and masks: they are the same in every evaluation of every run


@dataclasses.dataclass(frozen=True)
class Pretraining:
  """Masked LM + next sentence prediction on a tokenised corpus."""

  model: BertForPreTraining
  masking: masking.MaskingConfig
  corpus: Corpus
  phases: Phases
  eval_batches: int  # most batches of an evaluation; 0 = every held-out row
  train_rows: tuple[RowSource, ...]  # one source for each phase
  eval_rows: tuple[RowSource, ...]

  objectives = mlm_nsp.OBJECTIVES

  @classmethod
  def create(cls, model: BertForPreTraining, masking_config: masking.MaskingConfig, corpus: Corpus,
             phases: Phases, *, seed: int, eval_batches: int) -> 'Pretraining':
    """The task, with a row source for each phase."""

    def sources(records, seed):
      return tuple(RowSource(records, phase.max_len, seed, corpus.tokenizer) for phase in phases)

    return cls(model, masking_config, corpus, phases, eval_batches,
               sources(corpus.train, seed), sources(corpus.heldout, _EVAL_SEED))

  def init(self, key: jax.Array) -> Any:
    """Parameters, boxed with their logical axes."""
    tokens = jnp.zeros((1, 8), jnp.int32)
    return self.model.init(key, Batch(tokens, tokens, tokens, tokens), tokens[:, :1], tokens[:, :1])

  def mask(self, key: jax.Array, batch: Rows) -> masking.Masked:
    """The masks of a batch."""
    t = self.corpus.tokenizer
    return masking.mask(key, batch.ids, batch.pair_index, batch.row, self.masking,
                        vocab_size=t.vocab_size, special_ids=special_ids(t), mask_id=t.mask_id,
                        pairs=batch.cls_positions.shape[1])

  def loss(self, params: Any, frozen: Any, batch: Rows, key: jax.Array | None) -> Metrics:
    """The metrics of `mlm_nsp.loss` and the batch's real tokens."""
    del frozen
    if key is None:
      mask_key, dropout_key = jax.random.key(_EVAL_SEED, impl='threefry2x32'), None
    else:
      mask_key, dropout_key = jax.random.split(key)
      # Every microbatch of a step gets the same key: its first row tells them apart.
      dropout_key = jax.random.fold_in(dropout_key, batch.row[0])
    masked = self.mask(mask_key, batch)
    inputs = Batch(masked.ids, batch.type_ids, batch.positions, batch.pair_index)
    metrics = mlm_nsp.loss(self.model, params, inputs, masked, batch.cls_positions,
                           batch.next_sentence, batch.pair_weights, dropout_key)
    tokens = jnp.sum(batch.pair_index > 0).astype(jnp.float32)
    return {**metrics, 'tokens': (tokens, jnp.float32(1))}

  def rows(self, step: int) -> Rows:
    """This process's share of a step's rows, unmasked."""
    index, phase, within = self.phases.locate(step)
    share = mesh_lib.process_share(phase.batch_size)
    return self.train_rows[index].batch(within, phase.batch_size, share)

  def evaluate(self, evaluate_batch: Callable[[Rows], Metrics], step: int) -> dict[str, float]:
    """Means over the held-out rows at the length of the last step trained, with fixed masks."""
    if not self.corpus.heldout.num_documents:
      return {}
    index, phase, _ = self.phases.locate(max(step - 1, 0))
    share = mesh_lib.process_share(phase.batch_size)
    sums = {}
    for i, batch in enumerate(self.eval_rows[index].epoch_batches(phase.batch_size, share)):
      if self.eval_batches and i >= self.eval_batches:
        break
      for name, metric in jax.device_get(evaluate_batch(batch)).items():
        sums[name] = np.add(sums.get(name, (0.0, 0.0)), metric)
    means = {name: float(total / max(count, 1)) for name, (total, count) in sums.items()}
    del means['tokens']
    return {'loss': sum(w * means[name] for name, w in self.objectives.items()), **means,
            'unigram_entropy': self.corpus.unigram_entropy}

  def flops(self, step: int, tokens: float) -> float:
    """Model FLOPs of training on so many real tokens, in rows of the length at `step`."""
    _, phase, _ = self.phases.locate(step)
    predictions = self.masking.rate * tokens
    return flops_per_token(self.model.config, phase.max_len, predictions / max(tokens, 1)) * tokens

  def describe(self) -> Iterator[tuple[str, str]]:
    """(what, value) lines for the summary before a run."""
    c = self.corpus
    yield 'corpus', (f'{len(c.train.tokens):,} tokens in {c.train.num_documents:,} documents, held '
                     f'out {len(c.heldout.tokens):,} in {c.heldout.num_documents:,}')
    yield 'vocabulary', f'{c.tokenizer.vocab_size:,} entries, {c.tokenizer.kind}'
    for phase, source in zip(self.phases, self.train_rows):
      plan = source.plan(0)
      rows = len(plan.random)
      yield f'rows of {phase.max_len}', (
          f'{rows:,} an epoch, {plan.real_tokens() / rows / phase.max_len:.1%} real tokens, '
          f'{1 - plan.random.mean():.1%} true next sentences')
      yield '', (f'{plan.tokens_cut:,} tokens cut, {plan.tokens_dropped:,} dropped; '
                 f'{plan.sentences_split:,} sentences longer than a row are used in pieces')
    for note in c.notes:
      yield 'note', note
