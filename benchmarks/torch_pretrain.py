"""The PyTorch side of `benchmarks.race`: transformers' BERT, trained as its users do.

  python -m benchmarks.torch_pretrain --records=RECORDS --minutes=30 --output=DIR

The recipe follows transformers' run_mlm: texts are concatenated and cut into rows of 128
tokens, `DataCollatorForLanguageModeling` masks 15%, AdamW, linear warmup over a tenth of
the steps, logits at all positions. Three learning rates train for a tenth of the time
each, and the one with the lowest loss on held-out rows trains for the whole time. The
minutes exclude tokenization and tuning. The model is saved at every tenth of the steps,
into DIR/1 to DIR/10.
"""

import itertools
import json
import os
import time

from absl import app, flags
from etils import epath
import torch
import transformers

from bert_jax.data import corpus, records

_RECORDS = flags.DEFINE_string('records', None, 'A folder of bert_jax.prepare.', required=True)
_MINUTES = flags.DEFINE_float('minutes', 30, 'Minutes of training.')
_OUTPUT = flags.DEFINE_string('output', None, 'Folder for the models.', required=True)
_RATES = flags.DEFINE_multi_float('rate', [1e-4, 5e-4, 1e-3], 'Learning rates to choose from.')

_LENGTH, _ROWS = 128, 32
_APART = 64  # held-out rows that choose the learning rate
_SIZES = dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)
_DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
_WARM, _TIMED = 5, 20  # steps before the clock starts, and steps that measure the speed


def _rows(tokenizer) -> list[dict[str, list[int]]]:
  """Returns the text of the records, with special tokens, concatenated and cut."""
  settings = records.read_manifest(epath.Path(_RECORDS.value))['settings']
  settings.pop('inputs')
  documents = corpus.open_source(corpus.Settings(**settings), None).read()
  lines = [line for document in documents for line in document.split('\n')]
  ids = list(itertools.chain.from_iterable(
      tokenizer(lines, return_attention_mask=False, return_token_type_ids=False)['input_ids']))
  rows = [{'input_ids': ids[i:i + _LENGTH]} for i in range(0, len(ids) - _LENGTH, _LENGTH)]
  order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
  return [rows[i] for i in order]


class _Run:
  """A model with its optimizer and a schedule of `minutes`."""

  def __init__(self, tokenizer, rows, rate: float, minutes: float):
    transformers.set_seed(0)
    config = transformers.BertConfig(vocab_size=len(tokenizer), max_position_embeddings=_LENGTH,
                                     **_SIZES)
    self.model = transformers.BertForMaskedLM(config).to(_DEVICE)
    self._rows, self._rate, self._minutes = rows, rate, minutes
    self._collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)

  def _batch(self, step: int):
    first = step * _ROWS % (len(self._rows) - _ROWS)
    return self._collate(self._rows[first:first + _ROWS]).to(_DEVICE)

  def train(self, save=lambda model, tenth: None) -> int:
    """Trains for the minutes, saves at every tenth of the steps, returns the steps."""
    model = self.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.01)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    seconds = self._time(optimizer)
    model.load_state_dict(state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=self._rate, weight_decay=0.01)
    steps = max(10, int(60 * self._minutes / seconds))
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    for step in range(steps):
      self._step(optimizer, step)
      schedule.step()
      if (step + 1) * 10 // steps > step * 10 // steps:
        save(model, (step + 1) * 10 // steps)
    return steps

  def _step(self, optimizer, step: int):
    loss = self.model(**self._batch(step)).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

  def _time(self, optimizer) -> float:
    for step in range(_WARM):
      self._step(optimizer, step)
    began = time.monotonic()
    for step in range(_TIMED):
      self._step(optimizer, step)
    return (time.monotonic() - began) / _TIMED

  @torch.no_grad()
  def loss(self, rows) -> float:
    """Returns the loss on some rows with fixed masks."""
    transformers.set_seed(0)
    return self.model.eval()(**self._collate(rows).to(_DEVICE)).loss.item()


def main(_):
  """Tunes, trains and saves the model, and writes DIR/run.json."""
  tokenizer = transformers.BertTokenizerFast.from_pretrained(f'{_RECORDS.value}/tokenizer')
  rows = _rows(tokenizer)
  apart, rows = rows[:_APART], rows[_APART:]
  losses = {}
  for rate in _RATES.value:
    run = _Run(tokenizer, rows, rate, _MINUTES.value / 10)
    run.train()
    losses[rate] = run.loss(apart)
    print(f'rate {rate:g}: loss {losses[rate]:.3f}', flush=True)
  best = min(losses, key=losses.get)
  began = time.monotonic()

  def save(model, tenth):
    folder = os.path.join(_OUTPUT.value, str(tenth))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

  steps = _Run(tokenizer, rows, best, _MINUTES.value).train(save)
  description = {'steps': steps, 'rate': best, 'losses': losses,
                 'minutes': (time.monotonic() - began) / 60}
  with open(os.path.join(_OUTPUT.value, 'run.json'), 'w', encoding='utf-8') as file:
    json.dump(description, file, indent=2)
  print(description, flush=True)


if __name__ == '__main__':
  app.run(main)
