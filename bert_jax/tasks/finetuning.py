"""Fine-tuning: a head on the encoder, its loss on packed examples, evaluations of whole files."""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import json
import re
from typing import Any, ClassVar, NamedTuple

from etils import epath
from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict
import numpy as np

from bert_jax.data.tokenizers.base import Tokenizer
from bert_jax.data.tokens import Tokens
from bert_jax.errors import UserError, require
from bert_jax.labelled import replaced_fields
from bert_jax.labelled.packed_examples import Batch, Batches, Features, Located
from bert_jax.model import bert_config, dropout_bits, encoder, layers
from bert_jax.objectives import losses
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.parallel import sharding
from bert_jax.runtime import storage

Answer = dict[str, Any]  # one JSON object
Bert = Any  # an `inference.bert.Bert`, whose module imports this one
Files = Iterator[tuple[str, str]]  # (name, content) of each

_LABELS_SHOWN = 16  # in the summary of a run


def output_layer(config: bert_config.BertConfig, outputs: int) -> nn.Dense:
  """The last layer of a head: [..., D] -> [..., outputs] float32."""
  return layers.dense(config, outputs, ('embed', 'labels'), dtype=jnp.float32)


@functools.partial(jax.jit, static_argnames=('head', 'method'))
def apply_head(head: nn.Module, params: Any, tokens: Tokens, starts: jax.Array,
               method: str | None = None) -> jax.Array:
  """Runs a head without dropout, compiled once for each head and shape."""
  return head.apply(params, tokens, starts, method=method)


# ---- files and their outputs --------------------------------------------------------------------


class Split(NamedTuple):
  """The examples of one file."""

  name: str  # '' for the first file of data.eval; a suffix of the scores for others
  examples: Sequence[Any]
  batches: Batches


class Output(NamedTuple):
  """The reduced logits of one batch, on the host."""

  located: Located
  logits: np.ndarray


def check_labels(labels: Sequence[str], source: str):
  """Raises UserError if two outputs of a head have one name: answers go by the names."""
  for i, label in enumerate(labels):
    require(label not in labels[:i],
            f'{source}: the outputs {labels.index(label)} and {i} of its head are both named '
            f'{label!r}: give each a name of its own (id2label in config.json)')


def not_empty(examples: Iterable[Any], path: str) -> list[Any]:
  """A list of the examples of a file; raises UserError if there are none."""
  examples = list(examples)
  if not examples:
    raise UserError(f'{path} holds no example')
  return examples


def _eval_files(data: ConfigDict) -> list[tuple[str, str]]:
  """(suffix of the scores, path) of each file of data.eval, which are comma-separated."""
  paths = [path for path in data.eval.split(',') if path]
  names = [re.split(r'[.@]', epath.Path(path).name)[0] for path in paths]
  twice = next((name for name in names[1:] if names[1:].count(name) > 1), None)
  if twice:
    raise UserError(f'data.eval={data.eval}: the scores of two files would both end in '
                    f'{twice!r}: give them other names')
  return [(name if i else '', path) for i, (name, path) in enumerate(zip(names, paths))]


def choice_scores(apply: Callable[..., jax.Array], batch: Batch) -> jax.Array:
  """The score of each input of an example, [E, C]; -1e9 where an example has fewer inputs."""
  scores = batch.by_example(apply(batch.tokens, batch.starts))[..., 0]
  return jnp.where(batch.members >= 0, scores, layers.MASKED)


def by_example(outputs: list[Output]) -> np.ndarray:
  """The logits of each example of a file, [examples, ...], from those of its batches [E, ...]."""
  return np.concatenate([output.logits[:len(output.located.examples)] for output in outputs])


def by_input(outputs: list[Output], count: int) -> list[np.ndarray]:
  """The logits of each of `count` inputs, [tokens, ...], from those of batches [R, L, ...]."""
  of_input = [None] * count
  for located, logits in outputs:
    text_ids = located.batch.tokens.text_ids
    for row, slot in zip(*np.nonzero(located.index >= 0)):
      of_input[located.index[row, slot]] = logits[row][text_ids[row] == slot + 1]
  return of_input


def json_lines(answers: Iterable[Answer]) -> Files:
  """The file of predictions with an answer on each line."""
  yield 'predictions.jsonl', ''.join(
      json.dumps(answer, ensure_ascii=False) + '\n' for answer in answers)


@dataclasses.dataclass(frozen=True)
class FineTuning(abc.ABC):
  """A fine-tuning task: each one is a subclass, and an instance is the device half of a run.

  The model is called with [R, L] inputs and the [R, P] positions of [CLS].
  """

  model: nn.Module
  labels: tuple[str, ...] = ()  # names of the head's outputs

  name: ClassVar[str]  # in config.task and predict --task
  # The fields of its config that differ from those of every fine-tuning run, by full name: a new
  # Field, another default, or None, which leaves the field out.
  config_fields: ClassVar[Mapping[str, Any]] = {}
  model_task: ClassVar[str] = ''  # the task whose models these are; '' = its own
  parts: ClassVar[tuple[str, ...]] = ()  # groups of parameters beside the encoder's
  starts_from: ClassVar[tuple[str, ...]] = ()  # heads that the model to start from must have
  best_score: ClassVar[str]  # default of keep_best
  auto_score: ClassVar[str] = ''  # the score that keep_best='auto' stands for; '' = best_score
  score_names: ClassVar[tuple[str, ...]]  # the scores that every file has
  lower_is_better: ClassVar[tuple[str, ...]] = ('loss',)  # the highest of the others is the best
  has_held_out_loss: ClassVar[bool] = True  # False = the examples of data.eval are of another kind
  # (config, number of labels) -> the model that is loaded for predictions
  head: ClassVar[Callable[[bert_config.BertConfig, int], nn.Module]]
  fields: ClassVar[tuple[str, ...]] = ()  # texts of the JSON lines that predict answers; () = none
  optional: ClassVar[tuple[str, ...]] = ()  # optional fields of these JSON lines
  transformers: ClassVar[str] = ''  # suffix of the class in transformers: ForTokenClassification
  problem: ClassVar[str] = ''  # the kind of labels, for sequence classification alone
  null_threshold: ClassVar[float | None] = None  # None = every question has an answer
  loss_weights: ClassVar[dict[str, float]] = {'loss': 1.0}
  frozen: ClassVar[dict[str, Any]] = {}

  # ---- the task ---------------------------------------------------------------------------------

  @staticmethod
  def check(config: ConfigDict):
    """Raises UserError for a value of the config that the task cannot have."""
    del config

  @staticmethod
  def check_training(config: ConfigDict, examples: list[Any]):
    """Raises UserError for training examples that teach the model nothing."""
    del config, examples

  @staticmethod
  @abc.abstractmethod
  def read(path: str, data: ConfigDict, split: str, notes: list[str]) -> Iterable[Any]:
    """The examples of a file, by the config group `data`.

    `split` is train, validation or test; examples of 'test' need no labels. The method adds lines
    for the summary of the run to `notes`.
    """

  @classmethod
  @abc.abstractmethod
  def make(cls, config: ConfigDict, examples: list[Any], notes: list[str]) -> 'FineTuning':
    """The task of a run for its training examples, or of an evaluation for those of its file."""

  def with_facts(self, facts: Mapping[str, Any], notes: list[str]) -> 'FineTuning':
    """The task of an evaluation, with what the model keeps of its training data."""
    del facts, notes
    return self

  @property
  def facts(self) -> dict[str, Any]:
    """Facts about the training data that scores of other files need; a workdir keeps them."""
    return {'null_threshold': self.null_threshold}

  @staticmethod
  def answer(bert: Bert, examples: Sequence[Answer], options: Any) -> list[Answer]:
    """An answer to each example of JSON lines; `options` are those of predict."""
    raise NotImplementedError

  @staticmethod
  def write_test(bert: Bert, data: ConfigDict, examples: list[Any]) -> Files:
    """The files of predictions for the examples of data.test."""
    raise NotImplementedError

  @classmethod
  def create(cls, config: ConfigDict, tokenizer: Tokenizer, mesh: Mesh) -> 'FineTuningData':
    """Reads the examples of a run, makes its task and plans its batches."""
    data, notes = config.data, []
    for field, path in (('train', data.train), *(('eval', x) for x in data.eval.split(','))):
      storage.check(f'data.{field}', path)

    def plan(name, path, examples, is_train, **options):
      features = task.features(examples, tokenizer, config, path=path, is_train=is_train)
      return Split(name, examples, Batches(
          features, batch_size=config.batch_size, pad_id=tokenizer.pad_id,
          row_multiple=sharding.batch_divisor(mesh) * data.get('cached_parts', 1), **options))

    examples = not_empty(cls.read(data.train, data, 'train', notes), data.train)
    cls.check_training(config, examples)
    task = cls.make(config, examples, notes)
    train = plan('', data.train, examples, True, seed=config.seed,
                 microbatches=config.optimizer.accumulation)
    evals, eval_data = [], replaced_fields.replace(data, data.eval_fields, 'data.eval_fields')
    for name, path in _eval_files(data):
      examples = not_empty(cls.read(path, eval_data, 'validation', notes), path)
      evals.append(plan(name, path, examples, False))
    return FineTuningData(task, train, tuple(evals), mesh_lib.feed(mesh), notes, data.eval)

  @classmethod
  def test_examples(cls, data: ConfigDict) -> list[Any]:
    """The examples of data.test; raises UserError for a mistake in the file, or an empty one."""
    return not_empty(cls.read(data.test, data, 'test', []), data.test)

  @classmethod
  def abstract_params(cls, config: bert_config.BertConfig, num_labels: int) -> Any:
    """The tree of ShapeDtypeStructs of a model with this head."""
    return nn.unbox(jax.eval_shape(cls(cls.head(config, num_labels)).init, jax.random.key(0)))

  @classmethod
  def head_of(cls, bert: Bert) -> nn.Module:
    """The head of a trained model; raises UserError if the model is for another task."""
    if bert.model.task != cls.name:
      raise UserError('this model is for '
                      f'{bert.model.task or "no task: it has not been fine-tuned"}, not for '
                      f'{cls.name}')
    check_labels(bert.model.labels, bert.model.facts.get('source', 'this model'))
    return cls.head(bert.config, len(bert.model.labels))

  # ---- the device half --------------------------------------------------------------------------

  def with_config(self, config: bert_config.BertConfig) -> 'FineTuning':
    """This task with a model of other sizes."""
    return dataclasses.replace(self, model=self.model.clone(config=config))

  def init(self, key: jax.Array) -> Any:
    tokens = encoder.init_tokens()
    return self.model.init(key, tokens, tokens.ids[:, :1])

  def logits(self, apply: Callable[..., jax.Array], batch: Batch) -> jax.Array:
    """The head's outputs; `apply` runs the model, with dropout or without."""
    return apply(batch.tokens, batch.starts)

  @abc.abstractmethod
  def metrics(self, logits: jax.Array, batch: Batch) -> losses.Metrics:
    """'loss' and other metrics of a batch."""

  def reduced(self, logits: jax.Array) -> jax.Array:
    """The part of the logits that the scores need: an evaluation fetches no more."""
    return logits

  def _applied(self, params: Any, row: jax.Array, key: jax.Array | None) -> Callable:
    """The model as a function of its inputs; `row` [R] holds the numbers of their rows."""
    rngs = {}
    if key is not None:
      rngs['dropout'] = dropout_bits.microbatch_key(key, row)
    return functools.partial(self.model.apply, params, deterministic=key is None, rngs=rngs)

  def _forward(self, params: Any, batch: Batch, key: jax.Array | None) -> jax.Array:
    return self.logits(self._applied(params, batch.row, key), batch)

  def loss(self, params: Any, frozen: Any, batch: Batch, key: jax.Array | None) -> losses.Metrics:
    del frozen
    return {**self.metrics(self._forward(params, batch, key), batch),
            'tokens': losses.token_count(batch.tokens.text_ids)}

  def measure(self, params: Any, frozen: Any, batch: Batch) -> tuple[losses.Metrics, jax.Array]:
    """(metrics, reduced logits), without dropout."""
    del frozen
    logits = self._forward(params, batch, None)
    return self.metrics(logits, batch), self.reduced(logits)

  def flops_per_token(self, length: int) -> float:
    """Model FLOPs of the encoder."""
    return self.model.config.flops_per_token(length, 0)

  # ---- examples ---------------------------------------------------------------------------------

  @abc.abstractmethod
  def features(self, examples: Sequence[Any], tokenizer: Tokenizer, config: ConfigDict, *,
               path: str, is_train: bool) -> Features:
    """The inputs and targets of the examples of the file `path`."""

  @abc.abstractmethod
  def scores(self, split: Split, outputs: list[Output]) -> dict[str, float]:
    """The scores of a file, from the outputs of its batches."""


def scores_of(task: FineTuning, split: Split,
              measure: Callable[[Batch], tuple[losses.Metrics, jax.Array]]) -> dict[str, float]:
  """The mean loss, if the task has one, and the scores of a file.

  `measure` is that of the task, for a whole batch.
  """
  sums, outputs = np.zeros(2), []
  for located in split.batches.in_order():
    metrics, logits = jax.device_get(measure(located.batch))
    sums += metrics['loss']
    outputs.append(Output(located, logits))
  loss = losses.means({'loss': sums}) if task.has_held_out_loss else {}
  return {**loss, **task.scores(split, outputs)}


@dataclasses.dataclass(frozen=True)
class FineTuningData:
  """The host half: the examples of a run."""

  task: FineTuning
  train: Split
  evals: tuple[Split, ...]  # the files that are evaluated; () = no evaluation
  feed: mesh_lib.Feed  # the part of a batch that this process feeds
  notes: Sequence[str]  # lines for the summary of the run
  files: str  # data.eval

  def _share(self, batch: Batch) -> Batch:
    return jax.tree.map(lambda x: x[self.feed.rows(len(x))], batch)

  def rows(self, step: int) -> Batch:
    return self._share(self.train.batches.batch(step))

  @property
  def has_held_out(self) -> bool:
    return bool(self.evals)

  @property
  def lower_is_better(self) -> tuple[str, ...]:
    return self.task.lower_is_better

  def evaluate(self, evaluate_batch: Callable[[Batch], Any],
               step: int) -> dict[str, float | None]:
    """The mean loss and the scores of every file."""
    del step
    results = {}
    for split in self.evals:
      suffix = f'_{split.name}' if split.name else ''
      scores = scores_of(self.task, split, lambda batch: evaluate_batch(self._share(batch)))
      results |= {name + suffix: value for name, value in scores.items()}
    return results

  def judged_on(self, step: int) -> str:
    del step
    return self.files

  def flops(self, step: int, tokens: float) -> float:
    del step
    return self.task.flops_per_token(self.train.batches.length) * tokens

  def describe(self) -> Iterator[tuple[str, str]]:
    batches, labels = self.train.batches, self.task.labels
    sizes = [f'{len(self.train.examples):,} to train on']
    sizes += [f'{len(split.examples):,} to evaluate{" " * bool(split.name)}{split.name}'
              for split in self.evals]
    yield 'examples', ', '.join(sizes)
    more = len(labels) - _LABELS_SHOWN
    if labels:
      yield 'labels', ', '.join(labels[:_LABELS_SHOWN]) + (f' and {more} more' if more > 0 else '')
    yield f'rows of {batches.length}', (
        f'{" or ".join(map(str, batches.rows))} for {batches.most_examples} examples, '
        f'{batches.fill():.1%} real tokens')
    for note in self.notes:
      yield 'note', note
