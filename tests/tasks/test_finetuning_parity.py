"""Four tasks on packed batches equal transformers on the same examples, one by one."""

from etils import epath
import jax
import numpy as np
import pytest
import torch
import transformers

from bert_jax import config as config_lib
from bert_jax.interop import families, huggingface, layout
from bert_jax.interop.pretrained import Pretrained
from bert_jax.model import architectures
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.runs import finetune, initial, resolve
from bert_jax.tasks.finetuning_data import Output, by_example, by_input
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import state as state_lib
from tests import conftest, made_tasks

_CLASSES = {'sequence_classification': transformers.BertForSequenceClassification,
            'token_classification': transformers.BertForTokenClassification,
            'question_answering': transformers.BertForQuestionAnswering,
            'multiple_choice': transformers.BertForMultipleChoice}
# Softmaxes over keys, tokens or choices cancel a bias that all of these share: its gradient is zero
# except for rounding, and Adam turns the rounding into steps.
_NOISE = {'sequence_classification': ('key.bias',), 'token_classification': ('key.bias',),
          'question_answering': ('key.bias', 'qa_outputs.bias', 'layer.1.output.LayerNorm.bias'),
          'multiple_choice': ('key.bias', 'classifier.bias')}
CASES = {
    'single_label': ('sequence_classification', {}),
    'regression': ('sequence_classification',
                   {'data.problem': 'regression', 'data.label_column': 'value'}),
    'tags': ('token_classification', {}),
    'answers': ('question_answering', {'data.doc_stride': 4, 'max_len': 16}),
    'choices': ('multiple_choice', {}),
}


def torch_loss(model, task, f, examples):
  """The mean of transformers' own losses of single examples, without padding."""
  losses, weights = [], []
  for i in examples:
    members = [f.inputs[n] for n in range(f.first[i], f.first[i + 1])]
    length = max(len(x.ids) for x in members)
    pad = lambda rows: torch.tensor([[*r, *[0] * (length - len(r))] for r in rows])
    inputs = {'input_ids': pad([x.ids for x in members]),
              'token_type_ids': pad([x.type_ids for x in members]),
              'attention_mask': pad([[1] * len(x.ids) for x in members])}
    number = f.first[i]
    if task == 'multiple_choice':
      inputs = {name: x[None] for name, x in inputs.items()}
      labels = {'labels': torch.tensor(f.targets[[i]]).long()}
    elif task == 'token_classification':
      marks = torch.tensor(f.token_targets[number])[None].long()
      labels = {'labels': torch.where(marks > 0, marks - 1, -100)}
    elif task == 'question_answering':
      start, end = (torch.tensor([int(f.token_targets[number][:, j].argmax())]) for j in (0, 1))
      labels = {'start_positions': start, 'end_positions': end}
    else:
      targets = torch.tensor(f.targets[[i]])
      labels = {'labels': targets if targets.is_floating_point() else targets.long()}
    losses.append(model(**inputs, **labels).loss)
    weights.append((f.token_targets[number] > 0).sum() if task == 'token_classification' else 1)
  return sum(w * x for w, x in zip(weights, losses)) / sum(weights)


def torch_side(folder, task_name, settings):
  """Their model, and AdamW with the same settings."""
  theirs = _CLASSES[task_name].from_pretrained(
      str(folder), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
  theirs.train()
  named = list(theirs.named_parameters())
  plain = [x for n, x in named if n.endswith('bias') or 'LayerNorm' in n]
  others = [x for n, x in named if not (n.endswith('bias') or 'LayerNorm' in n)]
  return theirs, torch.optim.AdamW(
      [{'params': others, 'weight_decay': settings.weight_decay},
       {'params': plain, 'weight_decay': 0.0}], eps=settings.eps)


def compare_outputs(theirs, task_name, f, outputs):
  """Compares the outputs for the first inputs of the evaluated file."""
  with torch.inference_mode():
    for i in range(10 if task_name == 'multiple_choice' else 0):
      choices = [f.inputs[n] for n in range(f.first[i], f.first[i + 1])]
      length = max(len(x.ids) for x in choices)
      ids, types, mask = (
          torch.tensor([[[*row, *[0] * (length - len(row))] for row in rows]]) for rows in (
              [x.ids for x in choices], [x.type_ids for x in choices],
              [[1] * len(x.ids) for x in choices]))
      expected = theirs(input_ids=ids, token_type_ids=types, attention_mask=mask).logits[0].numpy()
      ours = by_example(outputs)[i, :len(choices)]
      # A shift of all choices is noise.
      np.testing.assert_allclose(ours - ours.mean(), expected - expected.mean(), atol=1e-3)
    for number, x in enumerate(f.inputs[:20] if task_name != 'multiple_choice' else ()):
      reference = theirs(input_ids=torch.tensor([x.ids]), token_type_ids=torch.tensor([x.type_ids]))
      if task_name == 'sequence_classification':
        np.testing.assert_allclose(by_example(outputs)[number], reference.logits[0], atol=1e-3)
      elif task_name == 'token_classification':
        tags = reference.logits[0].argmax(-1).numpy()
        assert (by_input(outputs, len(f.inputs))[number] == tags).all()
      else:
        ours = by_input(outputs, len(f.inputs))[number]
        expected = torch.stack([reference.start_logits[0], reference.end_logits[0]], -1).numpy()
        # A shift of all tokens is noise too.
        np.testing.assert_allclose(ours - ours.mean(0), expected - expected.mean(0), atol=1e-3)


@pytest.mark.medium
@pytest.mark.parametrize('case', [
    pytest.param(case, marks=pytest.mark.slow if case in ('regression', 'choices') else ())
    for case in CASES])
def test_twelve_steps_and_their_predictions_equal_transformers(tmp_path, case):
  task_name, overrides = CASES[case]
  c = config_lib.finetuning(task_name)
  c.update_from_flattened_dict({
      'batch_size': 8, 'max_len': 32, 'train_steps': 12, 'train_epochs': 0.0, 'model.dropout': 0.0,
      'model.attention_dropout': 0.0, 'optimizer.learning_rate': 1e-3,
      'init_from': made_tasks.model(tmp_path / 'model'),
      **made_tasks.files(task_name, tmp_path, 60, 30), **overrides})
  mesh = conftest.sub_mesh(2, 1)
  c, model = resolve.with_model(c, mesh)
  job = finetune.make_job(c, model, mesh, epath.Path(tmp_path))
  task, data, settings = job.task, job.data, optimizer_lib.OptimizerConfig(**c.optimizer)
  optimizer = optimizer_lib.make_optimizer(settings, 12)
  init, abstract = state_lib.make_init(task, optimizer, mesh, 'dp')
  state = init(state_lib.root_key(0))
  state = state._replace(params=initial.from_model(state.params, job.start, 'model'))
  step = state_lib.make_train_step(task, optimizer, mesh, 'dp', abstract, seed=0, accumulation=1)

  folder = epath.Path(tmp_path) / 'with_head'
  huggingface.save(Pretrained(architectures.make_config(c.model), jax.device_get(state.params),
                              model.tokenizer, task_name, data.files.labels,
                              job.facts['problem']), folder)
  theirs, torch_optimizer = torch_side(folder, task_name, settings)
  rate, f = optimizer_lib.learning_rate(settings, 12), data.train.batches.features
  losses = []
  for i in range(12):
    state, metrics = step(state, mesh_lib.put_batch(data.rows(i), mesh))
    total, count = jax.device_get(metrics['loss'])
    torch_optimizer.zero_grad()
    expected = torch_loss(theirs, task_name, f, data.train.batches.examples(i))
    expected.backward()
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), settings.clip_norm)
    for group in torch_optimizer.param_groups:
      group['lr'] = float(rate(i))
    torch_optimizer.step()
    losses.append((total / count, expected.item()))
  assert max(abs(a - b) for a, b in losses) <= 1e-4
  assert abs(losses[-1][0] - losses[0][0]) > 1e-3  # training changed the loss

  # After the steps, the parameters and the outputs of an evaluation are the same.
  ours = layout.to_tensors(jax.device_get(state.params), architectures.make_config(c.model))
  for name, x in theirs.named_parameters():
    if not name.endswith(_NOISE[task_name]):
      name = families.BERT.canonical(name)
      np.testing.assert_allclose(ours[name], x.detach().numpy(), atol=2e-4)
  theirs.eval()
  evaluate, (split,) = state_lib.make_eval_step(task, mesh, 'dp'), data.evals
  outputs = [Output(x, jax.device_get(evaluate(state, mesh_lib.put_batch(x.batch, mesh)))[1])
             for x in split.batches.in_order()]
  compare_outputs(theirs, task_name, split.batches.features, outputs)
