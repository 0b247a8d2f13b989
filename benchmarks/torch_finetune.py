"""The PyTorch side of `benchmarks.finetune`: transformers on the same examples.

On a GPU it computes products in bfloat16, as bert_jax does there.
"""

from collections.abc import Sequence
import time

import numpy as np
import torch
import transformers

from bert_jax.labelled.packed_examples import Features
from bert_jax.tasks.finetuning_data import FineTuningData, Split
from bert_jax.training import optimizer as optimizer_lib

_CLASSES = {'sequence_classification': 'BertForSequenceClassification',
            'token_classification': 'BertForTokenClassification',
            'question_answering': 'BertForQuestionAnswering',
            'multiple_choice': 'BertForMultipleChoice'}


def _padded(rows: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
  length = max(map(len, rows))
  return torch.tensor([[*row, *[fill] * (length - len(row))] for row in rows])


class TorchRun:
  """A transformers model that trains on the batches of `data`."""

  def __init__(self, name: str, data: FineTuningData, folder: str,
               settings: optimizer_lib.OptimizerConfig, train_steps: int, dropout: float,
               seed: int):
    torch.manual_seed(seed)
    self._name, self._data, self.seconds = name, data, 0.0
    config = transformers.BertConfig.from_pretrained(
        folder, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        num_labels=len(data.files.labels))
    config.problem_type = {'regression': 'regression'}.get(
        data.files.problem, 'single_label_classification')
    self._device = 'cuda' if torch.cuda.is_available() else 'cpu'
    self._model = getattr(transformers, _CLASSES[name]).from_pretrained(
        folder, config=config).to(self._device)
    named = list(self._model.named_parameters())
    plain = [x for n, x in named if n.endswith('bias') or 'LayerNorm' in n]
    decayed = [x for n, x in named if not (n.endswith('bias') or 'LayerNorm' in n)]
    self._optimizer = torch.optim.AdamW(
        [{'params': decayed, 'weight_decay': settings.weight_decay},
         {'params': plain, 'weight_decay': 0.0}], lr=1.0, betas=(settings.b1, settings.b2),
        eps=settings.eps, fused=self._device == 'cuda')
    rate = optimizer_lib.learning_rate(settings, train_steps)
    self._rates = [float(rate(step)) for step in range(train_steps)]
    self._clip = settings.clip_norm

  def _inputs(self, f: Features, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    found = [f.inputs[i] for i in numbers]
    inputs = {'input_ids': _padded([x.ids for x in found], 0),
              'token_type_ids': _padded([x.type_ids for x in found], 0),
              'attention_mask': _padded([[1] * len(x.ids) for x in found], 0)}
    inputs = {name: x.to(self._device) for name, x in inputs.items()}
    if self._name != 'multiple_choice':
      return inputs
    choices = f.first[1] - f.first[0]
    return {name: x.reshape(-1, choices, x.shape[1]) for name, x in inputs.items()}

  def _loss(self, f: Features, examples: np.ndarray) -> torch.Tensor:
    numbers = np.concatenate([np.arange(f.first[i], f.first[i + 1]) for i in examples])
    inputs = self._inputs(f, numbers)
    if self._name == 'token_classification':
      labels = _padded([(f.token_targets[i] - 1).tolist() for i in numbers], -1).to(self._device)
      return self._model(**inputs, labels=torch.where(labels < 0, -100, labels)).loss
    if self._name == 'question_answering':
      # The loss of transformers includes padding in the softmax. Here, as in bert_jax, it
      # does not.
      found = self._model(**inputs)
      marks = [torch.tensor([int(f.token_targets[i][:, j].argmax()) for i in numbers])
               for j in (0, 1)]
      padding = inputs['attention_mask'] == 0
      return sum(torch.nn.functional.cross_entropy(
          x.float().masked_fill(padding, -1e9), y.to(self._device))
                 for x, y in zip((found.start_logits, found.end_logits), marks)) / 2
    labels = torch.tensor(f.targets[examples], device=self._device)
    labels = labels if labels.is_floating_point() else labels.long()
    return self._model(**inputs, labels=labels).loss

  def _products(self) -> torch.autocast:
    return torch.autocast(self._device, torch.bfloat16, enabled=self._device == 'cuda')

  def step(self, number: int) -> float:
    """Makes one update and returns the loss."""
    began = time.perf_counter()
    self._model.train()
    batches = self._data.train.batches
    self._optimizer.zero_grad()
    with self._products():
      loss = self._loss(batches.features, batches.examples(number))
    loss.backward()
    if self._clip:
      torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
    for group in self._optimizer.param_groups:
      group['lr'] = self._rates[number]
    self._optimizer.step()
    value = loss.item()
    self.seconds += time.perf_counter() - began
    return value

  def logits(self, split: Split) -> list[np.ndarray]:
    """Returns the logits of each input of a file: [labels], or [tokens, ...]."""
    self._model.eval()
    f = split.batches.features
    found = [None] * len(f.inputs)
    order = np.argsort(-f.sizes, kind='stable')
    if self._name == 'multiple_choice':
      order = np.arange(len(f.inputs))
    step = 32 if self._name != 'multiple_choice' else 8 * int(f.first[1])
    with torch.inference_mode(), self._products():
      for start in range(0, len(order), step):
        numbers = order[start:start + step]
        output = self._model(**self._inputs(f, numbers))
        if self._name == 'question_answering':
          values = torch.stack([output.start_logits, output.end_logits], -1)
        else:
          values = output.logits
        values = values.float().cpu()
        values = values.reshape(len(numbers), *values.shape[1:]).numpy() if (
            self._name != 'multiple_choice') else values.reshape(-1, 1).numpy()
        for i, value in zip(numbers, values):
          per_token = self._name in ('token_classification', 'question_answering')
          found[i] = value[:f.sizes[i]] if per_token else value
    return found
