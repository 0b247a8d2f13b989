"""The best of several endings or answers (SWAG; Devlin et al. 2019, section 4.4)."""

from collections.abc import Callable, Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from bert_jax.data import inputs as inputs_lib
from bert_jax.data.tokenizer import Tokenizer
from bert_jax.errors import UserError
from bert_jax.labelled import choices
from bert_jax.labelled.choices import ChoiceExample
from bert_jax.labelled.packed_examples import Batch, Features
from bert_jax.model import architectures
from bert_jax.model.kernels import MASKED
from bert_jax.objectives import losses
from bert_jax.tasks import finetuning, finetuning_data, kind
from bert_jax.tasks.sequence_classification import BertForSequenceClassification


class BertForMultipleChoice(BertForSequenceClassification):
  """A score for each (text, choice) pair; the caller takes the softmax over a text's pairs."""

  num_labels: int = 1


@dataclasses.dataclass(frozen=True)
class MultipleChoice(finetuning.FineTuning):
  """A softmax over the choices of each text."""

  def logits(self, apply: Callable[..., jax.Array], batch: Batch) -> jax.Array:
    """[E, C]; -1e9 where an example has fewer choices."""
    scores = apply(batch.inputs, batch.starts).reshape(-1)  # [R * P]
    return jnp.where(batch.members >= 0, scores[jnp.maximum(batch.members, 0)], MASKED)

  def metrics(self, logits: jax.Array, batch: Batch) -> losses.Metrics:
    """Cross-entropy and accuracy."""
    is_real = (batch.members[:, 0] >= 0).astype(jnp.float32)
    return losses.classification(logits, batch.targets, is_real)


def features(examples: Sequence[ChoiceExample], tokenizer: Tokenizer, max_len: int) -> Features:
  """[CLS] text [SEP] choice [SEP] for each choice; the right one is the target."""
  texts = tokenizer.encode_batch([e.text for e in examples])
  endings = iter(tokenizer.encode_batch([choice for e in examples for choice in e.choices]))
  inputs, owners = [], []
  room = max_len - inputs_lib.special_tokens(tokenizer, 2)
  for i, (example, text) in enumerate(zip(examples, texts)):
    for _ in example.choices:
      inputs.append(inputs_lib.join(tokenizer, *inputs_lib.cut_pair(text, next(endings), room)))
      owners.append(i)
  return Features(inputs, np.array(owners, np.int64),
                  np.array([e.label for e in examples], np.int32))


def _scores(split, outputs):
  right = finetuning_data.by_example(outputs).argmax(1) == split.batches.features.targets
  return {'accuracy': float(np.mean(right))}


def _create(config, tokenizer, mesh):
  def load(path):
    examples = finetuning_data.not_empty(choices.read(path, config.data), path)
    return examples, features(examples, tokenizer, config.max_len)

  task = MultipleChoice(BertForMultipleChoice(architectures.make_config(config.model)))
  return finetuning_data.create(
      task, config, tokenizer, mesh, train=load(config.data.train), load=load, labels=('score',),
      score_names=('accuracy',), scores=_scores)


def choose(bert: kind.Bert, examples: Sequence[tuple[str, Sequence[str]]]) -> list[kind.Answer]:
  """For each (text, choices) {'choice', 'probabilities'}: the number of the best, from 0."""
  head = KIND.head_of(bert)
  f = features([ChoiceExample('', text, tuple(endings), -1) for text, endings in examples],
               bert.tokenizer, bert.trained_length)
  pooled = bert.per_text(f.inputs, functools.partial(finetuning.apply_head, head, method='pooled'))
  scores = np.asarray(head.apply(bert.params, pooled, method='classify'))[:, 0]
  parts = (special.softmax(part.astype(np.float64)) for part in np.split(scores, f.first[1:-1]))
  return [{'choice': int(p.argmax()), 'probabilities': p.tolist()} for p in parts]


def _answer(bert, examples, _):
  if not all(choices.are_choices(e.get('choices')) for e in examples):
    raise UserError("'choices' has to be a list of at least two texts")
  return choose(bert, [(e['text'], e['choices']) for e in examples])


def _write_test(bert, _, examples):
  answers = choose(bert, [(e.text, e.choices) for e in examples])
  yield 'predictions.jsonl', kind.json_lines(answers)


def _set_fields(c):
  c.data.format = 'auto'  # jsonl; swag (csv), commonsenseqa: their own columns
  del c.data.text_pair_column
  c.data.choices_column = 'choices'  # a list; the label is its number from 0, or its letter


KIND = kind.TaskKind(
    name='multiple_choice',
    parts=('pooler', 'classifier'),
    best_score='accuracy',
    set_fields=_set_fields,
    create=_create,
    head=lambda config, num_labels: BertForMultipleChoice(config),
    lines=kind.LinePrediction(('text',), _answer, optional=('choices',)),
    read_test=lambda data: choices.read(data.test, data, labelled=False),
    write_test=_write_test,
    transformers='ForMultipleChoice')
