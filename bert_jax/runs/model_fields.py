"""Config fields that a run takes from the model it starts from, and their checks."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from etils import epath
import jax
from ml_collections import ConfigDict

from bert_jax.data import dataset
from bert_jax.data.late_inputs import DOCUMENT
from bert_jax.data.tokenizers import base as tokenizer_base
from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.data.tokenizers.base import Tokenizer
from bert_jax.errors import UserError, require
from bert_jax.interop.late_layout import DOCUMENT_PROMPTS, LateLayout
from bert_jax.interop.pretrained import Pretrained
from bert_jax.interop.sentence_layout import SentenceLayout
from bert_jax.interop.sparse_layout import SparseLayout
from bert_jax.model import architectures
from bert_jax.model.bert_config import VOCAB_MULTIPLE
from bert_jax.runtime import processes, sealed
from bert_jax.runtime.console import print_summary
from bert_jax.tasks import late_interaction

# Fields of `model` in which a run may differ from `init_from`: the parameters still fit.
_FREE = ('dtype', 'attention', 'remat', 'scan_unroll', 'dropout', 'attention_dropout',
         'initializer_range', 'vocab_size')


def sizes_if_unset(config: ConfigDict, sizes: Mapping[str, Any]) -> dict[str, Any]:
  """The unset fields of the group `model`, with their values in `sizes`."""
  return {f'model.{name}': value for name, value in sizes.items()
          if config.model.get(name) is None}


def _pooling_if_unset(config: ConfigDict, earlier: Mapping[str, Any],
                      model: Pretrained | None) -> dict[str, str]:
  """data.pooling, if the config leaves it to the model: the model's own, else the mean.

  A resumed run takes it from its run.json.

  Raises:
    UserError: the model has several poolings at once, or is a SparseEncoder with another
      pooling than the task.
  """
  own = model and model.text_layout
  if config.task == 'sparse_embedding' and isinstance(own, SparseLayout):
    require((own.pooling, own.activation) == ('max', 'relu'),
            f'init_from={config.init_from} pools the {own.pooling} of {own.activation}, '
            'but sparse_embedding pools the max of relu: python -m bert_jax.convert '
            '--to=huggingface writes the model without its pooling')
  # The task has no such field (None), or the user has chosen a value.
  if config.data.get('pooling') != '':
    return {}
  if earlier:
    return {'data.pooling': earlier['data']['pooling']}
  own = own if isinstance(own, SentenceLayout) else SentenceLayout()
  require(len(own.pooling) <= 1,
          f'init_from={config.init_from} concatenates {" and ".join(own.pooling)}, but a '
          'run uses one of them: give data.pooling (evaluate: --fields=pooling=mean)')
  return {'data.pooling': own.pooling[0]}


def _print_left_out(config: ConfigDict, model: Pretrained | None):
  """Prints the parts of a text layout that a run from this model does not use."""
  own = model and model.text_layout
  if not own:
    return
  # Modules after the pooling, such as a Dense layer.
  steps = [module.kind for module in getattr(own, 'modules', ()) if module.tensors]
  if isinstance(own, LateLayout):
    length = own.texts.document_length
    steps += [f'the length {length} of documents (max_len={config.max_len})'] * (
        length not in (None, config.max_len))
  else:
    steps += [title for title, exists in (
        ('prompts', any(own.prompts.values())), ('truncate_dim', getattr(own, 'dim', None)),
        ('max_active_dims', getattr(own, 'most', None))) if exists]
  if steps:
    print_summary([('left out', f'{", ".join(steps)} of {config.init_from}')])


def layout_if_unset(config: ConfigDict, earlier: Mapping[str, Any],
                    model: Pretrained | None) -> dict[str, Any]:
  """The fields about the layout that the config leaves to the model.

  A resumed run takes them from the config of the `earlier` run. Prints the parts of the
  layout that the run does not use. Raises UserError for a part that no field expresses.
  """
  fields = _pooling_if_unset(config, earlier, model) | _late_if_unset(config, earlier, model)
  _print_left_out(config, model)
  return fields


def _late_if_unset(config: ConfigDict, earlier: Mapping[str, Any],
                   model: Pretrained | None) -> dict[str, Any]:
  """The fields of late interaction."""
  if config.task != late_interaction.LateKind.name:
    return {}
  earlier = earlier.get('data', {})
  name = config.model.architecture  # None without a model: `check_named` reports it
  can_hide = not name or architectures.find(name).config.can_hide
  own = model.text_layout if model and isinstance(model.text_layout, LateLayout) else None
  if not own:
    return late_interaction.fields_if_unset(config.data, earlier, None, {}, 0,
                                            config.max_len, can_hide)
  texts = own.texts
  require((own.normalizes, texts.only, texts.skipped_in) == (True, (), (DOCUMENT,)),
          f'init_from={config.init_from}: a run has no field for its keep_only_token_ids or '
          'skiplist_tasks, or for vectors without a Normalize')
  document = own.first_prompt(DOCUMENT_PROMPTS)
  prompts = dict(own.prompts) | {DOCUMENT: own.prompts[document] if document else ''}
  return late_interaction.fields_if_unset(config.data, earlier, texts, prompts,
                                          len(model.labels), config.max_len, can_hide)


def check_named(config: ConfigDict, has_started: bool = False):
  """Raises UserError if the config needs a model but names none, unless resumed."""
  unset = [name for name, value in config.model.items() if value is None]
  require(not unset, f'model.{min(unset, default="")} is not set: this config takes it '
                     'from a model, give its folder as init_from')
  require(config.task == 'pretrain' or config.init_from or has_started,
          'init_from is not set: fine-tuning starts from a pretrained model')
  require(not config.add_tokens or config.init_from,
          f'add_tokens={config.add_tokens} extends the vocabulary of another '
          'model: give its folder as init_from')


def vocabulary_if_unset(config: ConfigDict, model: Pretrained | None,
                        workdir: epath.Path) -> dict[str, Any]:
  """The fields for reading text with the model's vocabulary, if the config has no other.

  Saves the vocabulary in the workdir, where a resumed run (model=None) finds it. If an
  earlier run left an intact vocabulary there, it stays: this run may yet be refused.
  """
  folder, run_file = workdir / 'tokenizer', workdir / 'run.json'
  if config.data.vocab or dataset.is_prepared(config.data.source):
    return {}
  run_json = sealed.read(run_file) if run_file.exists() else {}
  if model and run_json.get('tokenizer') != sealed.digests(folder):
    model.tokenizer.save(folder)
  processes.barrier()  # on a shared disk, another process may still write these files
  # A tokenizer without this setting gives None.
  lowercase = tokenizer_reader.load(folder).lowercase
  return {'data.vocab': str(folder),
          'data.lowercase': config.data.lowercase if lowercase is None else lowercase}


def check_vocabulary(what: str, name: str, model: Pretrained, corpus: Tokenizer,
                     folder: epath.Path, of_the_run: bool):
  """Raises UserError if a model and the corpus have different vocabularies.

  `of_the_run` says that the corpus is read with the vocabulary of an earlier run in this
  workdir. Otherwise the model's vocabulary is first saved in `folder`, because the remedy
  in the message uses it.
  """
  if tokenizer_base.digest(model.tokenizer) != tokenizer_base.digest(corpus):
    require(not of_the_run,
            f'{what}={name} has another vocabulary than the run in {folder.parent}: give '
            f'the {what} of that run, or use another --workdir')
    if not jax.process_index():
      model.tokenizer.save(folder)
    raise UserError(f'{what}={name} has another vocabulary than the corpus: leave out '
                    'data.vocab to use the vocabulary of the model, or prepare records '
                    f'with --vocab={folder}')
  # The digest leaves out the rows of the table without an entry. A run from `model` may
  # drop them, if its table has the same padding; a teacher scores them.
  rows, ours = model.config.vocab_size, corpus.vocab_size
  if (-(-rows // VOCAB_MULTIPLE) != -(-ours // VOCAB_MULTIPLE)
      or what == 'teacher' and rows != ours):
    if not jax.process_index():
      model.tokenizer.save(folder)
    raise UserError(f'{what}={name} has a table of {rows:,} rows, the vocabulary of the '
                    f'corpus {ours:,} entries: prepare records with --vocab={folder}')


def check_same_sizes(config: ConfigDict, model: Pretrained):
  """Raises UserError unless the config has the architecture and the sizes of `model`."""
  for field in dataclasses.fields(model.config):
    ours, theirs = config.model.get(field.name), getattr(model.config, field.name)
    require(field.name in _FREE or ours == theirs,
            f'init_from={config.init_from} holds a model with {field.name}={theirs}, '
            f'this config has model.{field.name}={ours}: they must be the same')
