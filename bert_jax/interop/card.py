"""The model card of an export."""

import math

from bert_jax.interop import layout
from bert_jax.interop.pretrained import Pretrained
from bert_jax.model.heads import count_parameters


def model_card(model: Pretrained, architecture: str) -> str:
  """A README.md in the hub's form: what the model is, how it was made, how it is loaded."""
  c, facts = model.config, model.facts
  counted = {'pooler', 'mlm', 'nsp'} & set(model.groups)
  parameters = count_parameters(layout.abstract_params(c, counted), c)
  lines = [
      '---', 'library_name: transformers', 'tags:', '- bert', '- bert_jax', '---', '',
      f'# BERT, {c.num_layers} layers of {c.hidden_size}', '',
      f'{parameters:,} parameters, {c.vocab_size:,} vocabulary entries '
      f'({model.tokenizer.kind}), inputs of up to {c.max_positions} tokens. Exported from '
      f'`{facts.get("source", "bert_jax")}` by bert_jax; every tensor, the outputs and the '
      'tokenisation were compared with the source.', '']
  rows = [('Data', facts.get('data')), ('Steps', facts.get('steps')),
          ('Parts', ', '.join(('encoder', *model.groups))),
          ('Labels', ', '.join(model.labels)), ('Command', facts.get('command'))]
  rows = [(name, f'`{value}`' if name == 'Command' else value) for name, value in rows if value]
  lines += ['| | |', '| --- | --- |', *(f'| {name} | {value} |' for name, value in rows), '']
  if facts.get('scores'):
    scores = {n: v for n, v in facts['scores'].items()
              if isinstance(v, (int, float)) and math.isfinite(v)}
    lines += ['Held-out scores:', '', '| | |', '| --- | --- |',
              *(f'| {name} | {value:.4f} |' for name, value in scores.items()), '']
  lines += ['```python', f'from transformers import AutoTokenizer, {architecture}', '',
            "tokenizer = AutoTokenizer.from_pretrained('THIS_FOLDER')",
            f"model = {architecture}.from_pretrained('THIS_FOLDER')", '```', '']
  return '\n'.join(lines)
