"""Predicts a label, several labels or a number for a text or a pair of texts.

As for GLUE in Devlin et al. 2019, section 4.1.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from bert_jax.config_fields import HARMLESS, Field, one_of
from bert_jax.data import inputs as inputs_lib
from bert_jax.data.tokens import Tokens
from bert_jax.errors import UserError, require
from bert_jax.labelled import glue, packed_examples, texts, unused_fields
from bert_jax.model import architectures, bert_config, pooling
from bert_jax.objectives import losses
from bert_jax.tasks import finetuning, finetuning_data, metrics, task_kind

_SCORES = {'single_label': ('accuracy', 'f1', 'matthews'),
           'multi_label': ('accuracy', 'f1', 'f1_macro'),
           'regression': ('pearson', 'spearman', 'squared_error')}
_BEST = {'single_label': 'accuracy', 'multi_label': 'f1', 'regression': 'spearman'}
_LABELS_SHOWN = 20  # in messages


class BertForSequenceClassification(nn.Module):
  """A dense layer on the pooled [CLS]."""

  config: bert_config.BertConfig
  num_labels: int  # 1 for a regression

  def setup(self):
    self.bert = architectures.make_encoder(self.config)
    self.dropout = nn.Dropout(self.config.dropout)
    self.classifier = finetuning.output_layer(self.config, self.num_labels)

  def pooled(self, tokens: Tokens, starts: jax.Array, *,
             deterministic: bool = True) -> jax.Array:
    """[B, L] inputs and [B, P] int32 positions of [CLS] -> pooled outputs [B, P, D]."""
    return self.bert(tokens, starts, deterministic=deterministic)[1]

  def classify(self, pooled: jax.Array, *, deterministic: bool = True) -> jax.Array:
    """Pooled outputs [..., D] -> logits [..., num_labels] float32."""
    return self.classifier(self.dropout(pooled, deterministic=deterministic))

  def __call__(self, tokens: Tokens, starts: jax.Array, *,
               deterministic: bool = True) -> jax.Array:
    """[B, L] inputs, [B, P] int32 positions of [CLS] -> [B, P, num_labels] float32."""
    pooled = self.pooled(tokens, starts, deterministic=deterministic)
    return self.classify(pooled, deterministic=deterministic)


def _strings(examples: Sequence[texts.TextExample]) -> list[tuple[str, ...]]:
  return [(e.text,) if e.text_pair is None else (e.text, e.text_pair) for e in examples]


@dataclasses.dataclass(frozen=True)
class SequenceClassification(finetuning.FineTuning):
  """Predicts one answer for each text, from its vector or the vectors of its chunks."""

  problem: str = 'single_label'  # or multi_label, regression
  long: str = 'head'  # how texts above max_len are read

  def logits(self, apply: Callable[..., jax.Array],
             batch: packed_examples.Batch) -> jax.Array:
    """Returns the logits of each example: [E, labels] float32."""
    pooled = apply(batch.tokens, batch.starts, method='pooled')
    # The chunks of a text are combined before the head, which sees one vector for each
    # text.
    vectors = pooling.combine_chunks(batch.by_example(pooled), batch.members >= 0,
                                     self.long)
    return apply(vectors, method='classify')

  def metrics(self, logits: jax.Array, batch: packed_examples.Batch) -> losses.Metrics:
    """Returns 'loss' as transformers does; for single_label also 'accuracy'.

    `logits` are [E, labels] float32.
    """
    is_real = batch.is_real
    if self.problem == 'regression':
      return {'loss': losses.weighted(jnp.square(logits[:, 0] - batch.targets), is_real)}
    if self.problem == 'multi_label':
      of_labels = losses.binary_cross_entropy(logits, batch.targets)
      return {'loss': losses.weighted(of_labels.mean(-1), is_real)}
    return losses.classification(logits, batch.targets, is_real)


@dataclasses.dataclass(frozen=True)
class SequenceFiles(finetuning_data.ExampleFiles):
  """Texts and pairs with a label, several labels or a number."""

  auto_score: str = ''
  reads_pairs: bool = False  # the examples are pairs of texts

  best_score = 'auto'  # accuracy; f1 for multi_label; spearman for regression; GLUE's own
  lower_is_better = ('loss', 'squared_error')

  config_fields = {
      # auto, csv, tsv, jsonl, or a task of GLUE, which sets columns, labels and problem:
      # glue/cola, glue/sst2, glue/mrpc, glue/stsb, glue/qqp, glue/mnli, glue/qnli,
      # glue/rte, glue/wnli.
      'data.format': 'auto',
      # single_label, multi_label (a list of labels, or a comma-separated label_column
      # with 0 and 1 in each), regression.
      'data.problem': Field('single_label', unused=(unused_fields.named_by_format,)),
      # Names in order; () = all labels of the training file.
      'data.labels': Field(
          (), unused=(unused_fields.named_by_format, unused_fields.regression)),
      # Rows with these labels are left out: '-' of SNLI and OCNLI, -1 of Jigsaw's
      # columns.
      'data.skip_labels': Field(
          (), on_resume=HARMLESS,
          unused=(unused_fields.named_by_format, unused_fields.regression)),
      # The part of a text above max_len that the model reads: head, tail, head_tail (128
      # + 382 of 510), or all of it in chunks_max, chunks_mean, chunks_attention.
      'data.long': Field('head', one_of(inputs_lib.LONG), unused=(unused_fields.pairs,)),
  }

  @staticmethod
  def read(path, data, split, notes):
    labelled, skipped = split != 'test', tuple(map(str, data.skip_labels))
    rows = texts.read(path, data.format, texts.columns(data), split, labelled, skipped,
                      notes)
    examples = finetuning_data.not_empty(rows, path)
    if not (skipped and labelled):
      return examples
    rest = [e for e in examples if e.label is not texts.LEFT_OUT]
    notes.append(
        f'{len(examples) - len(rest):,} of {len(examples):,} rows of {path} are left out: '
        f'their label is {" or ".join(skipped)} (data.skip_labels)')
    return finetuning_data.not_empty(
        rest, f'{path} (without the labels {", ".join(skipped)})')

  @staticmethod
  def check_training(config, examples):
    columns = texts.columns(config.data)
    if columns.problem != 'single_label':
      # A label is a number or a tuple of names. `check_labels` checks lists of names.
      is_list = columns.problem == 'multi_label' and ',' not in columns.label
      require(is_list or len({str(e.label) for e in examples}) > 1,
              f'{config.data.train}: all rows have the same label {examples[0].label!r}: '
              'there is nothing to learn')
      return
    require(len(columns.labels) != 1,
            f'data.labels={",".join(columns.labels)} is one label: name every label of '
            f'{config.data.train}, or leave data.labels out')
    require(len({e.label for e in examples}) > 1,
            f'{config.data.train} has the label {examples[0].label!r} only: there is '
            'nothing to learn from one class')

  @classmethod
  def make(cls, config, examples, notes):
    data, columns = config.data, texts.columns(config.data)
    notes += texts.check_labels(examples, columns)
    labels = texts.label_names(examples, columns)
    # Similarity scores would train badly as classes, which have no order.
    if (columns.problem == 'single_label' and not columns.labels
        and texts.are_scores(labels)):
      notes.append(
          f'the {len(labels)} labels of {data.train} are numbers, such as {labels[0]}, '
          'and taken for classes: data.problem=regression predicts the number itself')
    is_glue = data.format.startswith('glue')
    best = glue.find(data.format).metric if is_glue else _BEST[columns.problem]
    head = BertForSequenceClassification(architectures.make_config(config.model),
                                         len(labels))
    task = SequenceClassification(head, problem=columns.problem, long=data.long)
    return cls(task, labels, auto_score=best,
               reads_pairs=any(e.text_pair is not None for e in examples))

  @property
  def facts(self):
    return {**super().facts, 'reads_pairs': self.reads_pairs}

  @property
  def problem(self) -> str:
    return self.task.problem

  @property
  def score_names(self) -> tuple[str, ...]:
    return _SCORES[self.problem]

  def features(self, examples, tokenizer, config, **_):
    inputs, owners = inputs_lib.text_inputs(_strings(examples), tokenizer,
                                            config.max_len, self.task.long)
    return packed_examples.Features(inputs, owners, self._targets(examples))

  def _targets(self, examples: Sequence[texts.TextExample]) -> np.ndarray:
    """Returns [n] int32 classes, [n] float32 numbers, or [n, labels] float32."""
    if self.problem == 'regression':
      return np.array([e.label for e in examples], np.float32)
    number = {label: i for i, label in enumerate(self.labels)}
    targets = np.zeros((len(examples), len(number)), np.float32)
    is_multi = self.problem == 'multi_label'
    for i, e in enumerate(examples):
      for label in (e.label if is_multi else (e.label,)):
        if label not in number:
          raise UserError(
              f'{e.where}: the label {label!r} is none of the {len(number)} labels: '
              f'{", ".join(self.labels[:_LABELS_SHOWN])}')
        targets[i, number[label]] = 1
    return targets if is_multi else targets.argmax(1).astype(np.int32)

  def scores(self, split, outputs):
    gold, logits = split.features.targets, finetuning_data.by_example(outputs)
    if self.problem == 'regression':
      return metrics.regression(gold, logits[:, 0])
    if self.problem == 'multi_label':
      return metrics.multi_label(gold > 0, logits > 0)
    return metrics.single_label(gold, logits.argmax(1), len(self.labels))


class SequenceKind(task_kind.TaskKind):
  """A label for each text, several labels, or a number."""

  name = 'sequence_classification'
  files = SequenceFiles
  parameter_groups = ('pooler', 'classifier')
  head = BertForSequenceClassification
  transformers = 'ForSequenceClassification'
  fields = ('text',)
  optional = ('text_pair',)

  @staticmethod
  def answer(bert, examples, options):
    require(all(isinstance(e.get('text_pair', ''), str) for e in examples),
            "'text_pair' must be a text")
    require(not bert.model.facts.get('reads_pairs') or all('text_pair' in e for e in examples),
            "the model was trained on pairs of texts: give 'text_pair', too")
    names = ('text', 'text_pair')
    inputs = [tuple(e[name] for name in names if name in e) for e in examples]
    return classify(bert, inputs, options.prompt)

  @staticmethod
  def write_test(bert, data, examples):
    inputs = _strings(examples)
    if not data.format.startswith('glue'):
      yield from task_kind.json_lines(classify(bert, inputs))
      return
    task, logits = glue.find(data.format), class_logits(bert, inputs)
    predictions = logits.argmax(1) if task.labels else logits[:, 0]
    yield (glue.submission_name(task, data.test),
           glue.submission(task, predictions.tolist()))


Texts = Sequence[str | tuple[str, ...]]  # texts and pairs


def class_logits(bert: task_kind.TrainedModel, inputs: Texts,
                 prompt: str | None = None) -> np.ndarray:
  """Returns the logits of texts or pairs: [texts, labels] float32.

  `prompt` names a prompt of a cross-encoder: None = the default prompt, '' = no prompt.
  """
  head = SequenceKind.head_of(bert)
  long = bert.model.facts.get('long') or 'head'
  strings = [(text,) if isinstance(text, str) else text for text in inputs]
  strings = bert.cross.prepared(strings, bert.cross.prompt(prompt))
  rows, owners = inputs_lib.text_inputs(strings, bert.tokenizer, bert.trained_length,
                                        long)
  pooled = bert.per_text(rows,
                         functools.partial(task_kind.apply_head, head, method='pooled'))
  vectors = pooling.combine_chunks_on_host(pooled, owners, long)
  return np.asarray(head.apply(bert.params, vectors, method='classify'))


def classify(bert: task_kind.TrainedModel, inputs: Texts,
             prompt: str | None = None) -> list[task_kind.Answer]:
  """Answers each text with {'label', 'probabilities'}, or {'value'} for a regression.

  A regression with several outputs answers with {'values'}, a number for each label. The
  answer of a multi-label model is {'labels', 'probabilities'}, where 'labels' has the
  labels with a probability above 1/2. For `prompt`, see `class_logits`.
  """
  if not inputs:
    return []
  labels = bert.model.labels
  logits = class_logits(bert, inputs, prompt).astype(np.float64)
  if bert.model.problem == 'regression':
    if len(labels) > 1:
      return [{'values': dict(zip(labels, row.tolist()))} for row in logits]
    return [{'value': float(row[0])} for row in logits]
  if bert.model.problem == 'multi_label':
    return [{'labels': [name for name, p in zip(labels, row) if p > 0.5],
             'probabilities': dict(zip(labels, row.tolist()))}
            for row in special.expit(logits)]
  return [{'label': labels[row.argmax()],
           'probabilities': dict(zip(labels, row.tolist()))}
          for row in special.softmax(logits, -1)]
