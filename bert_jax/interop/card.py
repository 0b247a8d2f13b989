"""The model card of an export."""

import math

from bert_jax.interop import layout
from bert_jax.interop.pretrained import Pretrained
from bert_jax.model.heads import count_parameters


def model_card(model: Pretrained, architecture: str) -> str:
  """A README.md in the hub's form: the model, how it was made, how to load it."""
  c, facts = model.config, model.facts
  counted = {'pooler', 'mlm', 'nsp'} & set(model.groups)
  parameters = count_parameters(layout.abstract_params(c, counted), c)
  rows = {'Data': facts.get('data'), 'Steps': facts.get('steps'),
          'Parts': ', '.join(('encoder', *model.groups)), 'Labels': ', '.join(model.labels),
          'Command': facts.get('command') and f'`{facts["command"]}`'}
  table = [f'| {name} | {value} |' for name, value in rows.items() if value]
  scores = [f'| {name} | {value:.4f} |' for name, value in (facts.get('scores') or {}).items()
            if isinstance(value, (int, float)) and math.isfinite(value)]
  if facts.get('scores'):
    scores = ['Held-out scores:', '', '| | |', '| --- | --- |', *scores, '']
  return '\n'.join([
      '---', 'library_name: transformers', 'tags:', '- bert', '- bert_jax', '---', '',
      f'# BERT, {c.num_layers} layers of {c.hidden_size}', '',
      f'{parameters:,} parameters, {c.vocab_size:,} vocabulary entries '
      f'({model.tokenizer.kind}), inputs of up to {c.max_positions} tokens. Exported from '
      f'`{facts.get("source", "bert_jax")}` by bert_jax; every tensor, the outputs and the '
      'tokenisation were compared with the source.', '',
      '| | |', '| --- | --- |', *table, '', *scores,
      '```python', f'from transformers import AutoTokenizer, {architecture}', '',
      "tokenizer = AutoTokenizer.from_pretrained('THIS_FOLDER')",
      f"model = {architecture}.from_pretrained('THIS_FOLDER')", '```', ''])
