"""Writes vectors of many texts to a file; a kill loses at most one window of texts."""

from collections.abc import Iterable, Sequence
import itertools
import json

from etils import epath
import numpy as np
import tqdm

from bert_jax.errors import require
from bert_jax.inference import json_lines
from bert_jax.inference.bert import Bert
from bert_jax.model.pooling import TOKEN_VECTORS
from bert_jax.runtime import storage

_WINDOW = 2048  # texts


def width_of(bert: Bert, pooling: str | None, max_len: int | None) -> int:
  """Returns the width of the vectors; raises UserError for a bad argument."""
  require(pooling != TOKEN_VECTORS,
          'pooling=none gives no vector of a text: use cls, mean or max')
  return bert.embed([], pooling, max_len=max_len).shape[1]


def write(bert: Bert, texts: Iterable[str], count: int, digest: str, path: epath.Path,
          prompts: Sequence[str], pooling: str | None = None, max_len: int | None = None,
          normalize: bool | None = True):
  """Writes a .npy file [count, D] float32 of vectors for a search; resumes after a kill.

  PATH.json identifies the job: a second run of a finished job computes nothing.

  Args:
    bert: the model.
    texts: `count` texts, at least one.
    digest: a digest of the texts.
    path: the file, on a local disk.
    prompts: `sentence_layout.QUERY_PROMPTS` or `DOCUMENT_PROMPTS`. Each text gets the
      first of these prompts that the model has, else none.
    pooling: cls, mean or max; None = the pooling of the model, or mean.
    max_len: see `Bert.embed`.
    normalize: True = vectors of length 1; None = as the model says.

  Raises:
    UserError: a remote path, a file of another origin at `path`, or an argument that
      `Bert.embed` refuses.
  """
  require(not storage.is_remote(str(path)),
          f'{path}: vectors are written to a local folder only')
  width = width_of(bert, pooling, max_len)  # checks the arguments before the file exists
  own = bert.dense
  prompt = own.first_prompt(prompts)
  job_file = path.parent / f'{path.name}.json'
  job = {'model': json_lines.identity(bert.model), 'texts': digest, 'count': count,
         'pooling': pooling, 'max_len': max_len, 'prompt': own.prompt(prompt)}
  if not normalize:
    job['normalize'] = normalize
  require(not path.exists() or job_file.exists(),
          f'{path} already exists and was not written by this command: move it away, or give '
          'another --output')
  before = json_lines.read_job(job_file) if path.exists() else {}
  done = before.pop('done', 0)
  done = done if before == job else 0  # another job starts over
  if not done:
    # Write the job file first: it marks the vectors as ours.
    storage.write_whole(job_file, json.dumps({**job, 'done': 0}))
    np.lib.format.open_memmap(path, 'w+', np.float32, (count, width))
  remaining = itertools.islice(texts, done, None)
  with tqdm.tqdm(total=count, initial=done, desc=path.name, unit=' texts',
                 disable=None) as bar:
    while window := list(itertools.islice(remaining, _WINDOW)):
      # Map the file again: the pages of one map would count as memory of the process.
      vectors = np.load(path, mmap_mode='r+')
      vectors[done:done + len(window)] = bert.embed(window, pooling, normalize=normalize,
                                                    max_len=max_len, prompt=prompt)
      vectors.flush()
      done += len(window)
      # After the flush: the count never exceeds the vectors in the file.
      storage.write_whole(job_file, json.dumps({**job, 'done': done}))
      bar.update(len(window))
