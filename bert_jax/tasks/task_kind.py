"""The interface of a fine-tuning task: its name, its models and their answers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from bert_jax.model import bert_config, encoder
from bert_jax.tasks.finetuning_data import ExampleFiles

Answer = dict[str, Any]  # one JSON object
PredictionFiles = Iterator[tuple[str, str]]  # (name, content) of each


class TrainedModel(Protocol):
  """The part of an `inference.loaded_model.LoadedModel` that answers need."""

  model: Any  # an `interop.pretrained.Pretrained`: its task, labels, problem and facts
  config: bert_config.BertConfig
  params: Any
  tokenizer: Tokenizer
  cross: Any  # an `interop.cross_layout.CrossLayout`: how to read and score pairs
  late: Any  # an `interop.late_layout.LateLayout`: how to read queries and documents
  sparse: Any  # an `interop.sparse_layout.SparseLayout`: how to weigh entries

  @property
  def trained_length(self) -> int:
    """The tokens of the longest input in fine-tuning."""

  def require_head(self, group: str, title: str):
    """Raises UserError without the parameters `group`, which users know as `title`."""

  def per_text(self, rows: Sequence[Input], function: Callable) -> Any:
    """Runs `function` on packed inputs; reorders [R, P, ...] to [inputs, ...].

    Returns None without inputs.
    """

  def per_token(self, rows: Sequence[Input], function: Callable) -> list[np.ndarray]:
    """Runs `function` on rows and splits its results, [R, L, ...], by input.

    Returns [tokens, ...] for each input, special tokens included.
    """


@functools.partial(jax.jit, static_argnames=('head', 'method'))
def apply_head(head: nn.Module, params: Any, tokens: Tokens, starts: jax.Array,
               method: str | None = None) -> jax.Array:
  """Runs a head on [R, L] tokens and [R, P] starts, without dropout; jitted."""
  return head.apply(params, tokens, starts, method=method)


def check_labels(labels: Sequence[str], source: str):
  """Raises UserError if two outputs of a head share a name, the key of an answer."""
  for i, label in enumerate(labels):
    require(label not in labels[:i],
            f'{source}: the outputs {labels.index(label)} and {i} of its head are both named '
            f'{label!r}: give each its own name (id2label in config.json)')


def json_lines(answers: Iterable[Answer]) -> PredictionFiles:
  """Yields (name, content) of predictions.jsonl, with an answer on each line."""
  yield 'predictions.jsonl', ''.join(
      json.dumps(answer, ensure_ascii=False) + '\n' for answer in answers)


class TaskKind:
  """A fine-tuning task; each task is a subclass and is never instantiated.

  `files` is the class of its example files. `files.make` returns an instance of this
  class; the `task` of the instance is the device half.
  """

  name: ClassVar[str]  # in config.task and predict --task
  files: ClassVar[type[ExampleFiles]]  # its config fields, files and scores

  # Its models.
  model_task: ClassVar[str] = ''  # the task that its models store; '' = this task
  parameter_groups: ClassVar[tuple[str, ...]] = ()  # of the head
  starts_from: ClassVar[tuple[str, ...]] = ()  # heads that init_from must have
  # (config, number of labels) -> the model for predictions
  head: ClassVar[Callable[[bert_config.BertConfig, int], nn.Module]]
  # Names of the head's outputs in other runtimes. Several names split its last axis.
  outputs: ClassVar[tuple[str, ...]] = ('logits',)
  scores_tokens: ClassVar[bool] = False  # the head scores each token, not each text
  scores_choices: ClassVar[bool] = False  # inputs are [B, choices, L]
  # Suffix of the class in transformers: ForTokenClassification.
  transformers: ClassVar[str] = ''

  # Its answers.
  # Required texts in the JSON lines that predict reads; () = predict has no such task.
  fields: ClassVar[tuple[str, ...]] = ()
  optional: ClassVar[tuple[str, ...]] = ()  # optional fields of these JSON lines
  aliases: ClassVar[Mapping[str, str]] = {}  # {another name: a field}

  @classmethod
  def abstract_params(cls, config: bert_config.BertConfig, num_labels: int) -> Any:
    """Returns the tree of ShapeDtypeStructs of a model with this head."""
    tokens, key = encoder.init_tokens(), jax.random.key(0)
    return nn.unbox(jax.eval_shape(cls.head(config, num_labels).init, key, tokens,
                                   tokens.ids[:, :1]))

  @classmethod
  def head_of(cls, bert: TrainedModel) -> nn.Module:
    """Returns the head of a trained model; raises UserError for another task's model."""
    task, labels = bert.model.task, bert.model.labels
    require(task == cls.name,
            f'this model is for {task or "no task: it has not been fine-tuned"}, '
            f'not for {cls.name}')
    check_labels(labels, bert.model.facts.get('source', 'this model'))
    return cls.head(bert.config, len(labels))

  @staticmethod
  def answer(bert: TrainedModel, examples: Sequence[Answer],
             options: Any) -> list[Answer]:
    """Answers each JSON object; `options` are the options of `predict`."""

  @staticmethod
  def write_test(bert: TrainedModel, data: ConfigDict,
                 examples: list[Any]) -> PredictionFiles:
    """Yields (name, content) of the prediction files for the examples of data.test."""
