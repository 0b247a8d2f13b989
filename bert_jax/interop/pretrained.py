"""A model with all that is needed to use it, to train it further or to hand it on."""

import dataclasses
from typing import Any

from bert_jax.data.tokenizers.base import Tokenizer
from bert_jax.errors import UserError
from bert_jax.interop import layout
from bert_jax.interop.text_layout import TextLayout
from bert_jax.model.bert_config import BertConfig
from bert_jax.runtime import console
from bert_jax.tasks import task_list

# Facts on which the answers of a fine-tuned model depend: fields of its run's config group `data`.
FACTS_OF_DATA = ('long', 'doc_stride', 'n_best', 'max_answer_len')


def head_groups(config: BertConfig, task: str) -> set[str]:
  """The parameters of a model for a task beside those of the encoder.

  A shared pooler stands before every head; a task without one has none.
  """
  groups = task_list.ALL[task].parameter_groups if task in task_list.ALL else ()
  return {*groups, *(('pooler',) if groups and config.pooler_is_shared else ())}


@dataclasses.dataclass(frozen=True)
class Pretrained:
  """Config, parameters and tokenizer of one model, wherever it came from.

  Attributes:
    params: the variables of the Linen modules, {'params': {'bert': ..., heads}}, arrays float32.
    task: of its head, one of `task_list.WITH_HEAD`; '' = it has none.
    labels: the names of the classifier's outputs.
    problem: of sequence classification: single_label, multi_label, regression.
    facts: about its training: 'source', 'steps', 'scores', 'command'; about fine-tuning
      'task' (reranking, where that of the head is sequence_classification), 'max_len',
      'null_threshold', 'highest_grade', and FACTS_OF_DATA.
    sentence: what it makes of a text, a vector, weights or a score; None = it does not say.
  """

  config: BertConfig
  params: Any
  tokenizer: Tokenizer
  task: str = ''
  labels: tuple[str, ...] = ()
  problem: str = ''
  facts: dict[str, Any] = dataclasses.field(default_factory=dict)
  sentence: TextLayout | None = None

  @property
  def parts(self) -> str:
    """The encoder and the groups, for people."""
    return ', '.join(('encoder', *self.groups))

  @property
  def groups(self) -> tuple[str, ...]:
    """The parameters beside those of the encoder: pooler, mlm, nsp, those of the task's head."""
    own = task_list.ALL[self.task].parameter_groups if self.task else ()
    known = layout.groups(self.params)
    return (*known, *(name for name in own if name not in layout.GROUPS))


def fitted(tokenizer: Tokenizer, config: BertConfig, directory: Any) -> Tokenizer:
  """The tokenizer in `directory` for a model whose table may have more rows than it has entries.

  Raises:
    UserError: the tokenizer has entries without a row.
  """
  rows, entries = config.vocab_size, tokenizer.entries
  if entries > rows:
    raise UserError(
        f'the vocabulary in {directory} has {entries:,} entries, the table of the model {rows:,} '
        f'rows: {tokenizer.vocab[rows]!r} is the first entry without one. Take the vocabulary of '
        f'this model, or save it again after its resize_token_embeddings({entries}) in '
        'transformers')
  if entries < rows:
    console.note(f'the table of the model has {rows:,} rows, its vocabulary {entries:,} entries: '
                 f'no text uses the last {rows - entries:,} rows')
  return tokenizer.padded(rows)
