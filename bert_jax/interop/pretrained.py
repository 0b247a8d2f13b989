"""A model in memory: everything that is needed to use, fine-tune or export it."""

import dataclasses
from typing import Any

from bert_jax.data.tokenizers.base import Tokenizer
from bert_jax.errors import UserError
from bert_jax.interop import layout
from bert_jax.interop.text_layout import TextLayout
from bert_jax.model.bert_config import BertConfig
from bert_jax.runtime import console
from bert_jax.tasks import task_list

# The fields of the config group `data` that change the answers of a fine-tuned model.
FACTS_OF_DATA = ('long', 'doc_stride', 'n_best', 'max_answer_len')


def head_groups(config: BertConfig, task: str) -> set[str]:
  """Returns the groups of parameters of a model for a task, without the encoder.

  A shared pooler precedes every head. A task without a head has no group.
  """
  groups = task_list.ALL[task].parameter_groups if task in task_list.ALL else ()
  return {*groups, *(('pooler',) if groups and config.pooler_is_shared else ())}


@dataclasses.dataclass(frozen=True)
class Pretrained:
  """Config, parameters and tokenizer of a model in any format.

  Attributes:
    config: the sizes of the model.
    params: the variables of the Linen modules, {'params': {'bert': ..., heads}}, float32.
    tokenizer: its tokenizer, with one entry for each row of the token table.
    task: the task of the head, one of `task_list.WITH_HEAD`; '' = no head.
    labels: the names of the outputs of the classifier.
    problem: the kind of sequence classification: single_label, multi_label, regression.
    facts: facts about the training: 'source', 'data', 'steps', 'scores', 'command'. Facts
      about fine-tuning: 'task' (it differs from the field `task` for reranking, which
      uses the head of sequence_classification), 'max_len', 'null_threshold',
      'highest_grade', 'reads_pairs', and FACTS_OF_DATA.
    text_layout: how the model turns a text into a vector, weights or a score; None =
      unknown.
  """

  config: BertConfig
  params: Any
  tokenizer: Tokenizer
  task: str = ''
  labels: tuple[str, ...] = ()
  problem: str = ''
  facts: dict[str, Any] = dataclasses.field(default_factory=dict)
  text_layout: TextLayout | None = None

  @property
  def parts(self) -> str:
    """The names of all parts of the model, for messages."""
    return ', '.join(('encoder', *self.groups))

  @property
  def groups(self) -> tuple[str, ...]:
    """The groups of parameters besides the encoder: pooler, mlm, nsp, the task's head."""
    own = task_list.ALL[self.task].parameter_groups if self.task else ()
    return (*layout.groups(self.params),
            *(name for name in own if name not in layout.GROUPS))


def fitted(tokenizer: Tokenizer, config: BertConfig, directory: Any) -> Tokenizer:
  """Returns the tokenizer in `directory`, padded to the rows of the model's token table.

  Raises:
    UserError: the tokenizer has more entries than the table has rows.
  """
  rows, entries = config.vocab_size, tokenizer.entries
  if entries > rows:
    raise UserError(
        f'the vocabulary in {directory} has {entries:,} entries, the table of the model '
        f'{rows:,} rows: {tokenizer.vocab[rows]!r} is the first entry without one. Take '
        f'the vocabulary of this model, or save it again after its '
        f'resize_token_embeddings({entries}) in transformers')
  # Tables are often padded for speed. But the vocabulary may also be the wrong one.
  if entries < rows:
    console.note(f'the table of the model has {rows:,} rows, its vocabulary {entries:,} '
                 f'entries: no text uses the last {rows - entries:,} rows')
  return tokenizer.padded(rows)
