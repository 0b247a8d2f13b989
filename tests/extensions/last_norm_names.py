"""The names of the tensors of `last_norm`."""

import dataclasses

from bert_jax.interop import families, rules


def _tensors(config):
  by_group = rules.bert(config)
  return by_group | {'encoder': [*by_group['encoder'],
                                 *rules.norm('bert/last_norm', 'encoder.last_norm')]}


LAST_NORM = dataclasses.replace(
    families.BERT, name='last_norm', title='LastNorm', tensors=_tensors)
