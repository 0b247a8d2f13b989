"""The table of an evaluation: for the terminal, and as JSON, Markdown and a picture."""

from collections.abc import Mapping, Sequence
import io
import json
from typing import Any, NamedTuple

from etils import epath

from bert_jax.runtime import console, storage


class Report(NamedTuple):
  """The result of a suite.

  Attributes:
    facts: facts about the evaluation for the JSON file, such as the number of pairs.
    columns: names of the columns; the first has names, the others numbers, texts or None.
    rows: the rows of the table, the most important row last.
    bars: the column that the picture shows.
    further: the contents of further files, by the suffix of their names.
  """

  facts: dict[str, Any]
  columns: Sequence[str]
  rows: Sequence[Sequence[Any]]
  bars: str
  further: Mapping[str, str] = {}


def _cell(value: Any) -> str:
  if value is None:
    return '-'
  if isinstance(value, float):
    return f'{value:,.4g}'
  return f'{value:,}' if isinstance(value, int) else str(value)


def _cells(report: Report) -> list[list[str]]:
  return [list(report.columns), *([_cell(value) for value in row] for row in report.rows)]


def text(report: Report) -> str:
  """The table as text with aligned columns."""
  cells = _cells(report)
  widths = [max(map(len, column)) for column in zip(*cells)]
  lines = []
  for name, *numbers in cells:
    aligned = [number.rjust(width) for number, width in zip(numbers, widths[1:])]
    lines.append('  '.join([name.ljust(widths[0]), *aligned]).rstrip())
  return '\n'.join(lines)


def markdown(report: Report) -> str:
  """The table in Markdown."""
  return console.markdown_table(_cells(report)) + '\n'


def _picture(report: Report) -> bytes:
  """The bars as a PNG."""
  # Imported here, because it is slow to import and needed once at the end.
  from matplotlib import figure
  column = list(report.columns).index(report.bars)
  # Rows such as the mean over tasks may have no number in this column.
  shown = [row for row in report.rows if row[column] is not None]
  picture = figure.Figure(figsize=(7, 0.8 + 0.28 * len(shown)), layout='constrained')
  axis = picture.subplots()
  places = range(len(shown))
  bars = axis.barh(places, [row[column] for row in shown])
  # A name may contain $, which matplotlib would parse as math.
  axis.set_yticks(places, [str(row[0]) for row in shown], parse_math=False)
  axis.bar_label(bars, [_cell(row[column]) for row in shown], padding=3)
  axis.invert_yaxis()
  axis.set(xlabel=report.bars)
  axis.spines[['top', 'right']].set_visible(False)
  content = io.BytesIO()
  picture.savefig(content, dpi=120, format='png')
  return content.getvalue()


def files(path: epath.Path, *further: str) -> list[epath.Path]:
  """Returns the files that `write` makes; `further` are the keys of `Report.further`."""
  return [path.with_suffix(suffix) for suffix in (*further, '.md', '.png')] + [path]


def write(report: Report, path: epath.Path):
  """Writes FILE.json, the table as FILE.md and FILE.png, and the further files.

  No file gets its name before all of them are complete. FILE.json gets its name last.
  """
  rows = [dict(zip(report.columns, row)) for row in report.rows]
  table = json.dumps({**report.facts, 'rows': rows}, indent=2, allow_nan=False) + '\n'
  contents = [*(text.encode() for text in report.further.values()),
              markdown(report).encode(), _picture(report), table.encode()]
  targets = map(storage.through_link, files(path, *report.further))
  named = list(zip(targets, contents, strict=True))
  # Write all before renaming any: a full disk must not leave half of the files new.
  for file, content in named:
    file.with_suffix(f'{file.suffix}.partial').write_bytes(content)
  for file, _ in named:
    file.with_suffix(f'{file.suffix}.partial').replace(file)
