"""Reasons why fields of labeled data have no effect; '' = the field has an effect."""

from ml_collections import ConfigDict

from bert_jax.labelled import glue


def not_evaluated(config: ConfigDict) -> str:
  """Fields about evaluations have no effect in a run without evaluations."""
  return '' if config.data.eval else 'nothing is evaluated: give data.eval'


def named_by_format(config: ConfigDict) -> str:
  """Names of columns and labels have no effect on the files of a benchmark."""
  name = config.data.format
  is_benchmark = name.startswith('glue') or name in ('swag', 'commonsenseqa')
  return (f'data.format={name} names the columns and the labels: leave this field out'
          if is_benchmark else '')


def regression(config: ConfigDict) -> str:
  """Names of labels have no effect on a regression."""
  return 'data.problem=regression has no labels: leave it out' if (
      config.data.problem == 'regression') else ''


def pairs(config: ConfigDict) -> str:
  """The way to read a long text has no effect on pairs: their longer text is cut."""
  data = config.data
  is_pair = data.text_pair_column or (
      data.format.startswith('glue') and glue.find(data.format).text_pair)
  return ('the longer text of a pair is cut: this field is for single texts'
          if is_pair else '')
