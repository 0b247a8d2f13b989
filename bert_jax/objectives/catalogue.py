"""The list of objectives, and which rows and architectures they serve."""

from collections.abc import Callable
from typing import NamedTuple

from bert_jax.errors import require, require_choice
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.heads import BertForPreTraining
from bert_jax.objectives.disentangled_sharing import DisentangledSharing
from bert_jax.objectives.distillation import Distillation
from bert_jax.objectives.objective import MaskedLM, Objective
from bert_jax.objectives.replaced_tokens import ReplacedTokens


class Entry(NamedTuple):
  """An objective that a config can name."""

  create: Callable[..., Objective]  # (model), or (model, teacher) for distillation
  sequences: tuple[str, ...] = ('next_sentence', 'sentence_order', 'full_sentences')  # it serves
  members: tuple[str, ...] = ()  # architectures that it trains; () = all but electra

  def trains(self, architecture: str) -> bool:
    return architecture in self.members if self.members else architecture != 'electra'


# The first one that serves the sequences is their default.
ALL = {'mlm_nsp': Entry(lambda model: MaskedLM(model, 'nsp'), ('next_sentence',)),
       'mlm_sop': Entry(lambda model: MaskedLM(model, 'sop'), ('sentence_order',)),
       'mlm': Entry(lambda model: MaskedLM(model, None)),
       'replaced_tokens': Entry(ReplacedTokens, members=('electra',)),
       'replaced_tokens_gdes': Entry(DisentangledSharing, members=('electra', 'deberta-v2')),
       'distillation': Entry(Distillation)}


def name_of(objective: str, sequences: str, architecture: str) -> str:
  """Returns the objective of a run.

  Args:
    objective: by name; '' = replaced_tokens for ELECTRA, else the default of the sequences.
    sequences: the kind of rows, as in `data.sequences`.
    architecture: the model's.

  Raises:
    UserError: the objective is unknown, or does not fit the rows or the architecture.
  """
  if not objective and architecture == 'electra':
    return 'replaced_tokens'
  if not objective:
    return next(name for name, entry in ALL.items() if sequences in entry.sequences)
  require_choice('objective', objective, ALL)
  served = ALL[objective].sequences
  require(sequences in served,
          f'objective={objective} cannot be asked of data.sequences={sequences}: it needs '
          f'data.sequences={" or ".join(served)}')
  fitting = [name for name, entry in ALL.items()
             if sequences in entry.sequences and entry.trains(architecture)]
  require(objective in fitting, f'objective={objective} is not for model.architecture='
          f'{architecture}: use {" or ".join(fitting)}')
  return objective


def create(objective: str, sequences: str, config: BertConfig,
           teacher: BertConfig | None = None) -> Objective:
  """Creates the objective that `name_of` gives; `teacher` is for distillation."""
  name = name_of(objective, sequences, config.architecture)
  configs = (config, teacher) if teacher else (config,)
  return ALL[name].create(*map(BertForPreTraining, configs))
