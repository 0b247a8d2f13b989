"""Reads data sets of tensorflow-datasets, without TensorFlow."""

import importlib.util
import os
import sys
import types
from typing import Any

from etils import epath

from bert_jax.errors import Failed, UserError

# tfds imports its packages in turn and stops at the first error. Without h5py, which
# comes with TensorFlow, nearest_neighbors fails. Then tfds never imports glue, wikipedia
# and c4. So bert_jax imports the text packages itself.
_TFDS_OF_TEXT = ('question_answering', 'structured', 'summarization', 'text',
                 'text_simplification', 'translate')


def open_split(name: str, split: str) -> Any:
  """Opens a split of a tensorflow-datasets data set.

  Data sets are in the folder TFDS_DATA_DIR, or in tfds' default folder. A missing data
  set is downloaded and prepared.

  Returns:
    A sequence of examples, which are dicts.

  Raises:
    Failed: a download failed.
    UserError: tfds does not know the data set, or cannot read it.
  """
  try:
    import requests  # tfds downloads with it
    import tensorflow_datasets as tfds  # slow to import, and few runs need it
    for package in _TFDS_OF_TEXT:
      importlib.import_module(f'tensorflow_datasets.{package}')
    _set_up_downloads()
    # Not in builder_kwargs: there the format would also apply to folders that were
    # prepared in another format.
    return tfds.data_source(name, split=split, data_dir=os.environ.get('TFDS_DATA_DIR'),
                            download_and_prepare_kwargs={'file_format': 'array_record'})
  except ImportError as e:
    raise UserError(
        f'tfds:{name} needs a package that is not installed ({_first_line(e)}): install '
        'it, or set TFDS_DATA_DIR to a folder with the data set as array_record') from e
  except tfds.core.registered.DatasetNotFoundError as e:
    raise UserError(
        f'tfds:{name}: tensorflow-datasets does not know this data set') from e
  except (requests.RequestException, tfds.core.download.DownloadError,
          tfds.core.download.download_manager.NonMatchingChecksumError,
          tfds.core.download.extractor.ExtractError) as e:
    url = f'{e.request.url}: ' if getattr(e, 'request', None) else ''
    raise Failed(
        f'tfds:{name}: the download failed ({url}{_first_line(_cause(e))}): run the same '
        'command again, or set TFDS_DATA_DIR to a folder in which another machine '
        'prepared the data set with file_format=array_record') from e
  except (NotImplementedError, AssertionError, ValueError, OSError) as e:
    raise UserError(f'tfds:{name} cannot be read: {_first_line(e)} Without TensorFlow a '
                    'data set must be prepared with file_format=array_record') from e


def _set_up_downloads():
  """Makes tfds retry less, work without TensorFlow, and show no bar in a log file."""
  import tensorflow_datasets as tfds
  from tensorflow_datasets.core.download import downloader, extractor
  # Six attempts in 6 seconds. The default takes 3.5 minutes.
  downloader.MAX_RETRIES = min(downloader.MAX_RETRIES, 5)
  if not sys.stderr.isatty():
    tfds.disable_progress_bar()
  # tfds reads archives with TensorFlow's GFile.
  if importlib.util.find_spec('tensorflow') is None:
    gfile = types.SimpleNamespace(GFile=lambda path, mode: epath.Path(path).open(mode))
    extractor.tf = types.SimpleNamespace(io=types.SimpleNamespace(gfile=gfile),
                                         compat=types.SimpleNamespace(as_text=str))


def _cause(error: BaseException) -> BaseException:
  """The first error of the chain that led to `error`."""
  while cause := error.__cause__ or error.__context__:
    error = cause
  return error


def _first_line(error: BaseException) -> str:
  return str(error).partition('\n')[0]
