"""The same weights and batch give the numbers of transformers' PyTorch BERT."""

import dataclasses
import functools

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from bert_jax.data.rows import Rows
from bert_jax.interop import families, huggingface, layout
from bert_jax.model.encoder import Encoder
from bert_jax.model.heads import BertForPreTraining
from bert_jax.objectives.masking import Masked
from bert_jax.objectives.objective import Keys, MaskedLM
from bert_jax.tasks import (
  multiple_choice,
  question_answering,
  sequence_classification,
  token_classification,
)
from bert_jax.training import optimizer as optimizer_lib
from tests.interop import torch_bert


def first(batch):
  return np.zeros((len(batch.ids), 1), np.int32)


def apply(module, params, *args, **kwargs):
  return jax.jit(functools.partial(module.apply, **kwargs))(params, *args)


def close(ours, theirs, tolerance):
  worst = np.max(np.abs(np.asarray(ours) - theirs.detach().numpy()))
  assert worst <= tolerance, worst


def mask(batch, seed=0):
  """Three positions of each row, random targets; the last of a padded row has no weight."""
  rng = np.random.default_rng(seed)
  lengths = batch.text_ids.sum(1)
  positions = np.stack([rng.permutation(max(n, 3))[:3] for n in lengths]).astype(np.int32)
  targets = rng.integers(5, 900, positions.shape).astype(np.int32)
  weights = np.ones(positions.shape, np.float32)
  weights[1:, 2] = 0
  return Masked(batch.ids, positions, targets, weights)


def torch_labels(batch, masked):
  labels = np.full(batch.ids.shape, -100)
  for row in range(len(labels)):
    for position, target, weight in zip(*(x[row] for x in masked[1:])):
      if weight:
        labels[row, position] = target
  return torch.tensor(labels)


def our_loss(config, params, batch, masked, labels):
  rows = len(batch.ids)
  rows = Rows(batch, first(batch), labels, jnp.ones((rows, 1)), np.arange(rows))
  metrics = MaskedLM(BertForPreTraining(config)).loss(params, {}, rows, masked,
                                                      Keys(None, jax.random.key(0)))
  return {name: metrics[name][0] / metrics[name][1] for name in ('mlm_loss', 'nsp_loss')}


@pytest.mark.parametrize('size, padded', [
    ('tiny', True), ('tiny', False), ('base', True),
    pytest.param('base', False, marks=pytest.mark.slow)])
def test_outputs_losses_and_gradients(tmp_path, size, padded):
  theirs = torch_bert.make('BertForPreTraining', tmp_path, size)
  model = huggingface.load(epath.Path(tmp_path))
  config, vocab = model.config, model.config.vocab_size
  batch = torch_bert.make_batch(vocab, 3, 20, padded)
  masked, labels = mask(batch), np.array([[0], [1], [1]])
  real = batch.text_ids > 0

  results = theirs(**torch_bert.inputs(batch), output_hidden_states=True,
                   labels=torch_labels(batch, masked),
                   next_sentence_label=torch.tensor(labels[:, 0]))
  hidden, pooled = apply(Encoder(config), {'params': model.params['params']['bert']}, batch,
                         first(batch))
  mlm, nsp = apply(BertForPreTraining(config), model.params, batch, batch.positions, first(batch))
  close(np.asarray(hidden)[real], results.hidden_states[-1][torch.tensor(real)], 2e-5)
  close(pooled[:, 0], theirs.bert.pooler(results.hidden_states[-1]), 2e-5)
  close(np.asarray(mlm)[..., :vocab][real], results.prediction_logits[torch.tensor(real)], 2e-5)
  close(nsp[:, 0], results.seq_relationship_logits, 2e-5)

  def total(params):
    return sum(our_loss(config, params, batch, masked, labels).values())

  loss, gradient = jax.jit(jax.value_and_grad(total))(model.params)
  assert abs(float(loss) - results.loss.item()) <= 1e-5
  results.loss.backward()
  ours = layout.to_tensors(gradient, config)
  expected = {families.BERT.canonical(name): x.grad.numpy()
              for name, x in theirs.named_parameters()}
  whole = np.sqrt(sum(np.sum(np.square(x)) for x in expected.values()))
  assert ours.keys() == expected.keys()
  for name, x in expected.items():
    limit = 2e-5 * max(np.linalg.norm(x), whole / 1000)
    assert np.linalg.norm(ours[name] - x) <= limit, name


@pytest.mark.medium
@pytest.mark.parametrize('size, padded, rate', [
    ('tiny', True, 1e-3),
    pytest.param('tiny', False, 1e-3, marks=pytest.mark.slow),
    pytest.param('base', True, 1e-4, marks=pytest.mark.slow),
    pytest.param('base', False, 1e-4, marks=pytest.mark.slow)])
def test_fifty_adamw_steps_give_the_same_losses(tmp_path, size, padded, rate):
  theirs = torch_bert.make('BertForPreTraining', tmp_path, size)
  model = huggingface.load(epath.Path(tmp_path))
  settings = optimizer_lib.OptimizerConfig(learning_rate=rate, warmup_steps=5)
  ours = optimizer_lib.make_optimizer(settings, 50)
  decayed = [x for name, x in theirs.named_parameters()
             if not (name.endswith('bias') or 'LayerNorm' in name)]
  others = [x for name, x in theirs.named_parameters()
            if name.endswith('bias') or 'LayerNorm' in name]
  optimizer = torch.optim.AdamW([{'params': decayed, 'weight_decay': settings.weight_decay},
                                 {'params': others, 'weight_decay': 0.0}],
                                lr=1.0, betas=(settings.b1, settings.b2), eps=settings.eps)
  schedule = optimizer_lib.learning_rate(settings, 50)

  @jax.jit
  def step(params, state, batch, masked, labels):
    loss, gradient = jax.value_and_grad(
        lambda p: sum(our_loss(model.config, p, batch, masked, labels).values()))(params)
    updates, state = ours.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, loss

  params = jax.tree.map(jnp.asarray, model.params)
  state, losses = jax.jit(ours.init)(params), []
  for i in range(50):
    batch = torch_bert.make_batch(model.config.vocab_size, 4, 16, padded, seed=i % 2)
    masked, labels = mask(batch, i % 2), np.arange(4)[:, None] % 2
    params, state, loss = step(params, state, batch, masked, labels)
    optimizer.zero_grad()
    expected = theirs(**torch_bert.inputs(batch), labels=torch_labels(batch, masked),
                      next_sentence_label=torch.tensor(labels[:, 0])).loss
    expected.backward()
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), settings.clip_norm)
    for group in optimizer.param_groups:
      group['lr'] = float(schedule(i))
    optimizer.step()
    losses.append((float(loss), expected.item()))
  assert max(abs(a - b) for a, b in losses) <= 1e-3
  assert losses[-1][0] < losses[0][0] - 0.2  # training changed the loss


@pytest.mark.parametrize('activation', ['gelu', 'gelu_new', 'relu', 'silu'])
def test_activations(tmp_path, activation):
  theirs = torch_bert.make('BertForMaskedLM', tmp_path, hidden_act=activation)
  model = huggingface.load(epath.Path(tmp_path))
  assert model.groups == ('mlm',)  # neither pooler nor next sentences
  batch = torch_bert.make_batch(1000, 2, 12, True)
  logits, _ = apply(BertForPreTraining(model.config), model.params, batch, batch.positions, None)
  real = batch.text_ids > 0
  close(np.asarray(logits)[..., :1000][real],
        theirs(**torch_bert.inputs(batch)).logits[torch.tensor(real)], 2e-5)


def test_task_heads(tmp_path):
  batch = torch_bert.make_batch(1000, 4, 12, True)
  real = batch.text_ids > 0
  labels = {'id2label': {0: 'no', 1: 'yes', 2: 'maybe'}}

  def load(architecture, **overrides):
    theirs = torch_bert.make(architecture, tmp_path / architecture, **overrides)
    return theirs, huggingface.load(epath.Path(tmp_path) / architecture)

  theirs, model = load('BertForSequenceClassification', **labels)
  assert (model.task, model.labels) == ('sequence_classification', ('no', 'yes', 'maybe'))
  ours = sequence_classification.BertForSequenceClassification(model.config, 3)
  close(apply(ours, model.params, batch, first(batch))[:, 0],
        theirs(**torch_bert.inputs(batch)).logits, 2e-5)

  theirs, model = load('BertForTokenClassification', **labels)
  assert model.task == 'token_classification'
  ours = token_classification.BertForTokenClassification(model.config, 3)
  close(np.asarray(apply(ours, model.params, batch))[real],
        theirs(**torch_bert.inputs(batch)).logits[torch.tensor(real)], 2e-5)

  theirs, model = load('BertForQuestionAnswering')
  assert model.task == 'question_answering'
  head = question_answering.BertForQuestionAnswering(model.config)
  ours = np.asarray(apply(head, model.params, batch))
  results = theirs(**torch_bert.inputs(batch))
  close(ours[..., 0][real], results.start_logits[torch.tensor(real)], 2e-5)
  close(ours[..., 1][real], results.end_logits[torch.tensor(real)], 2e-5)

  theirs, model = load('BertForMultipleChoice')
  assert model.task == 'multiple_choice'
  ours = multiple_choice.BertForMultipleChoice(model.config)
  choices = {name: x[None] for name, x in torch_bert.inputs(batch).items()}  # 1 text, 4 choices
  close(apply(ours, model.params, batch, first(batch))[:, 0, 0], theirs(**choices).logits[0], 2e-5)


def test_layers_scanned_or_unrolled_are_the_same(tmp_path):
  torch_bert.make('BertModel', tmp_path)
  model = huggingface.load(epath.Path(tmp_path))
  batch = torch_bert.make_batch(1000, 2, 12, True)
  unrolled = dataclasses.replace(model.config, scan_unroll=2)
  a, b = (apply(Encoder(c), {'params': model.params['params']['bert']}, batch, method='encode')
          for c in (model.config, unrolled))
  np.testing.assert_allclose(a, b, atol=2e-6)
