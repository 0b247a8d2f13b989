"""The PyTorch side of `benchmarks.retrieval`: sentence-transformers' models and losses.

  python -m benchmarks.torch_retrieval --kind=embedder --model=MODEL --data=pairs.jsonl --output=DIR

The recipe is AdamW, linear warmup over a tenth of the steps, clipping at 1, linear decay,
and padded batches.
"""

import json
import pathlib

from absl import app, flags
import sentence_transformers
from sentence_transformers import cross_encoder
from sentence_transformers.multi_vector_encoder.losses import (
  MultiVectorMultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer import losses
import torch
import transformers

_KIND = flags.DEFINE_enum('kind', None, ['embedder', 'late', 'reranker'],
                          'What to train.', required=True)
_MODEL = flags.DEFINE_string('model', None, 'To start from.', required=True)
_DATA = flags.DEFINE_string('data', None, 'JSON lines of examples.', required=True)
_OUTPUT = flags.DEFINE_string('output', None, 'Folder for the model.', required=True)
_STEPS = flags.DEFINE_integer('steps', None, 'Training steps.', required=True)
_BATCH_SIZE = flags.DEFINE_integer('batch_size', None, 'Queries per step.', required=True)
_RATE = flags.DEFINE_float('rate', None, 'Learning rate.', required=True)
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of dropout and of new weights.')
_LENGTH = flags.DEFINE_integer('length', None, 'Tokens per input.', required=True)


class _Embedder:
  """Contrastive loss with the positives and negatives of the batch."""

  def __init__(self):
    self.model = sentence_transformers.SentenceTransformer(_MODEL.value, device='cpu')
    self.model.max_seq_length = _LENGTH.value
    self._loss = losses.MultipleNegativesRankingLoss(self.model)

  def loss(self, batch: list[dict]) -> torch.Tensor:
    texts = [[example[name] for example in batch] for name in ('query', 'positive', 'negative')]
    return self._loss([self.model.tokenize(part) for part in texts], None)


class _Late:
  """The same loss over MaxSim, with a projection to 128 and 32 tokens a query."""

  def __init__(self):
    self.model = sentence_transformers.MultiVectorEncoder(_MODEL.value, device='cpu')
    self.model[0].query_expansion = {'strategy': 'fixed', 'attend': False, 'length': 32}
    self.model[0].document_length = _LENGTH.value
    self._loss = MultiVectorMultipleNegativesRankingLoss(self.model)

  def loss(self, batch: list[dict]) -> torch.Tensor:
    tasks = {'query': 'query', 'positive': 'document', 'negative': 'document'}
    return self._loss([self.model.preprocess([example[name] for example in batch], task=task)
                       for name, task in tasks.items()], None)


class _Reranker:
  """Binary cross-entropy over pairs of a query and a document."""

  def __init__(self):
    self.model = cross_encoder.CrossEncoder(_MODEL.value, num_labels=1, max_length=_LENGTH.value,
                                            device='cpu')

  def loss(self, batch: list[dict]) -> torch.Tensor:
    pairs = [(example['query'], document) for example in batch
             for document in example['positives'] + example['negatives']]
    labels = [float(document in example['positives']) for example in batch
              for document in example['positives'] + example['negatives']]
    inputs = self.model.tokenizer(*map(list, zip(*pairs)), padding=True, truncation=True,
                                  max_length=_LENGTH.value, return_tensors='pt')
    logits = self.model.model(**inputs).logits[:, 0]
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor(labels))


def main(_):
  """Trains for the given steps and saves the model."""
  transformers.set_seed(_SEED.value)
  examples = [json.loads(line) for line in pathlib.Path(_DATA.value).read_text().splitlines()]
  side = {'embedder': _Embedder, 'late': _Late, 'reranker': _Reranker}[_KIND.value]()
  side.model.train()
  parameters = list(side.model.parameters())
  optimizer = torch.optim.AdamW(parameters, lr=_RATE.value, weight_decay=0.01)
  schedule = transformers.get_linear_schedule_with_warmup(
      optimizer, _STEPS.value // 10, _STEPS.value)
  for step in range(_STEPS.value):
    first = step * _BATCH_SIZE.value
    loss = side.loss(examples[first:first + _BATCH_SIZE.value])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step % 20 == 19:
      print(f'step {step + 1}/{_STEPS.value}  loss {loss.item():.3f}', flush=True)
  side.model.save_pretrained(_OUTPUT.value)


if __name__ == '__main__':
  app.run(main)
