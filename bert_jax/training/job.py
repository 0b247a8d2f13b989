"""A run that is ready for the training loop."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from bert_jax.data.tokenizers.base import Tokenizer
from bert_jax.tasks.task import Task, TaskData


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """A task with its data, and facts about both.

  `start` and `base` are models (`Pretrained`). Their type is not named, because
  this subpackage must not import `interop`. The loop does not read them.
  """

  task: Task
  data: TaskData
  train_steps: int
  tokenizer: Tokenizer
  start: Any  # the model that fresh parameters come from
  base: Any = None  # the frozen model of a LoRA run
  adapter: str = ''  # a line about the LoRA factors, for the summary
  records: str  # digest of the data
  parameters: int  # their number: of the encoder, in pretraining with its heads
  steps: str  # a line about the steps, for the summary
  lengths: Sequence[int]  # L of the rows
  fields: Mapping[str, Any]  # config fields that the data determines
  notes: Sequence[str] = ()  # for the summary
  extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # added to run.json
