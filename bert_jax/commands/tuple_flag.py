"""Parses overrides that are tuples: --config.data.labels=a,b,c."""

import ast
import csv
import re
from typing import Any

from absl import flags


class Parser(flags.ArgumentParser):
  """Parses Python tuples, or whole numbers and strings that are separated by commas.

  The parser of ml_collections reads a,b,c as one string, and it joins the values of a
  repeated flag. With this parser the last value wins, as for all other flags. Nested or
  unclosed brackets that Python cannot parse raise a ValueError.
  """

  def parse(self, argument: Any) -> tuple:
    if not isinstance(argument, str):  # the default
      return argument
    text = argument.strip()
    # A single quote alone is Python, too: a double quote may begin a CSV field.
    if text[:1] in ('(', '[', "'"):
      try:
        value = ast.literal_eval(text)
        return tuple(value) if isinstance(value, tuple | list) else (value,)
      except (ValueError, SyntaxError) as e:
        # (a,b,c) with unquoted strings is clear enough; nested brackets are not.
        inner = text[1:-1]
        if text[0] + text[-1] not in ('()', '[]') or re.search(r'[\[\]()]', inner):
          raise ValueError(f'{text} is not a list: give a,b,c') from e
        text = inner
    # csv, because a label may contain a comma between double quotes.
    elements = next(csv.reader([text], skipinitialspace=True), [])
    return tuple(int(x) if re.fullmatch(r'0|-?[1-9]\d*', x) else x
                 for x in map(str.strip, elements))
