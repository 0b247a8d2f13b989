"""A label, labels or a number for a text or a pair (Devlin et al. 2019, section 4.1)."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from bert_jax.data import inputs as inputs_lib
from bert_jax.data import long_inputs
from bert_jax.data.tokenizer import Tokenizer
from bert_jax.errors import UserError
from bert_jax.labelled import texts
from bert_jax.labelled.packed_examples import Batch
from bert_jax.labelled.packed_examples import Features
from bert_jax.labelled.texts import TextExample
from bert_jax.model import chunks
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.task_heads import BertForSequenceClassification
from bert_jax.objectives.losses import Metrics
from bert_jax.objectives.losses import cross_entropy
from bert_jax.objectives.losses import weighted
from bert_jax.tasks import metrics as scores_lib
from bert_jax.tasks.finetuning import FineTuning
from bert_jax.tasks.finetuning import Output
from bert_jax.tasks.finetuning import Split
from bert_jax.tasks.finetuning import Splits
from bert_jax.tasks.finetuning import by_example
from bert_jax.tasks.finetuning import eval_files
from bert_jax.tasks.finetuning import not_empty


def features(examples: Sequence[TextExample], tokenizer: Tokenizer, max_len: int, long: str,
             targets: np.ndarray | None = None) -> Features:
  """The inputs of texts: one each, or with long='chunks_...' a text's chunks."""
  first = tokenizer.encode_batch([e.text for e in examples])
  second = tokenizer.encode_batch([e.text_pair or '' for e in examples])
  found, owners = [], []
  for i, (example, a, b) in enumerate(zip(examples, first, second)):
    if example.text_pair is not None:
      parts = [inputs_lib.cut_pair(a, b, max_len - inputs_lib.special_tokens(tokenizer, 2))]
    else:
      parts = [(piece,) for piece in long_inputs.pieces(a, max_len - 2, long)]
    found += [inputs_lib.join(tokenizer, *part) for part in parts]
    owners += [i] * len(parts)
  return Features(found, np.array(owners, np.int64), targets)


def _targets(examples: Sequence[TextExample], problem: str, labels: Sequence[str]) -> np.ndarray:
  """[n] int32 classes, [n] float32 numbers, or [n, labels] float32 of 0 and 1."""
  if problem == 'regression':
    return np.array([e.label for e in examples], np.float32)
  number = {label: i for i, label in enumerate(labels)}
  found = np.zeros((len(examples), len(labels)), np.float32)
  for i, e in enumerate(examples):
    for label in (e.label if problem == 'multi_label' else (e.label,)):
      if label not in number:
        raise UserError(f'{e.where}: the label {label!r} is none of the {len(labels)} labels: '
                        f'{", ".join(labels[:20])}')
      found[i, number[label]] = 1
  return found if problem == 'multi_label' else found.argmax(1).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class SequenceClassification(FineTuning):
  """One answer for each text.

  Attributes:
    problem: single_label, multi_label or regression.
    long: what is read of a text that is too long.
  """

  problem: str = 'single_label'
  long: str = 'head'

  @property
  def score_names(self) -> tuple[str, ...]:
    """As `metrics` has them."""
    return {'regression': ('pearson', 'spearman', 'squared_error'),
            'multi_label': ('accuracy', 'f1', 'f1_macro'),
            'single_label': ('accuracy', 'f1', 'matthews')}[self.problem]

  def call_arguments(self, cls_positions: jax.Array) -> tuple[jax.Array, ...]:
    """The positions of [CLS]."""
    return (cls_positions,)

  def logits(self, apply: Callable[..., jax.Array], batch: Batch) -> jax.Array:
    """[E, labels]."""
    pooled = apply(batch.inputs, batch.starts, method='pooled')  # [R, P, D]
    vectors = pooled.reshape(-1, pooled.shape[-1])[jnp.maximum(batch.members, 0)]  # [E, C, D]
    return apply(chunks.combine(vectors, batch.members >= 0, self.long), method='classify')

  def metrics(self, logits: jax.Array, batch: Batch) -> Metrics:
    """Cross-entropy and accuracy; binary cross-entropy; or the squared error (as transformers)."""
    there = (batch.members[:, 0] >= 0).astype(jnp.float32)
    if self.problem == 'regression':
      return {'loss': weighted(jnp.square(logits[:, 0] - batch.targets), there)}
    if self.problem == 'multi_label':
      losses = jnp.logaddexp(0, logits) - batch.targets * logits
      return {'loss': weighted(losses.mean(-1), there)}
    losses, right = cross_entropy(logits, batch.targets)
    return {'loss': weighted(losses, there), 'accuracy': weighted(right, there)}

  def scores(self, split: Split, outputs: list[Output]) -> dict[str, float]:
    """As GLUE has them."""
    gold, logits = split.batches.features.targets, by_example(outputs)
    if self.problem == 'regression':
      return scores_lib.regression(gold, logits[:, 0])
    if self.problem == 'multi_label':
      return scores_lib.multi_label(gold > 0, logits > 0)
    return scores_lib.single_label(gold, logits.argmax(1), len(self.labels))


def create(config: ConfigDict, model: BertConfig, tokenizer: Tokenizer,
           splits: Splits) -> SequenceClassification:
  """The task that a config describes.

  Raises:
    UserError: something is wrong with the data.
  """
  data, columns = config.data, texts.columns(config.data)
  long_inputs.check(data.long)

  skipped, notes = tuple(map(str, data.skip_labels)), []

  def read(path, split):
    examples = not_empty(texts.read(path, data.format, columns, split), path)
    kept = [e for e in examples if e.label not in skipped]
    if skipped:
      notes.append(f'{len(examples) - len(kept):,} of {len(examples):,} rows of {path} are left '
                   f'out: their label is {" or ".join(skipped)} (data.skip_labels)')
    return not_empty(kept, f'{path} (without the labels {", ".join(skipped)})')

  train = read(data.train, 'train')
  labels = texts.label_names(train, columns)
  if columns.problem == 'single_label' and not columns.labels and texts.are_scores(labels):
    notes.append(f'the {len(labels)} labels of {data.train} are numbers, such as {labels[0]}, and '
                 'taken for classes: data.problem=regression predicts the number itself')
  if columns.problem == 'single_label' and len({e.label for e in train}) == 1:
    raise UserError(f'{data.train} has the label {train[0].label!r} only: there is nothing to '
                    'learn from one class')

  def make(examples):
    return features(examples, tokenizer, config.max_len, data.long,
                    _targets(examples, columns.problem, labels))

  evals = [(name, read(path, 'validation')) for name, path in eval_files(config)]
  return SequenceClassification(
      BertForSequenceClassification(model, len(labels)), labels, splits.train(train, make(train)),
      tuple(splits.evaluation(name, examples, make(examples)) for name, examples in evals),
      notes=tuple(notes), feed=splits.feed, problem=columns.problem, long=data.long)
