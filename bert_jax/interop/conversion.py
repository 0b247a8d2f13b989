"""Converts checkpoints between formats, and verifies every conversion."""

from collections.abc import Callable
import contextlib
import fnmatch
import functools
import os
import pathlib
import shutil
import tempfile

from etils import epath

from bert_jax.data.tokenizers import spiece
from bert_jax.errors import require, require_flag
from bert_jax.interop import (
  hub,
  huggingface,
  native,
  sentence_transformers,
  stablehlo,
  text_layout,
  verify,
)
from bert_jax.interop import load as load_lib
from bert_jax.interop.onnx_export import folder as onnx_folder
from bert_jax.interop.pretrained import Pretrained
from bert_jax.runtime import storage
from bert_jax.runtime.console import print_summary
from bert_jax.tasks import task_kind
from bert_jax.training import checkpoint, integrity

FORMATS = {'huggingface': huggingface,
           'bert_jax': native,
           'stablehlo': stablehlo,
           'sentence_transformers': sentence_transformers,
           'onnx': onnx_folder}
_WEIGHTS = 'model.safetensors'
_TOKENIZER = ('tokenizer.json', 'tokenizer_config.json', 'vocab.txt', spiece.FILE)
_TEXTS = (text_layout.FILE, text_layout.SETTINGS, text_layout.ENCODER_SETTINGS,
          *(f'[0-9]_*/{name}' for name in ('config.json', text_layout.WEIGHTS)))
# The files that the formats write, as patterns. Here * also matches /.
_WRITTEN = (
    'README.md', 'config.json', _WEIGHTS, *_TOKENIZER, *_TEXTS,
    native.CHECKPOINT_FILE, 'params/*', *(f'tokenizer/{name}' for name in _TOKENIZER),
    *(f'sentence/{name}' for name in _TEXTS), stablehlo.FILE,
    *(f'{name}{end}' for name in (onnx_folder.FILE, onnx_folder.QUANTIZED)
      for end in ('', '_data')))


def _write(model: Pretrained, directory: epath.Path, to: str, opset: int | None = None):
  """Writes the model, reads it back and compares; raises UserError if the two differ."""
  if to in ('sentence_transformers', 'onnx'):
    whole, model = model, FORMATS[to].exported(model)
    if lost := [name for name in whole.groups if name not in model.groups]:
      print_summary([('left out', f'{", ".join(lost)}: an embedder does not use it')])
  if to != 'stablehlo':  # StableHLO files hold no head, so labels do not matter
    task_kind.check_labels(model.labels, model.facts.get('source', 'this model'))
  if to == 'onnx':
    onnx_folder.save(model, directory, opset)
  else:
    FORMATS[to].save(model, directory)
  if to in ('stablehlo', 'onnx'):
    print_summary(FORMATS[to].compare(model, directory))
  else:
    print_summary(verify.compare(model, load_lib.load(str(directory)), directory))
  if to == 'sentence_transformers':
    print_summary(sentence_transformers.compare(model, directory))


def _check_sound(source: str):
  """Checks the model in a folder, and every checkpoint of a workdir; raises UserError."""
  folder = epath.Path(source)
  if (folder / native.WORKDIR_FILE).exists():
    checkpoints, damaged = checkpoint.complete(folder), []
    for path in checkpoints:
      name = f'{path.parent.name}/{path.name}'
      try:
        arrays = [x for item in integrity.check(path)['arrays'].values() for x in item]
        print_summary([(name, f'sound, {len(arrays)} arrays')])
      except integrity.Damaged as e:
        # A run that is still training deletes old checkpoints while we read them.
        if path.exists():
          damaged.append(name)
          print_summary([(name, f'DAMAGED: {e}')])
    require(not damaged,
            f'{len(damaged)} of {len(checkpoints)} checkpoints of {source} are damaged: '
            f'{", ".join(damaged)}')
  model = load_lib.load(source)
  print_summary([('sound', f'{source}: {model.config.num_layers} layers of '
                           f'{model.config.hidden_size}, {model.parts}')])


def _check_flags(output: str | None, to: str | None, verify_only: bool, push: str):
  """Raises UserError for missing flags, and for flags without effect."""
  if push:
    require(to in ('huggingface', 'sentence_transformers') and output and not verify_only,
            '--push takes --to=huggingface or sentence_transformers, and --output=DIR')
    require(load_lib.HUB_NAME.fullmatch(push),
            f'--push={push} is not a name on the hub: give ORGANIZATION/NAME')
  if verify_only and output:
    require(not to,
            f'--to={to} has no effect here: --verify compares --input and --output')
  elif to or not verify_only:
    require_flag('to', to, FORMATS)
    require(output or verify_only,
            'give --output=DIR, a new folder, or --verify to try a conversion only')


def convert(source: str, output: str | None, to: str | None, *, verify_only: bool = False,
            step: int | None = None, allow_older: bool = False, push: str = '',
            overwrite: bool = False, opset: int | None = None,
            finish: Callable[[epath.Path], None] | None = None):
  """Reads a model in any format and writes it in another; `verify_only` only checks.

  Args:
    source: a model, see `load.load`.
    output: the new folder; with `verify_only` the folder to compare with.
    to: one of FORMATS. With `verify_only` and no output, the conversion goes to a
      temporary folder. With `verify_only` alone, the source and all its checkpoints are
      checked.
    step: the step of the checkpoint in a workdir; None = the best one, or the newest one.
    allow_older: if this checkpoint is damaged, take the newest sound one before it.
    push: ORGANIZATION/NAME on the Hugging Face hub to upload the result to; '' = nowhere.
    overwrite: replace an existing model in the output folder.
    opset: the version of ONNX's operators; None = the default.
    finish: called with the written folder before it gets its name: if this raises an
      error, nothing is kept.

  Raises:
    UserError: the source is not a sound model, the output exists, or the two differ.
  """
  _check_flags(output, to, verify_only, push)
  require(to == 'onnx' or opset is None, '--opset has no effect here: it is for --to=onnx')
  require(not (overwrite and verify_only),
          '--overwrite has no effect here: --verify writes nothing')
  if verify_only and not output and not to:
    require(step is None and not allow_older,
            '--verify alone checks every checkpoint: leave out --step and --allow_older')
    _check_sound(source)
    return
  directory = epath.Path(output) if output else None
  if not verify_only:
    require(not storage.is_remote(output), f'--output={output}: give a local folder')
    storage.make_writable(storage.through_link(directory).parent, f'--output={output}')
  converted = not verify_only and directory.exists() and (
      not directory.is_dir() or any(directory.iterdir()))
  # With --push an existing output is the result of a call whose upload failed: it is not
  # converted again, only compared and uploaded.
  if converted and (overwrite or not push):
    _check_replaced(source, directory, overwrite)
    converted = False
  model = load_lib.load(source, step, allow_older)
  c = model.config
  print_summary([('model', f'{source}: {c.num_layers} layers of {c.hidden_size}, '
                           f'{c.vocab_size:,} entries, {model.parts}')])
  if converted:
    _check_uploadable(directory, to, bool(finish))
  if converted or (verify_only and output):
    _check_equal(source, model, directory)
  elif verify_only:
    with tempfile.TemporaryDirectory() as temporary:
      _write(model, epath.Path(temporary) / 'model', to, opset)
    print_summary([('verified', f'{source} can be written as {to}; nothing was kept')])
  else:
    _write_whole(model, directory, to, opset, finish)
    print_summary([('done', f'{directory}')])
  if push:
    hub.push(source, directory, push, functools.partial(_write, to=to))


def _check_uploadable(directory: epath.Path, to: str, quantizes: bool):
  """Raises UserError if an existing folder is not one of the format `to`."""
  require(not quantizes, f'--quantize has no effect here: --output={directory} already '
                         'exists and is only uploaded')
  files = ('config.json', hub.CARD,
           *([text_layout.FILE] if to == 'sentence_transformers' else []))
  require(all((directory / name).exists() for name in files),
          f'--output={directory} already exists and is not a folder of --to={to}')


def _check_equal(source: str, model: Pretrained, directory: epath.Path):
  """Compares a model with the model in a folder; raises UserError if they differ."""
  other = load_lib.load(str(directory))
  # A folder of sentence-transformers may lack heads of the source: compare only the part
  # that it can hold.
  if (directory / text_layout.FILE).exists():
    model = sentence_transformers.exported(model)
  print_summary(verify.compare(model, other, directory))
  print_summary([('equal', f'{source} and {directory} hold the same model')])


def _stranger(directory: epath.Path) -> str:
  """Returns a file in a converted model that `convert` did not write; '' = none."""
  folder = pathlib.Path(directory)
  files = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob('*'))
           if path.is_symlink() or not path.is_dir())
  return next((name for name in files
               if not any(fnmatch.fnmatchcase(name, x) for x in _WRITTEN)), '')


def _check_replaced(source: str, directory: epath.Path, overwrite: bool):
  """Raises UserError unless an existing output may be replaced and --overwrite is set."""
  # Only an output of `convert` is replaced: never a run, nor a folder with the source.
  is_model = (
      directory.is_dir() and not (directory / native.WORKDIR_FILE).exists()
      and any((directory / name).exists() for name in (
          _WEIGHTS, native.CHECKPOINT_FILE, stablehlo.FILE, onnx_folder.FILE)))
  inside = pathlib.Path(os.path.realpath(source)).is_relative_to(
      os.path.realpath(directory))
  exists = f'--output={directory} already exists'
  require(is_model and not inside,
          f'{exists} and is not only a converted model: give another --output')
  # The folder may hold files of the user, which must not be lost.
  stranger = _stranger(directory)
  require(not stranger,
          f'--output={directory} holds {stranger}, which is not part of a converted model: '
          'nothing is replaced, use another --output')
  require(overwrite, f'{exists}: give another --output, or --overwrite to replace it')


def _write_whole(model: Pretrained, directory: epath.Path, to: str, opset: int | None,
                 finish: Callable[[epath.Path], None] | None):
  """Writes a folder that gets its name only when it is complete and verified."""
  directory = storage.through_link(directory)  # a link stays a link
  partial = directory.parent / (directory.name + '.partial')
  require(not partial.exists() or partial.is_dir(),
          f'--output={directory}: {partial} is a file, and the conversion needs a folder of '
          'this name: move it away')
  # A call that was killed may have left this folder.
  with contextlib.suppress(FileNotFoundError):
    shutil.rmtree(partial)
  try:
    _write(model, partial, to, opset)
    if finish:
      finish(partial)
  except BaseException:
    shutil.rmtree(partial, ignore_errors=True)
    raise
  storage.replace_folder(partial, directory)
