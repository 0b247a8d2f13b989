"""The objectives by their names, and which rows can serve them."""

from bert_jax.errors import UserError
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.heads import ElectraForPreTraining
from bert_jax.model.heads import for_pretraining
from bert_jax.objectives.distillation import Distillation
from bert_jax.objectives.mlm_nsp import MaskedLM
from bert_jax.objectives.objective import Objective
from bert_jax.objectives.replaced_tokens import ReplacedTokens

# Of an objective: the sequences that it can be asked of; () = all.
_SEQUENCES = {'mlm_nsp': ('next_sentence',), 'mlm_sop': ('sentence_order',), 'mlm': (),
              'replaced_tokens': (), 'distillation': ()}
_OF_SEQUENCES = {'next_sentence': 'mlm_nsp', 'sentence_order': 'mlm_sop', 'full_sentences': 'mlm'}
_PAIRS = {'mlm_nsp': 'nsp', 'mlm_sop': 'sop', 'mlm': None}


def name_of(objective: str, sequences: str, architecture: str) -> str:
  """The objective of a run.

  Args:
    objective: by name; '' = replaced_tokens for ELECTRA, else what the rows are made for.
    sequences: what rows are made of.
    architecture: of the model.

  Raises:
    UserError: it is unknown, or neither for these rows nor for this architecture.
  """
  if not objective:
    return 'replaced_tokens' if architecture == 'electra' else _OF_SEQUENCES[sequences]
  if objective not in _SEQUENCES:
    raise UserError(f'objective={objective!r} is unknown: use {", ".join(_SEQUENCES)}')
  served = _SEQUENCES[objective] or tuple(_OF_SEQUENCES)
  if sequences not in served:
    raise UserError(f'objective={objective} cannot be asked of data.sequences={sequences}: it '
                    f'needs data.sequences={" or ".join(served)}')
  if (objective == 'replaced_tokens') != (architecture == 'electra'):
    raise UserError(f'objective={objective} is not for model.architecture={architecture}: '
                    'replaced_tokens and electra go together (configs/electra_small.py)')
  return objective


def create(objective: str, sequences: str, config: BertConfig,
           teacher: BertConfig | None = None) -> Objective:
  """The objective of a run; arguments and errors as above, and the teacher of distillation."""
  name = name_of(objective, sequences, config.architecture)
  if name == 'replaced_tokens':
    config.generator()  # sizes that it cannot have are refused here
    return ReplacedTokens(ElectraForPreTraining(config))
  if name == 'distillation':
    return Distillation(for_pretraining(config), for_pretraining(teacher))
  return MaskedLM(for_pretraining(config), _PAIRS[name])
