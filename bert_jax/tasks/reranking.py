"""Ranks the documents of a query with a cross-encoder, which scores each pair.

Nogueira and Cho 2019, https://arxiv.org/abs/1901.04085. The models are sequence
classifiers with one output, which the CrossEncoder of sentence-transformers also reads.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from bert_jax.config_fields import HARMLESS, Field, one_of
from bert_jax.errors import require
from bert_jax.labelled import packed_examples, table
from bert_jax.model import architectures, layers
from bert_jax.objectives import losses
from bert_jax.tasks import (
  finetuning,
  finetuning_data,
  metrics,
  sequence_classification,
  task_kind,
)

LOSSES = ('binary', 'graded', 'listwise')
_SCORES = ('ndcg_10', 'mrr_10', 'map')


class Group(NamedTuple):
  """A query and its documents."""

  where: str  # the file and line of the query, for messages
  query: str
  documents: list[str]
  # Grades of the documents; above 0 is relevant. 0 where a file needs no grades.
  grades: list[float]
  has_columns: bool = False  # True = a line has a document and a grade in columns


def _are_texts(value: Any) -> bool:
  return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _lists(row: table.Row) -> tuple[list[str], list[float]]:
  """Reads the positives and negatives of a line; returns (documents, grades)."""
  positives = row['positives'] if 'positives' in row.values else [row['positive']]
  negatives = row.values.get('negatives') or []
  require(_are_texts(positives) and _are_texts(negatives),
          f"{row.where}: 'positives' and 'negatives' must be lists of texts, 'positive' a "
          'text')
  return positives + negatives, [1.0] * len(positives) + [0.0] * len(negatives)


def _grade(row: table.Row, column: str) -> float:
  """Reads a number of at least 0, or a bool."""
  value = row[column]
  grade = float(value) if isinstance(value, bool) else row.number(column)
  require(grade >= 0,
          f'{row.where}: {column!r} is {grade:g}: a grade is 0 (not relevant) or above: '
          'leave the line out, or write 0')
  return grade


def only_lists(config: ConfigDict, job: Any) -> str:
  """Says that the columns have no effect if all lines have lists."""
  groups = [group for split in (job.data.train, *job.data.evals)
            for group in split.examples]
  # data.test is not read before the run ends: it may have columns.
  return '' if config.data.test or any(group.has_columns for group in groups) else (
      'every line has lists of documents: no line has a document and a grade in columns')


@dataclasses.dataclass(frozen=True)
class Reranking(finetuning.InputScoring):
  """Scores each pair of a query and a document; `batch_size` counts queries."""

  kind: str = 'binary'  # one of LOSSES
  # The highest grade of the training data; the loss 'graded' divides by it.
  highest: float = 1.0

  def metrics(self, logits: jax.Array, batch: packed_examples.Batch) -> losses.Metrics:
    """Returns the 'loss' of `kind`, a mean over pairs or (listwise) queries.

    `logits` and `batch.targets`, the grades, are [E, C] float32.

    listwise is ListNet (Cao et al. 2007, https://doi.org/10.1145/1273496.1273513): the
    cross-entropy between the softmax of the grades and the softmax of the logits.
    """
    exists = batch.members >= 0  # [E, C]
    if self.kind == 'listwise':
      gold = jax.nn.softmax(jnp.where(exists, batch.targets, layers.MASKED))
      of_queries = -jnp.sum(gold * jax.nn.log_softmax(logits), axis=-1)
      return {'loss': losses.weighted(of_queries, batch.is_real)}
    # Absent documents have weight 0 below: their logits only have to be small.
    logits = jnp.where(exists, logits, 0)
    if self.kind == 'graded':
      of_pairs = jnp.square(jax.nn.sigmoid(logits) - batch.targets / self.highest)
    else:
      of_pairs = losses.binary_cross_entropy(logits, batch.targets > 0)
    return {'loss': losses.weighted(of_pairs, exists.astype(jnp.float32))}


@dataclasses.dataclass(frozen=True)
class RerankingFiles(finetuning_data.ExampleFiles):
  """Queries with documents, and a grade for each pair."""

  labels: tuple[str, ...] = ('score',)

  problem = 'regression'
  best_score = 'ndcg_10'
  score_names = _SCORES

  config_fields = {
      # JSON lines {"query", "positives", "negatives"} ("positive" in the output of
      # `mine`), or csv, tsv and JSON lines with a query, a document and a grade in the
      # columns below.
      'data.format': 'auto',
      'data.text_column': 'query',  # the column of the query
      # The column of the document.
      'data.text_pair_column': Field('document', on_resume=HARMLESS,
                                     unused_by_data=(only_lists,)),
      # The column of the grade; 0 = not relevant.
      'data.label_column': Field('label', on_resume=HARMLESS,
                                 unused_by_data=(only_lists,)),
      # binary: cross-entropy of each pair, relevant (a grade above 0) or not; graded:
      # squared error of the sigmoid and grade / highest grade; listwise: ListNet over the
      # documents of a query.
      'data.loss': Field('binary', one_of(LOSSES)),
      'batch_size': 8,
  }

  @staticmethod
  def read(path, data, split, _):
    # The lines of a query need not be adjacent.
    groups, places = {}, {}
    for row in table.read(path, data.format, split):
      query = row.text(data.text_column)
      group = groups.setdefault(query, Group(row.where, query, [], []))
      if row.values.keys() & {'positives', 'negatives'}:
        documents, grades = _lists(row)
      else:
        groups[query] = group._replace(has_columns=True)
        documents = [row.text(data.text_pair_column)]
        grades = [0.0 if split == 'test' else _grade(row, data.label_column)]
      for document, grade in zip(documents, grades):
        # Lines of `mine` for one query may have the same document, which counts once.
        at = places.get((query, document))
        if split != 'test' and at is not None:
          group.grades[at] = max(group.grades[at], grade)
        else:
          places[query, document] = len(group.documents)
          group.documents.append(document)
          group.grades.append(grade)
    for group in groups.values():
      require(bool(group.documents), f'{group.where}: the query has no document')
      if split == 'validation':
        require(max(group.grades) > 0,
                f'{group.where}: no document of the query {group.query!r} is relevant: '
                'there is nothing to score')
    require(split != 'validation' or any(len(set(x.grades)) > 1 for x in groups.values()),
            f'{path}: the documents of each query have the same grade, so every ranking '
            'is perfect: give negatives too')
    return list(groups.values())

  @staticmethod
  def check_training(config, examples):
    grades = {grade for group in examples for grade in group.grades}
    require(len(grades) > 1,
            f'{config.data.train}: all documents have the grade {min(grades):g}: there is '
            'nothing to learn')
    require(config.data.loss != 'listwise'
            or any(len(set(x.grades)) > 1 for x in examples),
            f'{config.data.train}: the documents of each query have the same grade, and '
            'data.loss=listwise compares them: give data.loss=binary or graded')
    between = [group for group in examples
               if any(0 < grade < 1 for grade in group.grades)]
    require(config.data.loss != 'binary' or not between,
            f'{between and between[0].where}: a grade lies between 0 and 1, and '
            'data.loss=binary counts every grade above 0 as relevant: write 0 or 1, or '
            'give data.loss=graded')

  @classmethod
  def make(cls, config, examples, _):
    highest = max(grade for group in examples for grade in group.grades)
    head = RerankingKind.head(architectures.make_config(config.model), 1)
    return cls(Reranking(head, config.data.loss, max(highest, 1e-6)))

  def with_facts(self, facts, notes):
    highest = facts.get('highest_grade')
    if highest is None and self.task.kind == 'graded':
      notes.append('the model does not say the highest grade of its training data: '
                   f'data.loss=graded divides by {self.task.highest:g}, the highest grade '
                   'of this file')
    task = dataclasses.replace(self.task, highest=highest or self.task.highest)
    return dataclasses.replace(self, task=task)

  @property
  def facts(self):
    return {**super().facts, 'highest_grade': self.task.highest}

  def features(self, examples, tokenizer, config, **_):
    """Makes [CLS] query [SEP] document [SEP]; targets are [queries, C] float32 grades."""
    pairs = [[(group.query, document) for document in group.documents]
             for group in examples]
    inputs, owners = finetuning_data.grouped_inputs(pairs, tokenizer, config.max_len)
    sizes = [len(group.documents) for group in examples]
    targets = np.zeros((len(examples), max(sizes)), np.float32)
    exists = np.arange(max(sizes)) < np.array(sizes)[:, None]
    targets[exists] = np.concatenate([group.grades for group in examples])
    return packed_examples.Features(inputs, owners, targets)

  def scores(self, split, outputs):
    """Computes NDCG@10, MRR@10 and MAP."""
    of_queries = []
    for group, logits in zip(split.examples, finetuning_data.by_example(outputs),
                             strict=True):
      grades = np.array(group.grades)
      # Ties rank the least relevant document first: a constant score must not score well.
      order = np.lexsort((grades, -logits[:len(grades)]))
      of_queries.append(metrics.ranking(grades[order], grades))
    scores = metrics.mean(of_queries)
    return {name: scores[name] for name in _SCORES}


class RerankingKind(task_kind.TaskKind):
  """The ranking of the documents of a query."""

  name = 'reranking'
  files = RerankingFiles
  model_task = 'sequence_classification'
  parameter_groups = ('pooler', 'classifier')
  head = sequence_classification.BertForSequenceClassification
  fields = ('query',)
  optional = ('documents',)

  @classmethod
  def head_of(cls, bert):
    model = bert.model
    require((model.task, len(model.labels)) == (cls.model_task, 1),
            f'this model scores no pairs: it is for {model.task or "no task"} with '
            f'{len(model.labels)} labels, not for {cls.name}')
    return cls.head(bert.config, 1)

  @staticmethod
  def answer(bert, examples, options):
    require(all(_are_texts(e.get('documents')) and e['documents'] for e in examples),
            "'documents' must be a list of at least one text")
    return rank(bert, [(e['query'], e['documents']) for e in examples], options.prompt)

  @staticmethod
  def write_test(bert, _, examples):
    answers = rank(bert, [(e.query, e.documents) for e in examples])
    return task_kind.json_lines({'query': e.query, 'documents': e.documents, **answer}
                                for e, answer in zip(examples, answers))


def pair_logits(bert: task_kind.TrainedModel, pairs: Sequence[tuple[str, str]],
                prompt: str | None = None) -> np.ndarray:
  """Scores (query, document) pairs before the activation: [pairs] float32.

  `prompt` names a prompt of the model: None = the default prompt, '' = no prompt.
  """
  # Both checks come before the early return, to report mistakes even without pairs.
  RerankingKind.head_of(bert)
  bert.cross.prompt(prompt)
  if not pairs:
    return np.zeros(0, np.float32)
  return sequence_classification.class_logits(bert, pairs, prompt)[:, 0]


def rank(bert: task_kind.TrainedModel, examples: Sequence[tuple[str, Sequence[str]]],
         prompt: str | None = None) -> list[task_kind.Answer]:
  """Answers each (query, documents) with {'ranking': [{'document', 'score'}]}.

  The best document comes first; 'document' is its index from 0. The scores equal the
  scores of a CrossEncoder: the sigmoid of the logit, unless the folder of the model names
  another activation. For `prompt`, see `pair_logits`.
  """
  pairs = [(query, d) for query, documents in examples for d in documents]
  logits = pair_logits(bert, pairs, prompt).astype(np.float64)
  scores = bert.cross.finished(logits[:, None])[:, 0]
  ends = np.cumsum([len(documents) for _, documents in examples])
  # The sigmoid rounds large logits to the same score: the logits break these ties.
  of_examples = zip(examples, np.split(logits, ends), np.split(scores, ends))
  return [{'ranking': [{'document': int(i), 'score': float(of_documents[i])}
                       for i in np.lexsort((-part, -of_documents))]}
          for _, part, of_documents in of_examples]
