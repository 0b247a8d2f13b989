"""A model with all that is needed to use it, to train it further or to hand it on."""

import dataclasses
from typing import Any

from bert_jax.data.tokenizer import Tokenizer
from bert_jax.errors import UserError
from bert_jax.interop import layout
from bert_jax.model.bert_config import BertConfig

# The tasks with a head of their own, and what they have besides the encoder.
HEAD_GROUPS = {'sequence_classification': ('pooler', 'classifier'),
               'token_classification': ('classifier',),
               'question_answering': ('qa_outputs',),
               'multiple_choice': ('pooler', 'classifier')}
HEAD_TASKS = tuple(HEAD_GROUPS)
SPAN_LABELS = ('start', 'end')  # what a question's head tells of each token


def head_groups(config: BertConfig, task: str) -> set[str]:
  """What a model for a task has besides the encoder; sentence_embedding has nothing."""
  return {*HEAD_GROUPS.get(task, ()), *(('pooler',) if config.pooler_is_shared else ())}


@dataclasses.dataclass(frozen=True)
class Pretrained:
  """Config, parameters and tokeniser of one model, wherever it came from.

  Attributes:
    params: the variables of the Linen modules, {'params': {'bert': ..., heads}}, arrays float32.
    task: what its classifier is for, one of HEAD_TASKS; '' = it has none.
    labels: the names of the classifier's outputs.
    problem: of sequence classification: single_label, multi_label, regression.
    facts: what is known of its training: 'source', 'steps', 'scores', 'command'; of fine-tuning
      'max_len' and 'long' (how its texts were cut), 'doc_stride', 'max_answer_len'.
  """

  config: BertConfig
  params: Any
  tokenizer: Tokenizer
  task: str = ''
  labels: tuple[str, ...] = ()
  problem: str = ''
  facts: dict[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def groups(self) -> tuple[str, ...]:
    """What it has besides the encoder: pooler, mlm, nsp, classifier, qa_outputs."""
    return layout.groups(self.params)


def check_vocabulary(config: BertConfig, tokenizer: Tokenizer, directory: Any):
  """Raises UserError if the tokeniser in `directory` has not the model's number of entries."""
  if tokenizer.vocab_size != config.vocab_size:
    raise UserError(f'the vocabulary in {directory} has {tokenizer.vocab_size} entries, the model '
                    f'{config.vocab_size}: it belongs to another model')
