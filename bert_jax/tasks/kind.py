"""The record that describes a fine-tuning task: each file of a task ends with one, its KIND."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import json
import re
from typing import Any

from etils import epath
from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bert_jax.data.tokenizer import Tokenizer
from bert_jax.errors import UserError
from bert_jax.labelled.packed_examples import Batches
from bert_jax.model import bert_config, encoder
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.parallel import sharding
from bert_jax.tasks.finetuning import FineTuning, FineTuningData, Split

Answer = dict[str, Any]  # one JSON object
Bert = Any  # an `inference.bert.Bert`, which stands above this room
Files = Iterator[tuple[str, str]]  # (name, content) of each


def json_lines(answers: Iterable[Answer]) -> Files:
  """The file of predictions with an answer on each line."""
  yield 'predictions.jsonl', ''.join(
      json.dumps(answer, ensure_ascii=False) + '\n' for answer in answers)


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


@dataclasses.dataclass(frozen=True)
class LinePrediction:
  """How `predict` answers JSON lines."""

  fields: tuple[str, ...]  # names of the texts that an example must have
  # (bert, examples, options) -> an answer to each example
  answer: Callable[[Bert, Sequence[dict[str, Any]], Any], list[Answer]]
  optional: tuple[str, ...] = ()  # names of further fields that are read


@dataclasses.dataclass(frozen=True)
class TaskKind:
  """Everything that a fine-tuning task is."""

  name: str  # in config.task and predict --task
  parts: tuple[str, ...]  # parameters beside the encoder's; () = the task trains the encoder alone
  best_score: str  # default of keep_best
  set_fields: Callable[[ConfigDict], None]  # adds the task's fields to the config, sets defaults
  # (path, group `data` of the config, split, notes) -> the examples of a file, without their labels
  # if split is 'test'; the others are 'train' and 'validation'. Notes go to the summary of the run.
  read: Callable[[str, ConfigDict, str, list[str]], Iterable[Any]]
  # (config, training examples, notes) -> the device half
  make: Callable[[ConfigDict, list[Any], list[str]], FineTuning]
  # raises UserError for values of the config that the task cannot have
  check: Callable[[ConfigDict], None] = lambda config: None
  # (config, number of labels) -> the model with the head that is loaded for predictions
  head: Callable[[bert_config.BertConfig, int], nn.Module] | None = None
  labels: tuple[str, ...] = ()  # names of the head's outputs that are the same for all data
  lines: LinePrediction | None = None  # prediction of JSON lines
  # (bert, group `data`, examples of data.test) -> the files of predictions
  write_test: Callable[[Bert, ConfigDict, list[Any]], Files] | None = None
  transformers: str = ''  # end of its class's name there: ForTokenClassification; '' = none

  def create(self, config: ConfigDict, tokenizer: Tokenizer, mesh: Mesh) -> FineTuningData:
    """Reads the examples of a run, makes its task and plans its batches."""
    data, notes = config.data, []

    def plan(name, path, examples, is_train, **options):
      features = task.features(examples, tokenizer, config, path=path, is_train=is_train)
      return Split(name, examples, Batches(
          features, batch_size=config.batch_size, pad_id=tokenizer.pad_id,
          row_multiple=sharding.batch_divisor(mesh), **options))

    examples = not_empty(self.read(data.train, data, 'train', notes), data.train)
    task = self.make(config, examples, notes)
    train = plan('', data.train, examples, True, seed=config.seed,
                 microbatches=config.optimizer.accumulation)
    evals = []
    for name, path in _eval_files(data):
      examples = not_empty(self.read(path, data, 'validation', notes), path)
      evals.append(plan(name, path, examples, False))
    return FineTuningData(task, train, tuple(evals), mesh_lib.feed(mesh), notes)

  def test_examples(self, data: ConfigDict) -> list[Any]:
    """The examples of data.test; raises UserError for a mistake in the file, or an empty one."""
    return not_empty(self.read(data.test, data, 'test', []), data.test)

  def abstract_params(self, config: bert_config.BertConfig, num_labels: int) -> Any:
    """The tree of ShapeDtypeStructs of a model with this head."""
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    return nn.unbox(jax.eval_shape(self.head(config, num_labels).init, jax.random.key(0),
                                   encoder.Batch(*[tokens] * 4), tokens))

  def head_of(self, bert: Bert) -> nn.Module:
    """The head of a trained model; raises UserError if the model is for another task."""
    bert.require_task(self.name)
    return self.head(bert.config, len(bert.model.labels))
