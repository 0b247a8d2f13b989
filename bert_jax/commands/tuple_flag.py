"""The parser of overrides that are tuples: --config.data.labels=a,b,c."""

import ast
import csv
import re
from typing import Any

from absl import flags


class Parser(flags.ArgumentParser):
  """Parses tuples as Python writes them, or whole numbers and strings between commas.

  The parser of ml_collections takes a,b,c for one string, and its flags join what they are given
  several times. Of these flags the last wins, as of all others. Nested or unclosed brackets that
  Python cannot read raise a ValueError.
  """

  def parse(self, argument: Any) -> tuple:
    if not isinstance(argument, str):  # the default
      return argument
    text = argument.strip()
    if text[:1] in ('(', '[', "'"):
      try:
        value = ast.literal_eval(text)
        return tuple(value) if isinstance(value, tuple | list) else (value,)
      except (ValueError, SyntaxError) as e:
        inner = text[1:-1]
        if text[0] + text[-1] not in ('()', '[]') or re.search(r'[\[\]()]', inner):
          raise ValueError(f'{text} is no list: give a,b,c') from e
        text = inner
    elements = next(csv.reader([text], skipinitialspace=True), [])
    return tuple(int(x) if re.fullmatch(r'0|-?[1-9]\d*', x) else x
                 for x in map(str.strip, elements))
