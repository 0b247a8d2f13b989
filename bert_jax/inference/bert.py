"""A trained model for users: vectors of texts, filled masks, next sentences, scores."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, Literal, NamedTuple, overload

import jax
import numpy as np

from bert_jax.data import inputs as inputs_lib
from bert_jax.data.late_inputs import DOCUMENT, QUERY
from bert_jax.errors import require, require_choice
from bert_jax.inference import forward
from bert_jax.inference.loaded_model import LoadedModel, Text, check_list, put_tokens
from bert_jax.interop import load as load_lib
from bert_jax.interop.cross_layout import CrossLayout
from bert_jax.interop.late_layout import LateLayout
from bert_jax.interop.sentence_layout import DOCUMENT_PROMPTS, QUERY_PROMPTS, unit
from bert_jax.interop.sparse_layout import SparseLayout
from bert_jax.model.pooling import POOLINGS, TOKEN_VECTORS, combine_chunks_on_host
from bert_jax.runtime import platforms
from bert_jax.tasks import late_interaction, reranking

DTYPES = ('float32', 'bfloat16', 'auto')  # of matrix products
# Tokens scored at once; each makes a masked copy of its text.
_SCORED_AT_ONCE = 4096
_FILLED_AT_ONCE = 1024  # masks; each has logits of the whole vocabulary


class Encoded(NamedTuple):
  """The outputs of the encoder for B texts of up to L tokens, with special tokens."""

  hidden: np.ndarray  # [B, L, D * layers] float32, 0 on padding
  pooled: np.ndarray | None  # [B, D] float32, pooled [CLS]; None without a pooler
  mask: np.ndarray  # [B, L] bool, True on tokens


class Bert(LoadedModel):
  """A BERT with its tokenizer and its parameters.

  Every method takes any number of texts and packs them into batches of a few fixed
  shapes. A text is a string, or a pair of strings that makes one input.

  Attributes:
    name: the folder or name that `load` read; '' = made from a `Pretrained`.

  Raises:
    UserError: (each method) a text is not a string; a text that may not be cut is longer
      than the position table; the model lacks the head.
  """

  name: str = ''

  def encode(self, texts: Sequence[Text], *, layers: Sequence[int] = (-1,),
             max_len: int | None = None) -> Encoded:
    """Returns hidden states, pooled [CLS] and mask; cuts long texts at the end.

    `layers`: see `embed`. `max_len`: tokens of a text, special tokens included; None = as
    many as the model has positions, even if its folder sets a lower limit.
    """
    rows, _ = self._rows(self.dense.prepared(self._strings(texts), ''), 'head', max_len)
    has_pooler = 'pooler' in self.model.groups
    run = forward.hidden_and_pooled if has_pooler else forward.hidden_states
    function = functools.partial(run, self.config, layers=self._layers(layers))
    pooled = np.zeros((len(rows), self.config.hidden_size), np.float32)
    hidden: list[Any] = [None] * len(rows)
    for packed, output in self._run(rows, function):
      if has_pooler:
        output, of_texts = output
        is_text = packed.index >= 0
        pooled[packed.index[is_text]] = of_texts[is_text]
      put_tokens(hidden, rows, packed, output)
    # The batches have mixed lengths: pad all texts to the longest.
    length = max((len(h) for h in hidden), default=0)
    mask = np.arange(length) < np.array([len(h) for h in hidden])[:, None]
    padded = np.zeros((*mask.shape, hidden[0].shape[1] if hidden else 0), np.float32)
    padded[mask] = np.concatenate(hidden) if hidden else 0
    return Encoded(padded, pooled if has_pooler else None, mask)

  def _layers(self, layers: Sequence[int]) -> tuple[int, ...]:
    n = self.config.num_layers
    require(len(layers) > 0, 'layers is empty: give one layer at least, such as -1')
    for i in layers:
      require(-n - 1 <= i <= n,
              f'layer {i} does not exist: the model has 0 (embeddings) to {n}, or -1 to '
              f'{-n - 1} from the end')
    return tuple(int(i) for i in layers)

  @overload  # 'none' is a str too, and the first signature counts
  def embed(self, texts: Sequence[Text], pooling: Literal['none'], *,  # type: ignore[overload-overlap]
            normalize: bool | None = None, layers: Sequence[int] = (-1,), long: str = 'head',
            max_len: int | None = None, prompt: str | None = None,
            dim: None = None) -> list[np.ndarray]: ...

  @overload
  def embed(self, texts: Sequence[Text], pooling: str | None = None, *,
            normalize: bool | None = None, layers: Sequence[int] = (-1,), long: str = 'head',
            max_len: int | None = None, prompt: str | None = None,
            dim: int | None = None) -> np.ndarray: ...

  def embed(self, texts: Sequence[Text], pooling: str | None = None, *,
            normalize: bool | None = None, layers: Sequence[int] = (-1,),
            long: str = 'head', max_len: int | None = None, prompt: str | None = None,
            dim: int | None = None) -> Any:
    """Returns a vector for each text.

    A folder of sentence-transformers sets its own pooling, dense layers, norm, prompts
    and longest input; arguments override them.

    Args:
      texts: B strings, or pairs.
      pooling: one of `model.pooling.POOLINGS`, such as 'cls', 'mean' or 'max'; 'none' = a
        vector for each token, without dense layers and prompts; None = the pooling of the
        model, else the mean.
      normalize: True = scale to length 1; None = as the model's folder says, else no.
        With `dim`, the vectors always have length 1.
      layers: layers to concatenate: 0 = embeddings, 1..N, or from the end, -1 = the last.
        (-4, -3, -2, -1) is the best choice for NER in Devlin et al. 2019, table 7.
      long: how to read a text of more than `max_len` tokens: its 'head', 'tail' or
        'head_tail' (128 + 382), or all of it in chunks: 'chunks_mean', 'chunks_max',
        'chunks_attention'.
      max_len: tokens of a text, special tokens included; None = the limit of the model,
        else all positions. For pooling 'none', None = all positions.
      prompt: the name of a prompt of the model, which precedes each text; '' = no prompt;
        None = the default prompt of the model, if any.
      dim: keeps the first `dim` entries, scaled to length 1; None = all.

    Returns:
      [B, D * layers * poolings] float32, or as wide as the last dense layer of the model.
      For 'none' a list of [n, D * layers]: the n tokens of each text, no special tokens.
    """
    self._check_pooling(pooling)
    own, layers, texts = self.dense, self._layers(layers), self._strings(texts)
    require(dim is None or normalize is not False,
            'normalize=False has no effect here: dim scales each vector to length 1')
    if pooling == TOKEN_VECTORS:
      require(long == 'head' and not prompt and dim is None,
              'pooling=none gives the vectors of the first tokens: long must be head, '
              'without prompt and dim')
      return self._token_vectors(texts, layers, max_len, normalize)
    before, poolings = own.prompt(prompt), (pooling,) if pooling else own.pooling
    require(not before or long not in ('tail', 'head_tail'),
            f'long={long} would cut off the prompt {before!r}: use head or chunks, or '
            "prompt=''")
    rows, owners = self._rows(own.prepared(texts, before), long,
                              own.max_len if max_len is None else max_len)
    shift = self._unpooled(rows, owners, before)
    function = functools.partial(forward.vectors, self.config, layers=layers,
                                 poolings=poolings)
    vectors = self.per_text(rows, function, shift)
    if vectors is None:
      width = self.config.hidden_size * len(layers) * len(poolings)
      vectors = np.zeros((0, width), np.float32)
    # Before the dense layers: they take one vector of each text.
    if len(owners) > len(texts):
      vectors = combine_chunks_on_host(vectors, owners, long)
    vectors = own.finished(vectors, normalize)
    require(dim is None or 1 <= dim <= vectors.shape[1],
            f'dim={dim}: the vectors of this model have 1 to {vectors.shape[1]} entries')
    return vectors if dim is None else unit(vectors[:, :dim])

  def _check_pooling(self, pooling: str | None):
    if pooling is not None:
      require_choice('pooling', pooling, (*POOLINGS, TOKEN_VECTORS))
    require(pooling is not None or not isinstance(self.model.text_layout, LateLayout),
            'this model has a vector for each token: predict --task=late_interaction gives '
            'them, and pooling=mean the mean of the hidden states')
    require(pooling is not None
            or not isinstance(self.model.text_layout, SparseLayout | CrossLayout),
            'this model has no vector of a text: predict --task=sparse_embedding gives '
            'the weights of a SPLADE model, --task=reranking the scores of a reranker, '
            'and pooling=mean the mean of the hidden states')

  def _unpooled(self, rows: Sequence[inputs_lib.Input], owners: np.ndarray,
                prompt: str) -> np.ndarray:
    """Returns how many tokens at the start of each row pooling skips: [rows] int32."""
    # If pooling skips the prompt, it skips [CLS] too.
    is_hidden = prompt and not self.dense.include_prompt
    ids, = self._ids(self.dense.prepared([('',)], prompt))[0]
    hidden = len(self.tokenizer.around.one[0]) + len(ids) if is_hidden else 0
    # Only the first chunk of a long text begins with the prompt.
    return np.array([min(hidden, len(row.ids) - 1) * is_first
                     for row, is_first in zip(rows, np.diff(owners, prepend=-1))], np.int32)

  def _token_vectors(self, texts: Sequence[Text], layers: tuple[int, ...],
                     max_len: int | None, normalize: bool | None) -> list[np.ndarray]:
    """Returns the [n, D * layers] hidden states of each text, without special tokens."""
    rows, _ = self._rows(self.dense.prepared(self._strings(texts), ''), 'head', max_len)
    function = functools.partial(forward.hidden_states, self.config, layers=layers)
    keeps = [inputs_lib.is_text(self.tokenizer, row) for row in rows]
    return [unit(hidden[keep]) if normalize else hidden[keep]
            for hidden, keep in zip(self.per_token(rows, function), keeps)]

  def rank(self, query: str, documents: Sequence[str]) -> list[dict[str, Any]]:
    """Orders documents by the scores of this cross-encoder, best first.

    Returns:
      [{'document': its index, 'score'}]; the scores equal CrossEncoder.predict.
    """
    check_list(documents)
    documents = list(documents)
    self._strings([(query, document) for document in documents])
    return reranking.rank(self, [(query, documents)])[0]['ranking']

  def search(self, queries: Sequence[str], documents: Sequence[str],
             top_k: int = 10) -> list[list[dict[str, Any]]]:
    """Finds the documents nearest to each query, best first.

    Nearest means the largest cosine, or product if the model says so, or MaxSim of a
    late-interaction model. Prompts of the model named 'query' and 'document' (or
    'passage', 'corpus') precede the texts. `bert_jax.evaluate --suite=retrieval` searches
    corpora larger than the memory.

    Returns:
      A list for each query: at most `top_k` of {'document': its index, 'score'}.
    """
    check_list(queries)
    check_list(documents)
    require(top_k >= 1, f'top_k={top_k} must be at least 1')
    if isinstance(self.model.text_layout, LateLayout):
      queries, documents = (self._single(texts) for texts in (queries, documents))
      scores = late_interaction.max_sims(*(
          late_interaction.vectors(self, texts, role)
          for texts, role in ((queries, QUERY), (documents, DOCUMENT))))
    else:
      own = self.dense
      normalize = own.search_normalizes
      a, b = (self.embed(texts, prompt=own.first_prompt(names), normalize=normalize)
              for texts, names in ((queries, QUERY_PROMPTS),
                                   (documents, DOCUMENT_PROMPTS)))
      scores = a @ b.T  # [queries, documents]
    best = np.argsort(-scores, axis=1, kind='stable')[:, :top_k]
    return [[{'document': int(i), 'score': float(of_query[i])} for i in order]
            for of_query, order in zip(scores, best)]

  def similarity(self, texts: Sequence[Text], others: Sequence[Text] | None = None,
                 **options) -> np.ndarray:
    """Returns the cosines of all pairs: [B, B'] float32; `options`: see `embed`."""
    require(options.get('pooling') != TOKEN_VECTORS and 'normalize' not in options,
            'similarity compares one vector of length 1 for each text: pooling cannot be '
            'none, and normalize has no effect')
    a = self.embed(texts, normalize=True, **options)
    return a @ (a if others is None else self.embed(others, normalize=True, **options)).T

  def fill_mask(self, text: str | Sequence[str], top_k: int = 5) -> list:
    """Returns the likeliest tokens for each "[MASK]" of a text.

    Returns:
      {'position', 'candidates': [{'token', 'probability', 'logit', 'surprisal'}]} for
      each mask, the likeliest first. Positions count [CLS] as 0; surprisal is -log
      probability in nats. For several texts a list of these.
    """
    self.require_head('mlm', 'masked-LM head')
    require(top_k >= 1, f'top_k={top_k} must be at least 1')
    if isinstance(text, str):
      return self.fill_mask([text], top_k)[0]
    check_list(text)
    text = list(text)
    if not text:
      return []
    # A batch reads one position of each input, so n masks make n equal inputs.
    run = functools.partial(forward.mlm_logits, self.config)
    mask, rows, owners, positions = self.tokenizer.mask_id, [], [], []
    for i, (one, *pair) in enumerate(self._strings(text)):
      require(not pair, f'text {i + 1} is a pair: fill the masks of single texts')
      row = self._whole_row(self.tokenizer.encode_with_masks(one))
      masked = [j for j, token in enumerate(row.ids) if token == mask]
      require(bool(masked), f'no [MASK] in {one!r}')
      rows += [row] * len(masked)
      owners += [i] * len(masked)
      positions += masked
    results: list[list] = [[] for _ in text]
    for first in range(0, len(rows), _FILLED_AT_ONCE):
      part = slice(first, first + _FILLED_AT_ONCE)
      logits = self.per_text(rows[part], run, np.array(positions[part]))
      for i, position, row in zip(owners[part], positions[part], logits):
        candidates = self._likeliest(row[:self.config.vocab_size], top_k)
        results[i].append({'position': position, 'candidates': candidates})
    return results

  def _likeliest(self, logits: np.ndarray, top_k: int) -> list[dict[str, Any]]:
    """Returns the candidates of one mask, whose logits are [V]."""
    # In float64: small probabilities lose their digits in float32.
    surprisal = np.logaddexp.reduce(logits.astype(np.float64)) - logits
    best = np.argsort(surprisal, kind='stable')[:top_k]
    return [{'token': token, 'probability': float(np.exp(-surprisal[j])),
             'logit': float(logits[j]), 'surprisal': float(surprisal[j])}
            for j, token in zip(best, self.tokenizer.tokens(best))]

  def next_sentence(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """Returns the probability that the second text of each pair follows the first."""
    self.require_head('nsp', 'next-sentence head')
    ids = self._ids(pairs)
    require(all(len(of_text) == 2 for of_text in ids),
            'a next sentence needs pairs of texts')
    rows = [self._whole_row(*of_pair) for of_pair in ids]
    logits = self.per_text(rows, functools.partial(forward.nsp_logits, self.config))
    return [] if logits is None else jax.nn.softmax(logits)[:, 0].tolist()

  @overload
  def score(self, text: str, long: str | None = None) -> dict[str, Any]: ...

  @overload
  def score(self, text: list[str] | tuple[str, ...],
            long: str | None = None) -> list[dict[str, Any]]: ...

  def score(self, text: str | Sequence[str], long: str | None = None) -> Any:
    """Scores each token of a text, masked alone (Salazar et al. 2020).

    Args:
      text: one text, or several, whose masked copies share batches.
      long: for a text that is longer than the position table: 'chunks' = score each token
        within the chunk around it; None = raise UserError.

    Returns:
      {'tokens': [{'token', 'surprisal'}], 'surprisal', 'pseudo_perplexity'}: -log P(token
      | the others) in nats, their sum, and the exponential of their mean. For several
      texts a list of these.
    """
    self.require_head('mlm', 'masked-LM head')
    require(long in (None, 'chunks'),
            f'long={long!r} is unknown for scores: use chunks, or leave it out')
    if isinstance(text, str):
      return self.score([text], long)[0]
    check_list(text)
    text = list(text)
    special = inputs_lib.count_special(self.tokenizer, 1)
    longest, texts = self.config.max_positions, []
    for one, (ids, *pair) in zip(text, self._ids(text)):
      require(not pair, f'{one!r} is a pair: score each of its texts')
      require(bool(ids), f'{one!r} holds no token to score')
      require(bool(long) or len(ids) + special <= longest,
              f'a text of {len(ids) + special} tokens is longer than the {longest} '
              'positions of the model: shorten it, or score it with long=chunks')
      texts.append(ids)
    results = []
    for ids, surprisals in zip(texts, self._surprisals(texts, longest - special)):
      total = sum(surprisals)
      with np.errstate(over='ignore'):  # the writer reports infinity
        perplexity = float(np.exp(total / len(ids)))
      tokens = [{'token': token, 'surprisal': surprisal}
                for token, surprisal in zip(self.tokenizer.tokens(ids), surprisals)]
      results.append({'tokens': tokens, 'surprisal': total,
                      'pseudo_perplexity': perplexity})
    return results

  def _surprisals(self, texts: Sequence[list[int]], room: int) -> list[list[float]]:
    """Returns the surprisals of the tokens of each text, in nats.

    Each copy of a text has one masked token, within a chunk of at most `room` tokens. The
    copies of all texts share packed rows.
    """
    places = [(ids, i) for ids in texts for i in range(len(ids))]
    surprisals, run = [], functools.partial(forward.surprisals, self.config)
    for first in range(0, len(places), _SCORED_AT_ONCE):
      rows, positions, targets = [], [], []
      for ids, i in places[first:first + _SCORED_AT_ONCE]:
        # The token is in the middle of its chunk, except near an end of the text.
        start = max(0, min(i - room // 2, len(ids) - room))
        masked = ids[start:start + room]
        masked[i - start] = self.tokenizer.mask_id
        rows.append(inputs_lib.join(self.tokenizer, masked))
        positions.append(len(self.tokenizer.around.one[0]) + i - start)
        targets.append(ids[i])
      surprisals += self.per_text(rows, run, np.array(positions),
                                  np.array(targets)).tolist()
    ends = np.cumsum([len(ids) for ids in texts])
    return [of_text.tolist() for of_text in np.split(surprisals, ends[:-1])]


def load(directory: str, step: int | None = None, allow_older: bool = False,
         dtype: str | None = None) -> Bert:
  """Loads a model; see `interop.load.load`, and for `dtype` `from_pretrained`."""
  if dtype is not None:
    require_choice('dtype', dtype, DTYPES)
  model = load_lib.load(directory, step, allow_older)
  if dtype == 'auto':
    dtype = platforms.fast_dtype(jax.default_backend())
  # The kernel of a training run may refuse other rows, another dtype or another device.
  attention = 'xla' if model.config.attention == 'xla' else 'auto'
  config = dataclasses.replace(
      model.config, dtype=dtype or model.config.dtype, attention=attention)
  bert = Bert(dataclasses.replace(model, config=config))
  bert.name = str(directory)
  return bert


def load_cross_encoder(name: str) -> Bert | None:
  """Loads a reranker; '' = None. Raises UserError for a model of another task."""
  bert = load(name) if name else None
  if bert:
    reranking.RerankingKind.head_of(bert)
  return bert
