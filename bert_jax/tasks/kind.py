"""The record that describes a fine-tuning task: each file of a task ends with one, its KIND."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import json
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bert_jax.data.tokenizer import Tokenizer
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.encoder import Batch as Inputs
from bert_jax.tasks.finetuning_data import FineTuningData, not_empty

Answer = dict[str, Any]  # one JSON object
Bert = Any  # an `inference.bert.Bert`, which stands above this room


def json_lines(answers: Iterable[Answer]) -> str:
  """The content of a file with an answer on each line."""
  return ''.join(json.dumps(answer, ensure_ascii=False) + '\n' for answer in answers)


@dataclasses.dataclass(frozen=True)
class LinePrediction:
  """How `predict` answers JSON lines.

  Attributes:
    fields: names of the texts that an example must have.
    answer: (bert, examples, options) -> an answer to each example.
    optional: names of further fields that are read.
  """

  fields: tuple[str, ...]
  answer: Callable[[Bert, Sequence[dict[str, Any]], Any], list[Answer]]
  optional: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TaskKind:
  """Everything that a fine-tuning task is.

  Attributes:
    name: of the task in config.task and predict --task.
    parts: parameters beside those of the encoder; () = the task trains the encoder alone.
    best_score: default of keep_best.
    set_fields: adds the task's fields to the config, and changes defaults.
    create: (config, tokenizer, mesh) -> the examples and the device half.
    check: raises UserError for values of the config that the task cannot have.
    head: (config, number of labels) -> the model with the head that is loaded for predictions.
    labels: names of the head's outputs that are the same for all data.
    lines: prediction of JSON lines.
    read_test: (group `data` of the config) -> the examples of data.test, without their labels.
    write_test: (bert, group `data`, examples) -> (name, content) of each file of predictions.
    transformers: end of its class's name in transformers: ForTokenClassification; '' = none.
  """

  name: str
  parts: tuple[str, ...]
  best_score: str
  set_fields: Callable[[ConfigDict], None]
  create: Callable[[ConfigDict, Tokenizer, Mesh], FineTuningData]
  check: Callable[[ConfigDict], None] = lambda config: None
  head: Callable[[BertConfig, int], nn.Module] | None = None
  labels: tuple[str, ...] = ()
  lines: LinePrediction | None = None
  read_test: Callable[[ConfigDict], Iterable[Any]] | None = None
  write_test: Callable[[Bert, ConfigDict, list[Any]], Iterator[tuple[str, str]]] | None = None
  transformers: str = ''

  def abstract_params(self, config: BertConfig, num_labels: int) -> Any:
    """The tree of ShapeDtypeStructs of a model with this head."""
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    return nn.unbox(jax.eval_shape(self.head(config, num_labels).init, jax.random.key(0),
                                   Inputs(*[tokens] * 4), tokens))

  def test_examples(self, data: ConfigDict) -> list[Any]:
    """The examples of data.test; raises UserError for a mistake in the file, or an empty one."""
    return not_empty(self.read_test(data), data.test)

  def head_of(self, bert: Bert) -> nn.Module:
    """The head of a trained model; raises UserError if the model is for another task."""
    bert.require_task(self.name)
    return self.head(bert.config, len(bert.model.labels))
