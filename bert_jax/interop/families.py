"""The list of model families, and the families that differ from BERT only in names.

A family with other tensors than BERT has its own file.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from bert_jax.errors import require
from bert_jax.interop import rules
from bert_jax.interop.deberta_names import DEBERTA
from bert_jax.interop.family import FIELDS, PUBLISHED, Family, ends
from bert_jax.interop.modern_names import MODERN
from bert_jax.model import mpnet
from bert_jax.model.bert_config import BertConfig

BERT = Family(
    'bert', 'Bert',
    {'ForPreTraining': ('pooler', 'mlm', 'nsp'), 'ForMaskedLM': ('mlm',),
     'ForNextSentencePrediction': ('pooler', 'nsp')})


def _unused(config: Mapping[str, Any]) -> int:
  """Returns the number of unused rows at the start of RoBERTa's position table.

  fairseq gives the first token of a text the position padding id + 1 (Liu et al. 2019,
  https://arxiv.org/abs/1907.11692).
  """
  padding = config.get('pad_token_id', 1)
  require(isinstance(padding, int) and not isinstance(padding, bool) and padding >= 0,
          f'config.json has pad_token_id={padding!r}: RoBERTa needs a whole number, at '
          'least 0')
  return padding + 1


def _unused_mpnet(config: Mapping[str, Any]) -> int:
  padding = config.get('pad_token_id', 1)
  require(padding == 1,
          f"pad_token_id={padding!r}: transformers' MPNet counts positions from id 1 on, "
          'so the padding needs this id (data.tokenizer=bpe assigns it)')
  return 2


def _defaults(**values: Any) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
  """Returns a function that adds transformers' defaults for fields that are missing.

  Only defaults that differ from ours are needed.
  """
  return lambda config: {**values, **config}


# BERT's pooler and classifier under other names. Here the pooler is a part of the head.
_WHOLE_CLASSIFIER = (('pooler.dense.', 'classifier.dense.'),
                     ('classifier.', 'classifier.out_proj.'))

ROBERTA = Family(
    'roberta', 'Roberta', {'ForMaskedLM': ('mlm',)},
    names=(('cls.predictions.transform.LayerNorm.', 'lm_head.layer_norm.'),
           ('cls.predictions.transform.dense.', 'lm_head.dense.'),
           ('cls.predictions.', 'lm_head.')),
    of_class={'RobertaForSequenceClassification': _WHOLE_CLASSIFIER},
    unused_positions=_unused, settings=ends)

XLM_ROBERTA, CAMEMBERT = (
    dataclasses.replace(ROBERTA, name=name, title=title, prefix='roberta',
                        of_class={f'{title}ForSequenceClassification': _WHOLE_CLASSIFIER})
    for name, title in (('xlm-roberta', 'XLMRoberta'), ('camembert', 'Camembert')))


def _mpnet_rules(config: BertConfig) -> rules.Rules:
  by_group = rules.bert(config)
  # One table of relative positions for all layers.
  table = rules.copy('bert/relative_bias', 'encoder.relative_attention_bias.weight')
  return by_group | {'encoder': [*by_group['encoder'], table]}


MPNET = dataclasses.replace(
    ROBERTA, name='mpnet', title='MPNet',
    in_layer=(('attention.self.query.', 'attention.attn.q.'),
              ('attention.self.key.', 'attention.attn.k.'),
              ('attention.self.value.', 'attention.attn.v.'),
              ('attention.output.dense.', 'attention.attn.o.'),
              ('attention.output.LayerNorm.', 'attention.LayerNorm.')),
    of_class={'MPNetForSequenceClassification': _WHOLE_CLASSIFIER},
    fields={name: ours for name, ours in FIELDS.items() if name != 'type_vocab_size'},
    published={'relative_attention_num_buckets': mpnet.BUCKETS,
               'tie_word_embeddings': True},
    unused_positions=_unused_mpnet, tensors=_mpnet_rules,
    read=_defaults(layer_norm_eps=1e-12))

ALBERT = Family(
    'albert', 'Albert',
    {'ForPreTraining': ('pooler', 'mlm', 'nsp'), 'ForMaskedLM': ('mlm',)},
    layer='encoder.albert_layer_groups.{}.albert_layers.0.',
    in_layer=(('attention.output.dense.', 'attention.dense.'),
              ('attention.output.LayerNorm.', 'attention.LayerNorm.'),
              ('attention.self.', 'attention.'),
              ('intermediate.dense.', 'ffn.'),
              ('output.dense.', 'ffn_output.'),
              ('output.LayerNorm.', 'full_layer_layer_norm.')),
    names=(('embeddings.projection.', 'encoder.embedding_hidden_mapping_in.'),
           ('pooler.dense.', 'pooler.'),
           ('cls.seq_relationship.', 'sop_classifier.classifier.'),
           ('cls.predictions.transform.dense.', 'predictions.dense.'),
           ('cls.predictions.transform.LayerNorm.', 'predictions.LayerNorm.'),
           ('cls.predictions.', 'predictions.')),
    fields=FIELDS | {'embedding_size': 'embedding_size', 'num_hidden_groups': 'groups'},
    published=PUBLISHED | {'inner_group_num': 1}, settings=ends,
    read=_defaults(hidden_act='gelu_new', hidden_dropout_prob=0.0,
                   attention_probs_dropout_prob=0.0))

ELECTRA = Family(
    'electra', 'Electra', {'ForPreTraining': ('rtd',), 'ForMaskedLM': ('mlm',)},
    names=(('embeddings.projection.', 'embeddings_project.'),
           ('cls.predictions.transform.', 'generator_predictions.'),
           ('cls.predictions.bias', 'generator_lm_head.bias'),
           ('cls.predictions.decoder.', 'generator_lm_head.')),
    of_class={'ElectraForSequenceClassification': _WHOLE_CLASSIFIER,
              'ElectraForMultipleChoice': (
                  ('pooler.dense.', 'sequence_summary.summary.'),)},
    fields=FIELDS | {'embedding_size': 'embedding_size',
                     'generator_size': 'generator_size'},
    published=PUBLISHED | {'summary_type': 'first', 'summary_use_proj': True,
                           'summary_activation': 'gelu'},
    read=_defaults(embedding_size=128))

DISTILBERT = Family(
    'distilbert', 'DistilBert', {'ForMaskedLM': ('mlm',)},
    layer='transformer.layer.{}.',
    in_layer=(('attention.self.query.', 'attention.q_lin.'),
              ('attention.self.key.', 'attention.k_lin.'),
              ('attention.self.value.', 'attention.v_lin.'),
              ('attention.output.dense.', 'attention.out_lin.'),
              ('attention.output.LayerNorm.', 'sa_layer_norm.'),
              ('intermediate.dense.', 'ffn.lin1.'),
              ('output.dense.', 'ffn.lin2.'),
              ('output.LayerNorm.', 'output_layer_norm.')),
    names=(('pooler.dense.', 'pre_classifier.'),
           ('cls.predictions.transform.dense.', 'vocab_transform.'),
           ('cls.predictions.transform.LayerNorm.', 'vocab_layer_norm.'),
           ('cls.predictions.bias', 'vocab_projector.bias'),
           ('cls.predictions.decoder.', 'vocab_projector.')),
    fields={'vocab_size': 'vocab_size',
            'dim': 'hidden_size',
            'n_layers': 'num_layers',
            'n_heads': 'num_heads',
            'hidden_dim': 'intermediate_size',
            'max_position_embeddings': 'max_positions',
            'dropout': 'dropout',
            'attention_dropout': 'attention_dropout',
            'initializer_range': 'initializer_range',
            'activation': 'activation'},
    published={'tie_word_embeddings': True})

ALL = {family.name: family for family in (
    BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, MPNET, ALBERT, ELECTRA, DISTILBERT, DEBERTA,
    MODERN)}
