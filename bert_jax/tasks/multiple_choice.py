"""The best of several endings or answers (SWAG; Devlin et al. 2019, section 4.4)."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from bert_jax.data import inputs as inputs_lib
from bert_jax.data.tokenizer import Tokenizer
from bert_jax.labelled import choices
from bert_jax.labelled.packed_examples import Batch
from bert_jax.labelled.packed_examples import Features
from bert_jax.model.attention import MASKED
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.task_heads import BertForMultipleChoice
from bert_jax.objectives.losses import Metrics
from bert_jax.objectives.losses import cross_entropy
from bert_jax.objectives.losses import weighted
from bert_jax.tasks.finetuning import FineTuning
from bert_jax.tasks.finetuning import Output
from bert_jax.tasks.finetuning import Split
from bert_jax.tasks.finetuning import Splits
from bert_jax.tasks.finetuning import by_example
from bert_jax.tasks.finetuning import eval_files
from bert_jax.tasks.finetuning import not_empty


def features(examples: Sequence[choices.ChoiceExample], tokenizer: Tokenizer,
             max_len: int) -> Features:
  """[CLS] text [SEP] choice [SEP] for each choice; the right one is the target."""
  texts = tokenizer.encode_batch([e.text for e in examples])
  endings = iter(tokenizer.encode_batch([choice for e in examples for choice in e.choices]))
  found, owners, room = [], [], max_len - inputs_lib.special_tokens(tokenizer, 2)
  for i, (example, text) in enumerate(zip(examples, texts)):
    for _ in example.choices:
      found.append(inputs_lib.join(
          tokenizer, *inputs_lib.cut_pair(text, next(endings), room)))
      owners.append(i)
  return Features(found, np.array(owners, np.int64),
                  np.array([e.label for e in examples], np.int32))


@dataclasses.dataclass(frozen=True)
class MultipleChoice(FineTuning):
  """A softmax over the choices of each text."""

  score_names = ('accuracy',)

  def call_arguments(self, cls_positions: jax.Array) -> tuple[jax.Array, ...]:
    """The positions of [CLS]."""
    return (cls_positions,)

  def logits(self, apply: Callable[..., jax.Array], batch: Batch) -> jax.Array:
    """[E, C]; -1e9 where an example has fewer choices."""
    scores = apply(batch.inputs, batch.starts).reshape(-1)  # [R * P]
    there = batch.members >= 0
    return jnp.where(there, scores[jnp.maximum(batch.members, 0)], MASKED)

  def metrics(self, logits: jax.Array, batch: Batch) -> Metrics:
    """Cross-entropy and accuracy."""
    losses, right = cross_entropy(logits, batch.targets)
    there = (batch.members[:, 0] >= 0).astype(jnp.float32)
    return {'loss': weighted(losses, there), 'accuracy': weighted(right, there)}

  def scores(self, split: Split, outputs: list[Output]) -> dict[str, float]:
    """Accuracy."""
    right = by_example(outputs).argmax(1) == split.batches.features.targets
    return {'accuracy': float(np.mean(right))}


def create(config: ConfigDict, model: BertConfig, tokenizer: Tokenizer,
           splits: Splits) -> MultipleChoice:
  """The task that a config describes.

  Raises:
    UserError: something is wrong with the data.
  """
  def read(path):
    return not_empty(choices.read(path, config.data), path)

  train = read(config.data.train)
  evals = ((name, read(path)) for name, path in eval_files(config))
  return MultipleChoice(
      BertForMultipleChoice(model), ('score',),
      splits.train(train, features(train, tokenizer, config.max_len)),
      tuple(splits.evaluation(name, examples, features(examples, tokenizer, config.max_len))
            for name, examples in evals),
      notes=(), feed=splits.feed)
