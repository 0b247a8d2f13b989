"""A fine-tuning task as users name it: its models, and what a trained one answers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import functools
import json
from typing import Any, ClassVar, Protocol

from flax import linen as nn
import jax
from ml_collections import ConfigDict
import numpy as np

from bert_jax.data.inputs import Input
from bert_jax.data.tokenizers.base import Tokenizer
from bert_jax.data.tokens import Tokens
from bert_jax.errors import require
from bert_jax.model import encoder
from bert_jax.model.bert_config import BertConfig
from bert_jax.tasks.finetuning_data import ExampleFiles

Answer = dict[str, Any]  # one JSON object
PredictionFiles = Iterator[tuple[str, str]]  # (name, content) of each


class TrainedModel(Protocol):
  """What answers need of a loaded model; `inference.loaded_model.LoadedModel` is one."""

  model: Any  # an `interop.pretrained.Pretrained`: its task, labels, problem and facts are used
  config: BertConfig
  params: Any
  tokenizer: Tokenizer
  trained_length: int  # tokens of the longest input that it was fine-tuned on
  cross: Any  # an `interop.cross_layout.CrossLayout`: how it reads and scores pairs
  sparse: Any  # an `interop.sparse_layout.SparseLayout`: how it reads texts, and weighs entries

  def require_head(self, group: str, title: str):
    """Raises UserError if the model lacks the parameters `group`, which users know as `title`."""

  def per_text(self, rows: Sequence[Input], function: Callable) -> np.ndarray | None:
    """Outputs of `function` [R, P, ...] for each input, [inputs, ...]; None without inputs."""

  def per_token(self, rows: Sequence[Input], function: Callable) -> list[np.ndarray]:
    """Outputs of `function` [R, L, ...] for each input, special tokens included: [tokens, ...]."""


@functools.partial(jax.jit, static_argnames=('head', 'method'))
def apply_head(head: nn.Module, params: Any, tokens: Tokens, starts: jax.Array,
               method: str | None = None) -> jax.Array:
  """Runs a head without dropout, compiled once for each head and shape."""
  return head.apply(params, tokens, starts, method=method)


def check_labels(labels: Sequence[str], source: str):
  """Raises UserError if two outputs of a head have one name: answers go by the names."""
  for i, label in enumerate(labels):
    require(
        label not in labels[:i],
        f'{source}: the outputs {labels.index(label)} and {i} of its head are both named '
        f'{label!r}: give each a name of its own (id2label in config.json)')


def json_lines(answers: Iterable[Answer]) -> PredictionFiles:
  """The file of predictions with an answer on each line."""
  yield 'predictions.jsonl', ''.join(
      json.dumps(answer, ensure_ascii=False) + '\n' for answer in answers)


class TaskKind:
  """A fine-tuning task: each one is a subclass, of which there are no instances.

  It names the task's two halves: `files` makes the host half, which makes the device half.
  """

  name: ClassVar[str]  # in config.task and predict --task
  files: ClassVar[type[ExampleFiles]]  # its config fields, files and scores

  # Its models.
  model_task: ClassVar[str] = ''  # the task whose models these are; '' = its own
  parameter_groups: ClassVar[tuple[str,
                                   ...]] = ()  # of the head, next to those of the encoder
  starts_from: ClassVar[tuple[str,
                              ...]] = ()  # heads that the model to start from must have
  labels: ClassVar[tuple[str,
                         ...]] = ()  # names of the head's outputs; () = as its model says
  # (config, number of labels) -> the model that is loaded for predictions
  head: ClassVar[Callable[[BertConfig, int], nn.Module]]
  transformers: ClassVar[
      str] = ''  # suffix of the class in transformers: ForTokenClassification

  # Its answers.
  fields: ClassVar[tuple[str, ...]] = (
  )  # texts of the JSON lines that predict answers; () = none
  optional: ClassVar[tuple[str, ...]] = ()  # optional fields of these JSON lines

  @classmethod
  def abstract_params(cls, config: BertConfig, num_labels: int) -> Any:
    """The tree of ShapeDtypeStructs of a model with this head."""
    tokens, key = encoder.init_tokens(), jax.random.key(0)
    init = cls.head(config, num_labels).init
    return nn.unbox(jax.eval_shape(init, key, tokens, tokens.ids[:, :1]))

  @classmethod
  def head_of(cls, bert: TrainedModel) -> nn.Module:
    """The head of a trained model; raises UserError if the model is for another task."""
    task, labels = bert.model.task, bert.model.labels
    require(
        task == cls.name,
        f'this model is for {task or "no task: it has not been fine-tuned"}, '
        f'not for {cls.name}')
    check_labels(labels, bert.model.facts.get('source', 'this model'))
    return cls.head(bert.config, len(labels))

  @staticmethod
  def answer(bert: TrainedModel, examples: Sequence[Answer],
             options: Any) -> list[Answer]:
    """An answer to each example of JSON lines; `options` are those of predict."""

  @staticmethod
  def write_test(bert: TrainedModel, data: ConfigDict,
                 examples: list[Any]) -> PredictionFiles:
    """The files of predictions for the examples of data.test."""
