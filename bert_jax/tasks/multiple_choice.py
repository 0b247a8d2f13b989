"""Multiple choice: finds the best of several endings or answers.

As for SWAG in Devlin et al. 2019, section 4.4.
"""

from collections.abc import Sequence
import dataclasses
import functools

import jax
import numpy as np
from scipy import special

from bert_jax.config_fields import HARMLESS, Field
from bert_jax.errors import require
from bert_jax.labelled import choices, packed_examples, unused_fields
from bert_jax.model import architectures
from bert_jax.objectives import losses
from bert_jax.tasks import (
  finetuning,
  finetuning_data,
  sequence_classification,
  task_kind,
)


class BertForMultipleChoice(sequence_classification.BertForSequenceClassification):
  """Scores each (text, choice) pair; the caller takes the softmax over the choices."""

  num_labels: int = 1


@dataclasses.dataclass(frozen=True)
class MultipleChoice(finetuning.InputScoring):
  """A softmax over the choices of each text; the right choice is the target."""

  def metrics(self, logits: jax.Array, batch: packed_examples.Batch) -> losses.Metrics:
    """Returns cross-entropy 'loss' and 'accuracy' of logits [E, C] over the C choices."""
    return losses.classification(logits, batch.targets, batch.is_real)


@dataclasses.dataclass(frozen=True)
class ChoiceFiles(finetuning_data.ExampleFiles):
  """Texts with several endings or answers, one of which is right."""

  best_score = 'accuracy'
  score_names = ('accuracy',)

  config_fields = {
      # auto or jsonl: the columns that the config names; swag (csv) or commonsenseqa:
      # their own columns.
      'data.format': 'auto',
      'data.text_pair_column': None,
      # A list. The label is an index into it from 0, or a letter.
      'data.choices_column': Field('choices', on_resume=HARMLESS,
                                   unused=(unused_fields.named_by_format,)),
  }

  @classmethod
  def make(cls, config, *_):
    head = BertForMultipleChoice(architectures.make_config(config.model))
    return cls(MultipleChoice(head), ('score',))

  @staticmethod
  def read(path, data, split, _):
    return choices.read(path, data, labelled=split != 'test')

  def features(self, examples, tokenizer, config, **_):
    """Makes [CLS] text [SEP] choice [SEP] for each choice."""
    pairs = [[(e.text, choice) for choice in e.choices] for e in examples]
    inputs, owners = finetuning_data.grouped_inputs(pairs, tokenizer, config.max_len)
    targets = np.array([e.label for e in examples], np.int32)
    return packed_examples.Features(inputs, owners, targets)

  def scores(self, split, outputs):
    predicted = finetuning_data.by_example(outputs).argmax(1)
    return {'accuracy': float(np.mean(predicted == split.features.targets))}


class ChoiceKind(task_kind.TaskKind):
  """The best of several endings or answers."""

  name = 'multiple_choice'
  files = ChoiceFiles
  parameter_groups = ('pooler', 'classifier')
  head = BertForMultipleChoice
  scores_choices = True
  transformers = 'ForMultipleChoice'
  fields = ('text',)
  optional = ('choices',)

  @staticmethod
  def answer(bert, examples, _):
    require(all(choices.are_choices(e.get('choices')) for e in examples),
            "'choices' must be a list of at least two texts")
    return choose(bert, [(e['text'], e['choices']) for e in examples])

  @staticmethod
  def write_test(bert, _, examples):
    return task_kind.json_lines(choose(bert, [(e.text, e.choices) for e in examples]))


def choose(bert: task_kind.TrainedModel,
           examples: Sequence[tuple[str, Sequence[str]]]) -> list[task_kind.Answer]:
  """Answers each (text, choices) with {'choice' (from 0), 'probabilities'}."""
  head = ChoiceKind.head_of(bert)
  if not examples:
    return []
  pairs = [[(text, choice) for choice in endings] for text, endings in examples]
  inputs, owners = finetuning_data.grouped_inputs(pairs, bert.tokenizer,
                                                  bert.trained_length)
  pooled = bert.per_text(inputs,
                         functools.partial(task_kind.apply_head, head, method='pooled'))
  scores = np.asarray(head.apply(bert.params, pooled, method='classify'))[:, 0]
  # Texts may have different numbers of choices: each gets its own softmax.
  of_examples = np.split(scores, np.searchsorted(owners, np.arange(1, len(examples))))
  return [{'choice': int(p.argmax()), 'probabilities': p.tolist()}
          for p in (special.softmax(x.astype(np.float64)) for x in of_examples)]
