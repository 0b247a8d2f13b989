"""When a field of labelled data has no effect; each function returns the reason, or ''."""

from ml_collections import ConfigDict

from bert_jax.labelled import glue


def not_evaluated(config: ConfigDict) -> str:
  """What is said of evaluations has no effect in a run without them."""
  return '' if config.data.eval else 'nothing is evaluated: give data.eval'


def named_by_format(config: ConfigDict) -> str:
  """Names of columns and labels have no effect on a benchmark's files, which have their own."""
  name = config.data.format
  own = name.startswith('glue') or name in ('swag', 'commonsenseqa')
  return f'data.format={name} names the columns and the labels itself: leave it out' if own else ''


def regression(config: ConfigDict) -> str:
  """Labels have no effect on a regression, which has none."""
  return 'data.problem=regression has no labels: leave it out' if (
      config.data.problem == 'regression') else ''


def pairs(config: ConfigDict) -> str:
  """How a long text is read has no effect on pairs, whose longer text is cut."""
  data = config.data
  paired = data.text_pair_column or (
      data.format.startswith('glue') and glue.find(data.format).text_pair)
  return 'of a pair of texts the longer one is cut: it is for single texts' if paired else ''
