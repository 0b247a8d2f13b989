"""Reads and writes folders of sentence-transformers, with their pooling and prompts."""

from collections.abc import Callable, Iterator
import dataclasses
import functools
from typing import NamedTuple

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.data import inputs as inputs_lib
from bert_jax.data.late_inputs import DOCUMENT, QUERY
from bert_jax.data.tokenizers.library import LibraryTokenizer
from bert_jax.data.tokens import Tokens
from bert_jax.errors import require
from bert_jax.interop import (
  huggingface,
  late_layout,
  sentence_layout,
  sparse_layout,
  tokenizer_checks,
  verify,
)
from bert_jax.interop.cross_layout import CrossLayout
from bert_jax.interop.late_layout import LateLayout
from bert_jax.interop.pretrained import Pretrained
from bert_jax.interop.sentence_layout import SentenceLayout
from bert_jax.interop.sparse_layout import SparseLayout
from bert_jax.model import architectures, pooling
from bert_jax.tasks import late_interaction
from bert_jax.tasks.sequence_classification import BertForSequenceClassification
from bert_jax.tasks.sparse_embedding import BertForSparseEmbedding

_LIBRARY = 'library_name: sentence-transformers'
_TAGS = ('tags:', '- sentence-transformers')


class _Kind(NamedTuple):
  """A class of sentence-transformers."""

  name: str
  header: tuple[str, ...]  # the metadata of the model card
  usage: tuple[str, ...]  # the code in the model card


_TEXTS = "(['A first text.', 'A second text.'])"
_KINDS = {
    SentenceLayout: _Kind(
        name='SentenceTransformer',
        header=(_LIBRARY, 'pipeline_tag: sentence-similarity', *_TAGS,
                '- sentence-similarity', '- feature-extraction'),
        usage=(f'vectors = model.encode{_TEXTS}',)),
    SparseLayout: _Kind(
        name='SparseEncoder',
        header=(_LIBRARY, 'pipeline_tag: feature-extraction', *_TAGS, '- sparse-encoder',
                '- splade'),
        usage=(f'weights = model.encode{_TEXTS}',)),
    LateLayout: _Kind(
        name='MultiVectorEncoder',
        header=(_LIBRARY, 'pipeline_tag: sentence-similarity', *_TAGS,
                '- multi-vector', '- colbert'),
        usage=("queries = model.encode_query(['A query.'])",
               "documents = model.encode_document(['A document.'])",
               'scores = model.similarity(queries, documents)')),
    CrossLayout: _Kind(
        name='CrossEncoder',
        header=(_LIBRARY, 'pipeline_tag: text-ranking', *_TAGS, '- cross-encoder',
                '- reranker'),
        usage=("scores = model.predict([('A query.', 'A document.')])",)),
}


def load(directory: epath.Path) -> Pretrained:
  """Reads a folder with modules.json, whose encoder is in the Hugging Face layout.

  A folder with only an encoder gives the same model as `huggingface.load`.

  Raises:
    UserError: a module is unknown, or the encoder is not readable.
  """
  model = huggingface.load(directory / sentence_layout.listed(directory)[0].path)
  layout = sentence_layout.read(directory, model.config, model.tokenizer)
  facts = {**model.facts, 'source': str(directory)}
  if isinstance(layout, SparseLayout):
    require('mlm' in model.groups,
            f'{directory}: its {sparse_layout.MODULE} needs the logits of a masked LM, '
            'but its encoder has no such head')
  if isinstance(layout, CrossLayout):
    require(model.task == 'sequence_classification',
            f'{directory} is a cross-encoder, but its encoder has no classifier')
    facts['max_len'] = layout.max_len
    # Versions of the package write the activation into different files of a folder.
    own = model.text_layout.activation if isinstance(model.text_layout, CrossLayout) else ''
    layout = dataclasses.replace(layout, activation=layout.activation or own)
  # sentence-transformers parses special tokens in texts, so "[SEP]" is one token.
  tokenizer = model.tokenizer.parsing(True)
  if isinstance(layout, LateLayout) and layout.marks:
    tokenizer = tokenizer.with_special(layout.marks)
  # As in sentence-transformers: special tokens such as "[Q] " keep their capitals, and
  # positions in the text stay the same.
  if layout and layout.lowercase and isinstance(tokenizer, LibraryTokenizer):
    tokenizer = tokenizer.lowercased()
    layout = dataclasses.replace(layout, lowercase=False)
  model = dataclasses.replace(model, facts=facts, text_layout=layout, tokenizer=tokenizer)
  return late_layout.with_projection(model) if isinstance(layout, LateLayout) else model


def exported(model: Pretrained) -> Pretrained:
  """Returns the part of the model that a folder can hold.

  A cross-encoder keeps its classifier, a sparse encoder its masked-LM head, and a model of
  late interaction its projection. Any other model loses its heads, and pools by the mean
  unless it defines another way.
  """
  layout = model.text_layout or SentenceLayout()
  layout = dataclasses.replace(
      layout, max_len=layout.max_len or model.config.max_positions)
  if isinstance(layout, CrossLayout | LateLayout):
    return dataclasses.replace(model, text_layout=layout)
  if isinstance(layout, SparseLayout):
    kept, keeps_pooler = ('bert', 'mlm_'), model.config.pooler_is_shared
  else:
    # A pooler that was trained with a head (nsp, a classifier) means nothing without it.
    kept, keeps_pooler = ('bert',), set(model.groups) <= {'pooler'}
  tree = {name: x for name, x in model.params['params'].items() if name.startswith(kept)}
  if not keeps_pooler:
    tree['bert'] = {name: x for name, x in tree['bert'].items() if name != 'pooler'}
  return dataclasses.replace(
      model, params={'params': tree}, text_layout=layout, task='', labels=(), problem='')


def save(model: Pretrained, directory: epath.Path):
  """Writes a model that `exported` returned, and creates the folder.

  Raises:
    UserError: transformers has no class for this encoder.
  """
  layout = model.text_layout
  if isinstance(layout, LateLayout):
    model = late_layout.without_projection(model)
  huggingface.save(model, directory)
  kind = _KINDS[type(model.text_layout)]
  usage = (f'from sentence_transformers import {kind.name}', '',
           f"model = {kind.name}('{huggingface.PLACEHOLDER}')", *kind.usage)
  (directory / 'README.md').write_text(huggingface.card(model, kind.header, usage))
  model.text_layout.write(directory, model.config.hidden_size)


def _one_in_a_row(inputs: list[inputs_lib.Input],
                  pad_id: int) -> tuple[Tokens, jax.Array]:
  """Places each text or pair into its own row; returns the rows and their starts."""
  placed = inputs_lib.one_per_row(inputs, pad_id)
  return jax.tree.map(jnp.asarray, (placed.tokens, placed.starts))


def _late_vectors(model: Pretrained, texts: list[str], role: str) -> np.ndarray:
  """Computes the vectors of all tokens that count: [tokens, D']."""
  layout, config = model.text_layout, dataclasses.replace(model.config, dtype='float32')
  inputs, counts = layout.inputs(texts, model.tokenizer, role, config.max_positions)
  batch, starts = _one_in_a_row(inputs, model.tokenizer.pad_id)
  head = late_interaction.BertForLateInteraction(config, len(model.labels),
                                                 layout.normalizes)
  with verify.whole_float32():
    vectors = np.asarray(jax.jit(head.apply)(model.params, batch, starts))
  return np.concatenate([x[:len(keep)][keep] for x, keep in zip(vectors, counts)])


def _vectors(model: Pretrained, texts: list[tuple[str, ...]]) -> np.ndarray:
  """Computes our vectors, weights or scores of texts or pairs: [B, D]."""
  layout, config = model.text_layout, dataclasses.replace(model.config, dtype='float32')
  inputs, _ = inputs_lib.text_inputs(layout.prepared(texts, ''), model.tokenizer,
                                     layout.max_len)
  batch, starts = _one_in_a_row(inputs, model.tokenizer.pad_id)

  def run(params):
    if isinstance(layout, SparseLayout):
      head = BertForSparseEmbedding(config, layout.pooling, layout.activation)
      return head.apply(params, batch, starts)[:, 0, :config.vocab_size]
    if isinstance(layout, CrossLayout):
      head = BertForSequenceClassification(config, len(model.labels))
      return head.apply(params, batch, starts)[:, 0]
    encoder = architectures.make_encoder(config)
    hidden = encoder.apply({'params': params['params']['bert']}, batch, method='encode')
    return jnp.concatenate([
        pooling.pool(hidden, batch.text_ids, batch.positions, starts, how)[:, 0]
        for how in layout.pooling], axis=-1)

  with verify.whole_float32():
    return layout.finished(np.asarray(jax.jit(run)(model.params)))


def _compare_array(outputs: Callable[[Pretrained], np.ndarray], model: Pretrained,
                   expected: np.ndarray, name: str) -> Iterator[tuple[str, str]]:
  """Compares `outputs(model)` with the `expected` array of sentence-transformers."""
  return verify.compare_outputs(
      {name: outputs(model)}, {name: expected}, 'sentence-transformers',
      lambda: {name: outputs(verify.last_bits_changed(model))})


def compare(model: Pretrained, directory: epath.Path) -> Iterator[tuple[str, str]]:
  """Compares our outputs with the outputs of sentence-transformers for a folder.

  Yields:
    (name, result) lines for the user.

  Raises:
    UserError: the outputs differ.
  """
  if obstacle := verify.missing('sentence-transformers'):
    yield 'note', f'not compared with sentence-transformers: {obstacle}'
    return
  import sentence_transformers  # only here: everything else works without it

  # Only strings that all published tokenizers encode the same. `verify.compare` covers
  # tokenization.
  texts = [text for text in tokenizer_checks.HOSTILE[:7] if text.strip()]
  theirs = getattr(sentence_transformers, _KINDS[type(model.text_layout)].name)(
      str(directory), device='cpu', local_files_only=True)
  options = {'prompt': '', 'show_progress_bar': False}
  if isinstance(model.text_layout, LateLayout):
    for role, encode in ((QUERY, theirs.encode_query),
                         (DOCUMENT, theirs.encode_document)):
      expected = encode(texts, show_progress_bar=False, convert_to_numpy=True)
      yield from _compare_array(
          functools.partial(_late_vectors, texts=texts, role=role), model,
          np.concatenate(expected), f'vectors of a {role}')
    return
  if isinstance(model.text_layout, CrossLayout):
    name, texts = 'scores', list(zip(texts, texts[::-1]))
    expected = theirs.predict(texts, **options).reshape(len(texts), -1)
  else:
    name, texts = 'vectors', [(text,) for text in texts]
    is_sparse = isinstance(model.text_layout, SparseLayout)
    options |= {'convert_to_sparse_tensor': False} if is_sparse else {}
    expected = np.asarray(theirs.encode([text for text, in texts], **options))
  yield from _compare_array(
      functools.partial(_vectors, texts=texts), model, expected, name)
