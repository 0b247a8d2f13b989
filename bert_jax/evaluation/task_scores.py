"""The scores of a fine-tuned model on any file of its task, without training."""

from collections.abc import Sequence
import functools
import re
from typing import Any

from etils import epath
import jax
from ml_collections import FrozenConfigDict

from bert_jax import config as config_lib
from bert_jax.config_fields import changed
from bert_jax.errors import require, require_choice
from bert_jax.evaluation.report import Report
from bert_jax.inference.bert import Bert
from bert_jax.interop import native
from bert_jax.interop.pretrained import Pretrained
from bert_jax.interop.sentence_layout import SentenceLayout
from bert_jax.labelled.packed_examples import Batches
from bert_jax.runs import model_fields
from bert_jax.runtime import console, sealed
from bert_jax.tasks import finetuning_data, question_answering, task_kind, task_list

# Fields of `data` that say how a run trains, not how it reads examples.
_OF_TRAINING = ('train', 'eval', 'test', 'eval_fields', 'loader_workers', 'cached_parts')


def _fields_of_run(name: str, kind: type[task_kind.TaskKind]) -> dict[str, Any]:
  """Returns the `data` fields of a workdir whose run had this task, else {}."""
  path = epath.Path(name) / native.WORKDIR_FILE
  run = sealed.read(path)['config'] if path.exists() else {}
  if run.get('task') != kind.name:
    return {}
  return {field: x for field, x in run['data'].items() if field not in _OF_TRAINING}


def _config(name: str, model: Pretrained, kind: type[task_kind.TaskKind],
            replaced: Sequence[str], max_len: int = 0) -> FrozenConfigDict:
  """Makes the config of the task; the model and its run say how to read examples.

  `replaced` are the fields of --fields; raises UserError for a field that the task lacks.
  `max_len` is the value of --max_len; 0 = not given.
  """
  config = config_lib.finetuning(kind.name)
  facts = {'problem': model.problem, **model.facts}
  if kind.model_task in ('', kind.name):
    facts['labels'] = model.labels
  # Facts override the fields of the run. Models of other libraries have only facts.
  fields = _fields_of_run(name, kind) | {
      field: value for field, value in facts.items() if value is not None and value != ()}
  own = model.text_layout
  own_length = own and (getattr(own, 'texts', None) and own.texts.document_length
                        or own.max_len)
  # As predictions read inputs: see `LoadedModel.trained_length`.
  longest = facts.get('max_len') or own_length or model.config.max_positions
  if kind.name == 'question_answering' and 'doc_stride' not in facts:
    longest = min(question_answering.WINDOW, longest)
  config = changed(config, {
      'init_from': name,
      'max_len': max_len or min(longest, model.config.max_positions),
      **model_fields.sizes_if_unset(config, vars(model.config)),
      **{f'data.{field}': x for field, x in fields.items() if field in config.data}})
  # --fields take precedence over both.
  data = finetuning_data.replaced(config.data, replaced, '--fields',
                                  finetuning_data.string_fields(config.data))
  config = changed(config, {f'data.{field}': value for field, value in data.items()})
  config = changed(config, model_fields.layout_if_unset(config, {}, model))
  config_lib.check_values(config)
  kind.files.check(config)
  return config


def _check_embedder(own: SentenceLayout, name: str):
  """Raises UserError for an embedder whose vectors are more than pooled hidden states."""
  left_out = [title for title, exists in (
      (f'the default prompt {own.default_prompt!r}', own.prompt(None)),
      ('the modules after the pooling', any(module.tensors for module in own.modules)),
      ('truncate_dim', own.dim)) if exists]
  require(not left_out,
          f'--suite=task would leave out {" and ".join(left_out)} of --model={name}: '
          '--suite=retrieval and --suite=mteb score the whole model')


def _check_labels(files: finetuning_data.ExampleFiles, model: Pretrained, name: str):
  """Raises UserError unless the model and the file have the same labels, in order."""
  # transformers writes these names for a model whose labels have no names.
  unnamed = all(re.fullmatch(r'LABEL_\d+', label) for label in model.labels)
  same = (len(files.labels) == len(model.labels) if unnamed or len(model.labels) == 1
          else files.labels == model.labels)
  require(same,
          f'--model={name} has the labels {", ".join(model.labels)}, this file needs '
          f'{", ".join(files.labels)}')


def read(name: str, model: Pretrained, kind: type[task_kind.TaskKind], data: str,
         fields: Sequence[str] = ()) -> tuple[Sequence[Any], Sequence[str]]:
  """Reads the examples of a file as the model's run read its own; returns labels too."""
  config = changed(_config(name, model, kind, fields), {'data.train': data})
  examples = finetuning_data.not_empty(
      kind.files.read(data, config.data, 'validation', []), data)
  files = kind.files.make(config, examples, [])
  _check_labels(files, model, name)
  return examples, files.labels


def evaluate(bert: Bert, data: str, _: epath.Path, *, task: str = '',
             fields: Sequence[str] = (), max_len: int = 0,
             batch_size: int = 32) -> Report:
  """Computes the mean loss and the scores of a file of examples.

  If the model is a workdir, examples are read as its run read its training examples.

  Args:
    bert: the model, with the head of its task.
    data: a file, or tfds:NAME[@SPLIT]: see `data.eval`.
    task: one of `task_list.ALL`; '' = the task of the model's run, or of its head.
    fields: fields of the config group `data`, such as 'text_column=sentence'.
    max_len: tokens of an input; 0 = as in fine-tuning.
    batch_size: examples of a batch.

  Raises:
    UserError: a model without a head, or for another task; a mistake in the file.
  """
  model, name = bert.model, bert.name
  task = task or model.facts.get('task') or model.task
  require(bool(task),
          f'--model={name} has no head of a task: fine-tune it first, or give '
          '--task=sentence_embedding')
  require_choice('--task', task, task_list.ALL)
  kind = task_list.ALL[task]
  if kind.parameter_groups:
    kind.head_of(bert)  # raises UserError for another task's model
  if isinstance(model.text_layout, SentenceLayout):
    _check_embedder(model.text_layout, name)
  config = _config(name, model, kind, fields, max_len)
  # `make` builds the task from this file, and names it data.train in its messages.
  config = changed(config, {'data.train': data})
  require(8 <= config.max_len <= model.config.max_positions,
          f'--max_len={config.max_len} must be at least 8 and at most the '
          f'{model.config.max_positions} positions of the model')

  notes = []
  examples = finetuning_data.not_empty(
      kind.files.read(data, config.data, 'validation', notes), data)
  files = kind.files.make(config, examples, notes).with_facts(model.facts, notes)
  console.print_summary([('note', note) for note in notes])
  if kind.name in task_list.WITH_HEAD:
    _check_labels(files, model, name)
  features = files.features(examples, model.tokenizer, config, path=data, is_train=False)
  batches = Batches(features, batch_size=batch_size, pad_id=model.tokenizer.pad_id)
  split = finetuning_data.Split('', examples, batches)
  measure = functools.partial(jax.jit(files.task.measure), model.params, {})
  scores = finetuning_data.scores_of(files, split, measure)
  # The most important score is the last row, as in every report.
  best = files.auto_score or files.best_score
  rows = [[score, value] for score, value in scores.items() if score != best]
  rows.append([best, scores[best]])
  facts = {'task': kind.name, 'examples': len(examples), **scores}
  return Report(facts, ('score', 'value'), rows, 'value')
