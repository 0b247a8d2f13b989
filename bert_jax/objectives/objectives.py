"""The objectives by name, and the rows and architectures that each one supports."""

from collections.abc import Callable
import functools
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
  # The values of `data.sequences` that it trains on.
  sequences: tuple[str, ...] = ('next_sentence', 'sentence_order', 'full_sentences')
  members: tuple[str, ...] = ()  # architectures that it trains; () = all but electra

  def trains(self, architecture: str) -> bool:
    return architecture in self.members if self.members else architecture != 'electra'


# The order matters: the default for a value of `data.sequences` is the first match.
ALL = {
    'mlm_nsp': Entry(functools.partial(MaskedLM, pair_objective='nsp'),
                     ('next_sentence',)),
    'mlm_sop': Entry(functools.partial(MaskedLM, pair_objective='sop'),
                     ('sentence_order',)),
    'mlm': Entry(functools.partial(MaskedLM, pair_objective=None)),
    'replaced_tokens': Entry(ReplacedTokens, members=('electra',)),
    'replaced_tokens_gdes': Entry(DisentangledSharing, members=('electra', 'deberta-v2')),
    'distillation': Entry(Distillation),
}


def name_of(objective: str, sequences: str, architecture: str) -> str:
  """Returns the objective of a run.

  Args:
    objective: the name in the config; '' = replaced_tokens for ELECTRA, otherwise the
      default for `sequences`.
    sequences: the kind of rows, the value of `data.sequences`.
    architecture: the architecture of the model.

  Raises:
    UserError: the objective is unknown, or does not fit the rows or the architecture.
  """
  if not objective and architecture == 'electra':
    return 'replaced_tokens'
  if not objective:
    return next(name for name, entry in ALL.items() if sequences in entry.sequences)
  require_choice('objective', objective, ALL)
  accepted = ALL[objective].sequences
  require(sequences in accepted,
          f'objective={objective} does not train on data.sequences={sequences}: it needs '
          f'data.sequences={" or ".join(accepted)}')
  # The remedy names only objectives that also accept these rows.
  fitting = [name for name, entry in ALL.items()
             if sequences in entry.sequences and entry.trains(architecture)]
  require(objective in fitting,
          f'objective={objective} is not for model.architecture={architecture}: '
          f'use {" or ".join(fitting)}')
  return objective


def create(objective: str, sequences: str, config: BertConfig,
           teacher: BertConfig | None = None) -> Objective:
  """Creates the objective that `name_of` returns; only distillation takes a `teacher`."""
  name = name_of(objective, sequences, config.architecture)
  configs = (config, teacher) if teacher else (config,)
  return ALL[name].create(*map(BertForPreTraining, configs))
