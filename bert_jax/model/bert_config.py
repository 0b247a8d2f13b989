"""BertConfig: the sizes and choices that define a BERT, and nothing about how it is trained."""

import dataclasses

import jax.numpy as jnp

from bert_jax.errors import UserError

ACTIVATIONS = ('gelu', 'gelu_tanh', 'relu')
ATTENTION = ('auto', 'xla', 'fused', 'splash', 'cudnn')
REMAT = ('none', 'dots', 'full')
DTYPES = ('auto', 'float32', 'bfloat16')

_MOST = 2**24  # of any size or number in a model

# The vocabulary is stored padded to a multiple of this, whatever the mesh, so that the shapes in a
# checkpoint never depend on the number of chips, and every model axis divides them that is a power
# of two up to 128.
VOCAB_MULTIPLE = 128


@dataclasses.dataclass(frozen=True)
class BertConfig:
  """Sizes of a BERT as published (Devlin et al. 2019, https://arxiv.org/abs/1810.04805).

  The legend of every shape in this package:

    B rows          L positions in a row      D width             H heads
    K head width    F feed-forward width      V vocabulary        M masked positions in a row
    P pairs in a row                          N layers         E width of the embeddings, if not D
  """

  # What transformers calls it (`model_type`): bert, roberta; others have a class of their own.
  architecture: str = 'bert'
  vocab_size: int = 30522  # V, entries of the vocabulary, without the padding of the table
  hidden_size: int = 768  # D
  num_layers: int = 12  # N
  num_heads: int = 12  # H; K = D / H
  intermediate_size: int = 3072  # F
  max_positions: int = 512  # rows of the position table: the longest L
  type_vocab_size: int = 2  # segments A and B
  activation: str = 'gelu'  # of the feed-forward and the MLM head: gelu (erf), gelu_tanh, relu
  dropout: float = 0.1  # after the embeddings, the attention output and the feed-forward
  attention_dropout: float = 0.1  # of the attention probabilities
  initializer_range: float = 0.02  # standard deviation of the truncated normal
  layer_norm_eps: float = 1e-12
  # Of the computation; parameters, softmax and norms stay float32. auto = bfloat16 on accelerators,
  # float32 on a CPU: a run sets it once it knows its devices.
  dtype: str = 'float32'
  # How: xla, or a kernel: fused (TPU) or, without attention dropout, splash (TPU), cudnn (GPU);
  # auto = what is best.
  attention: str = 'auto'
  remat: str = 'none'  # what the backward pass computes again: none, dots (keep the matmuls), full
  scan_unroll: int = 1  # layers unrolled in each turn of the scan; num_layers = no loop at all

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if isinstance(value, int) and value > _MOST:  # a damaged config, of what fits no memory
        raise UserError(f'model.{field.name} is {value}: it can be at most {_MOST}')
    self._check_at_least_one('vocab_size', 'hidden_size', 'num_layers', 'num_heads',
                             'intermediate_size', 'max_positions', 'scan_unroll')
    if self.type_vocab_size < self.fewest_segments:
      raise UserError(f'model.type_vocab_size is {self.type_vocab_size}: it must be at least '
                      f'{self.fewest_segments}')
    if self.hidden_size % self.num_heads:
      raise UserError(f'model.hidden_size={self.hidden_size} is not divisible by '
                      f'model.num_heads={self.num_heads}')
    for name, known in (('activation', ACTIVATIONS), ('remat', REMAT), ('dtype', DTYPES),
                        ('attention', ATTENTION)):
      if getattr(self, name) not in known:
        raise UserError(f'model.{name}={getattr(self, name)!r} is unknown: use {", ".join(known)}')
    for name in ('dropout', 'attention_dropout'):
      if not 0 <= getattr(self, name) < 1:
        raise UserError(f'model.{name}={getattr(self, name)} must lie in [0, 1)')
    if not self.initializer_range >= 0:
      raise UserError(f'model.initializer_range={self.initializer_range} must not be negative')
    if not self.layer_norm_eps > 0:
      raise UserError(f'model.layer_norm_eps={self.layer_norm_eps} must be positive')

  def _check_at_least_one(self, *names: str):
    for name in names:
      if getattr(self, name) < 1:
        raise UserError(f'model.{name} is {getattr(self, name)}: it must be at least 1')

  @property
  def head_size(self) -> int:
    """K, the width of one head."""
    return self.hidden_size // self.num_heads

  @property
  def embedding_size(self) -> int:
    """E, the width of the embeddings; here D."""
    return self.hidden_size

  @property
  def fewest_segments(self) -> int:
    """The least that type_vocab_size may be."""
    return 1

  @property
  def projects(self) -> bool:
    """Whether the embeddings are projected from E to D."""
    return False

  @property
  def stacked_layers(self) -> int:
    """Layers with parameters of their own, which are stacked."""
    return self.num_layers

  @property
  def pooler_is_shared(self) -> bool:
    """Whether heads on tokens have what is the pooler of heads on texts."""
    return False

  @property
  def fewest_layers(self) -> tuple[int, int]:
    """The two smallest numbers of layers that a model of this kind can have."""
    return 1, 2

  @property
  def padded_vocab_size(self) -> int:
    """Rows of the stored token table: V rounded up to a multiple of 128."""
    return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

  @property
  def compute_dtype(self) -> jnp.dtype:
    """The dtype that matrix products run in; dtype='auto' is none yet."""
    return jnp.dtype(self.dtype)

  def count_parameters(self, *, pooler: bool = True, heads: bool = False) -> int:
    """Number of parameters without the padding of the vocabulary.

    Args:
      pooler: count the tanh pooler on [CLS].
      heads: count the MLM head (its decoder is the token table) and the NSP head on the pooler.
    """
    d, f, v, e = (self.hidden_size, self.intermediate_size, self.vocab_size, self.embedding_size)
    embeddings = (v + self.max_positions + self.type_vocab_size) * e + 2 * e
    layer = 4 * (d * d + d) + (d * f + f) + (f * d + d) + 2 * (2 * d)
    total = embeddings + self.projects * (e * d + d) + self.stacked_layers * layer
    total += pooler * (d * d + d)
    return total + heads * (d * e + e + 2 * e + v + pooler * (2 * d + 2))

  def flops_per_token(self, length: int, predictions: float) -> float:
    """Model FLOPs of one training step for each token of a row (multiply-add = 2, backward = 2x).

    Encoder products, attention over the whole row, and the MLM head at the predicted positions;
    recomputation, embeddings, norms and the optimiser are not counted (PaLM, appendix B).

    Args:
      length: L, tokens in a row.
      predictions: predicted positions for each token (0.15, say).
    """
    d, f, n, e = self.hidden_size, self.intermediate_size, self.num_layers, self.embedding_size
    encoder = 6 * n * (4 * d * d + 2 * d * f) + 12 * n * d * length + 6 * self.projects * e * d
    return encoder + 6 * predictions * (d * e + e * self.vocab_size)
