"""The families of models that are read and written: what transformers calls their parts.

One encoder serves them all. A family says under which names its tensors stand, and what else its
folders have; the names of BERT are the canonical ones.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import re
from typing import Any

from bert_jax.data.tokenizer import Tokenizer
from bert_jax.errors import UserError
from bert_jax.model.config import BertConfig

# Of an architecture: what it must have besides the encoder, and the task of its classifier.
Architectures = Mapping[str, tuple[tuple[str, ...], str]]


@dataclasses.dataclass(frozen=True)
class Family:
  """A `model_type` of transformers.

  Attributes:
    name: the model_type; the encoder's tensors begin with it.
    title: how its classes begin.
    architectures: its classes.
    canonical: a tensor's name, without the encoder's prefix, to BERT's.
    original: the inverse, for a class; with the prefix.
    unused_positions: rows of the position table before that of the first token, by config.json.
    settings: fields of config.json that follow from the tokeniser.
  """

  name: str
  title: str
  architectures: Architectures
  canonical: Callable[[str], str]
  original: Callable[[str, str], str]
  unused_positions: Callable[[Mapping[str, Any]], int]
  settings: Callable[[Tokenizer], dict[str, Any]]


def _classifiers(title: str) -> dict[str, tuple[tuple[str, ...], str]]:
  return {
      f'{title}ForSequenceClassification': (('pooler', 'classifier'), 'sequence_classification'),
      f'{title}ForTokenClassification': (('classifier',), 'token_classification'),
      f'{title}ForQuestionAnswering': (('qa_outputs',), 'question_answering'),
      f'{title}ForMultipleChoice': (('pooler', 'classifier'), 'multiple_choice')}


# ---- BERT ---------------------------------------------------------------------------------------

_BERT_HEADS = ('cls.', 'classifier.', 'qa_outputs.')


def _bert_canonical(name: str) -> str:
  name = name.removeprefix('bert.')
  return re.sub(r'LayerNorm\.(gamma|beta)$',  # today's words for the LayerNorm's
                lambda m: 'LayerNorm.' + {'gamma': 'weight', 'beta': 'bias'}[m[1]], name)


def _bert_original(name: str, architecture: str) -> str:
  return name if name.startswith(_BERT_HEADS) or architecture == 'BertModel' else f'bert.{name}'


BERT = Family(
    'bert', 'Bert',
    {'BertModel': ((), ''), 'BertForPreTraining': (('pooler', 'mlm', 'nsp'), ''),
     'BertForMaskedLM': (('mlm',), ''), 'BertForNextSentencePrediction': (('pooler', 'nsp'), ''),
     **_classifiers('Bert')},
    _bert_canonical, _bert_original, lambda config: 0, lambda t: {'pad_token_id': t.pad_id})


# ---- RoBERTa ------------------------------------------------------------------------------------

_ROBERTA_HEADS = {'cls.predictions.transform.LayerNorm.': 'lm_head.layer_norm.',
                  'cls.predictions.transform.dense.': 'lm_head.dense.',
                  'cls.predictions.': 'lm_head.'}
# The same function, its first half in the head: tanh(dense(h)), then a product.
_ROBERTA_CLASSIFIER = {'pooler.dense.': 'classifier.dense.', 'classifier.': 'classifier.out_proj.'}


def _renamed(name: str, table: Mapping[str, str]) -> str:
  """The name with the first beginning of the table that fits replaced."""
  for start, other in table.items():
    if name.startswith(start):
      return other + name.removeprefix(start)
  return name


def _unused(config: Mapping[str, Any]) -> int:
  """fairseq numbers the tokens from the padding's id on (Liu et al. 2019, arXiv:1907.11692)."""
  padding = config.get('pad_token_id', 1)
  if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
    raise UserError(f'config.json has pad_token_id={padding!r}: a RoBERTa needs the number')
  return padding + 1


def _roberta_canonical(name: str) -> str:
  inverse = {theirs: ours for table in (_ROBERTA_HEADS, _ROBERTA_CLASSIFIER)
             for ours, theirs in table.items()}
  return _renamed(name.removeprefix('roberta.'), inverse)


def _roberta_original(name: str, architecture: str) -> str:
  if architecture == 'RobertaForSequenceClassification':
    name = _renamed(name, _ROBERTA_CLASSIFIER)
  name = _renamed(name, _ROBERTA_HEADS)
  head = name.startswith(('lm_head.', 'classifier.', 'qa_outputs.'))
  return name if head or architecture == 'RobertaModel' else f'roberta.{name}'


ROBERTA = Family(
    'roberta', 'Roberta',
    {'RobertaModel': ((), ''), 'RobertaForMaskedLM': (('mlm',), ''), **_classifiers('Roberta')},
    _roberta_canonical, _roberta_original, _unused,
    lambda t: {'pad_token_id': t.pad_id, 'bos_token_id': t.cls_id, 'eos_token_id': t.sep_id})


ALL = {family.name: family for family in (BERT, ROBERTA)}


def of(config: BertConfig, tokenizer: Tokenizer) -> Family:
  """The family as which a model is written."""
  return ROBERTA if tokenizer.kind == 'bpe' and config.type_vocab_size == 1 else BERT
