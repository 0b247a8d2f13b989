"""The table of docs/serving.md: which members each format can export, for every task.

After a change, rewrite the table: python -m tests.interop.test_formats.
"""

import pathlib
import tempfile

from etils import epath
import pytest

from bert_jax.errors import UserError
from bert_jax.interop import conversion, late_layout
from bert_jax.model import architectures
from tests import made_tasks
from tests.interop import test_onnx

PAGE = pathlib.Path(__file__).parents[2] / 'docs/serving.md'
FORMATS = ('huggingface', 'sentence_transformers', 'onnx', 'stablehlo', 'bert_jax')
TITLES = {'encoder': 'encoder', 'masked_lm': 'masked LM', 'embedder': 'sentence embedding',
          'sparse': 'sparse embedding (SPLADE)', 'late': 'late interaction (ColBERT)',
          'reranker': 'reranking', 'sequence_classification': 'classification, regression',
          'question_answering': 'question answering', 'token_classification': 'tagging',
          'multiple_choice': 'multiple choice'}
# One member without convolutions: transformers has no ModernBERT with them.
PLAIN = {'modernbert': {'conv_reach': 0}}


def model_of(member: str, kind: str):
  if kind != 'late':
    return test_onnx.make(member, kind, **PLAIN.get(member, {}))
  encoder = test_onnx.make(member, 'encoder', **PLAIN.get(member, {}))
  layout = made_tasks.late_layout_of(encoder.config.hidden_size)
  return late_layout.with_projection(encoder.__class__(
      encoder.config, encoder.params, encoder.tokenizer, text_layout=layout))


def is_written(member: str, kind: str, to: str) -> bool:
  """Writes a folder; returns False if it is refused in one line."""
  model, module = model_of(member, kind), conversion.FORMATS[to]
  try:
    if hasattr(module, 'exported'):
      model = module.exported(model)
    if to == 'stablehlo' and kind != 'encoder':  # StableHLO holds no head and no pooling
      return False
    # A folder without the head or the pooling is another model.
    if (to == 'sentence_transformers' and kind in test_onnx.LABELS
        or to == 'huggingface' and kind in ('embedder', 'sparse')):
      return False
    with tempfile.TemporaryDirectory() as folder:
      module.save(model, epath.Path(folder) / 'model')
  except UserError:
    return False
  return True


def table() -> str:
  lines = [f'| task | {" | ".join(f"`{to}`" for to in FORMATS)} |', '| --- ' * 6 + '|']
  for kind, title in TITLES.items():
    cells = []
    for to in FORMATS:
      members = [member for member in architectures.ALL if is_written(member, kind, to)]
      missing = [member for member in architectures.ALL if member not in members]
      cells.append('no' if not members else 'all' if not missing else
                   f'all but {", ".join(missing)}' if len(missing) < 5 else ', '.join(members))
    lines.append(f'| {title} | {" | ".join(cells)} |')
  return '\n'.join(lines)


@pytest.mark.slow
def test_the_table_is_current():
  assert table() in PAGE.read_text()


if __name__ == '__main__':
  before, _, after = PAGE.read_text().partition('| task |')
  PAGE.write_text(before + table() + '\n\n' + after.partition('\n\n')[2])
