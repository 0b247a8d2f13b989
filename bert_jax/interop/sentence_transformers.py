"""Reads and writes the folders of sentence-transformers: an encoder and what stands behind it."""

from collections.abc import Iterator
import dataclasses
import importlib.util

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.data import inputs as inputs_lib
from bert_jax.interop import huggingface, sentence_layout, tokenizer_checks, verify
from bert_jax.interop.pretrained import Pretrained
from bert_jax.interop.sentence_layout import SentenceLayout
from bert_jax.model import architectures, pooling
from bert_jax.model.encoder import Batch

_HEADER = ('library_name: sentence-transformers', 'pipeline_tag: sentence-similarity', 'tags:',
           '- sentence-transformers', '- sentence-similarity', '- feature-extraction')
_USAGE = ('from sentence_transformers import SentenceTransformer', '',
          f"model = SentenceTransformer('{huggingface.PLACEHOLDER}')",
          "vectors = model.encode(['A first text.', 'A second text.'])")


def load(directory: epath.Path) -> Pretrained:
  """Reads a folder with modules.json, whose encoder is in the Hugging Face layout.

  A folder with an encoder alone, such as that of a cross-encoder, is read as `huggingface` does.

  Raises:
    UserError: a module is unknown, or something is wrong with the encoder.
  """
  model = huggingface.load(directory / sentence_layout.listed(directory)[0].path)
  return dataclasses.replace(
      model, facts={**model.facts, 'source': str(directory)},
      tokenizer=model.tokenizer.parsing(True),  # as SentenceTransformer does
      sentence=sentence_layout.read(directory, model.config, model.tokenizer))


def exported(model: Pretrained) -> Pretrained:
  """The model as a folder has it: without heads, with a way to vectors, by default the mean."""
  layout = model.sentence or SentenceLayout()
  layout = dataclasses.replace(layout, max_len=layout.max_len or model.config.max_positions)
  params = model.params
  if not set(model.groups) <= {'pooler'}:
    bert = {name: x for name, x in params['params']['bert'].items() if name != 'pooler'}
    params = {'params': {'bert': bert}}
  return dataclasses.replace(model, params=params, sentence=layout, task='', labels=(), problem='')


def save(model: Pretrained, directory: epath.Path):
  """Writes a model that `exported` gave; makes the folder if there is none.

  Raises:
    UserError: transformers has no such encoder.
  """
  huggingface.save(model, directory)
  (directory / 'README.md').write_text(huggingface.card(model, _HEADER, _USAGE))
  model.sentence.write(directory, model.config.hidden_size)


def _vectors(model: Pretrained, texts: list[str]) -> np.ndarray:
  """The vectors of texts by our encoder, each in a row of its own: [B, D']."""
  layout, tokenizer = model.sentence, model.tokenizer
  prepared = layout.prepared([(text,) for text in texts], layout.prompt(''))
  room = layout.max_len - inputs_lib.special_tokens(tokenizer, 1)
  rows = [inputs_lib.join(tokenizer, ids[:room])
          for ids in tokenizer.encode_batch([text for text, in prepared])]
  placed = inputs_lib.place(rows, np.arange(len(rows)), np.arange(len(rows)), rows=len(rows),
                            length=max(len(row.ids) for row in rows), slots=1,
                            pad_id=tokenizer.pad_id)
  batch = Batch(*map(jnp.asarray, placed[:4]))
  encoder = architectures.encoder(dataclasses.replace(model.config, dtype='float32'))

  def run(params):
    hidden = encoder.apply({'params': params['params']['bert']}, batch, method='encode')
    parts = [pooling.pool(hidden, batch.pair_index, batch.positions, jnp.asarray(placed.starts),
                          how)[:, 0] for how in layout.pooling]
    return jnp.concatenate(parts, axis=-1)

  return layout.apply(np.asarray(jax.jit(run)(model.params)))


def compare(model: Pretrained, directory: epath.Path) -> Iterator[tuple[str, str]]:
  """(name, result) lines that show the folder to give our vectors in sentence-transformers.

  Raises:
    UserError: the vectors differ.
  """
  if not importlib.util.find_spec('sentence_transformers'):
    yield 'note', 'not compared with sentence-transformers: it is not installed'
    return
  import sentence_transformers  # only here: all else works without it

  # Strings whose tokens each published tokeniser agrees on; `verify.compare` compares the others.
  texts = [text for text in tokenizer_checks.HOSTILE[:7] if text.strip()]
  theirs = sentence_transformers.SentenceTransformer(
      str(directory), device='cpu', local_files_only=True)
  vectors = theirs.encode(texts, prompt='', show_progress_bar=False)
  yield from verify.compare_outputs({'vectors': _vectors(model, texts)}, {'vectors': vectors},
                                    'sentence-transformers')
