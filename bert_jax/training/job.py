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
  start: Any  # the model whose parameters replace random parameters; or None
  base: Any = None  # the frozen model of a LoRA run
  lora_line: str = ''  # a line about the LoRA factors, for the summary
  data_digest: str
  num_parameters: int  # of the encoder, in pretraining with its heads
  steps_line: str  # a line about the steps, for the summary
  lengths: Sequence[int]  # L of the rows
  fields: Mapping[str, Any]  # config fields that the data determines
  notes: Sequence[str] = ()  # for the summary
  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # added to run.json
