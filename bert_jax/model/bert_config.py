"""BertConfig: the sizes and choices that define a BERT, without how it is trained."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from bert_jax.errors import require, require_choice

ACTIVATIONS = ('gelu', 'gelu_tanh', 'relu', 'silu')
REMAT = ('none', 'dots', 'full')
DTYPES = ('auto', 'float32', 'bfloat16')

_LARGEST = 2**24  # upper bound on every size in a model

# The token table has a multiple of this many rows on every mesh. Checkpoint shapes then
# do not depend on the number of chips, and any model axis of a power of two up to 128
# divides them.
VOCAB_MULTIPLE = 128


@dataclasses.dataclass(frozen=True)
class BertConfig:
  """Sizes of a BERT as published (Devlin et al. 2019, https://arxiv.org/abs/1810.04805).

  The legend of the shapes:

      B rows         L positions in a row   D width        H heads
      K head width   F feed-forward width   V vocabulary   M masked positions in a row
      P pairs in a row                      N layers       E embedding width, if not D

  Batches of packed texts have R rows of P texts. In `labelled` and `tasks`, E is the
  number of examples in a batch, and C the number of inputs of an example.
  """

  # The `model_type` of transformers; `architectures.ALL` lists the config class of each.
  architecture: str = 'bert'
  vocab_size: int = 30522  # V, the entries of the vocabulary, without padding
  hidden_size: int = 768  # D, the width of a hidden state
  num_layers: int = 12  # N, Transformer layers
  num_heads: int = 12  # H, attention heads; K = D / H
  intermediate_size: int = 3072  # F, the width of the feed-forward
  max_positions: int = 512  # the longest L; rows of the position table, if there is one
  type_vocab_size: int = 2  # rows of the segment table: A and B; 0 = no segments
  # The activation in the feed-forward and the MLM head: gelu (erf), gelu_tanh, relu,
  # silu. The MLM heads of RoBERTa, MPNet, ELECTRA and ModernBERT always have gelu.
  activation: str = 'gelu'
  dropout: float = 0.1  # share dropped of embeddings, attention and feed-forward outputs
  attention_dropout: float = 0.1  # share dropped of the attention weights
  # Standard deviation of random parameters before truncation at two standard deviations.
  initializer_range: float = 0.02
  layer_norm_eps: float = 1e-12  # added to the variance in the norms
  # Dtype of the matrix products; parameters, softmax and norms stay float32. auto =
  # bfloat16, or float32 on a device that does not multiply bfloat16 faster: most CPUs,
  # and GPUs before Ampere. A run replaces auto once it knows its devices.
  dtype: str = 'float32'
  # xla, or a kernel: fused or splash (TPU), triton or cudnn (GPU). splash and cudnn need
  # attention_dropout=0. auto = the best for the device and the row length. With xla,
  # norms and GELU use no kernel either.
  attention: str = 'auto'
  # The backward pass recomputes nothing (none), everything (full), or everything but the
  # products with parameters (dots).
  remat: str = 'none'
  # Layers in each step of the scan; num_layers = no loop. A run replaces 0: on a GPU by
  # num_layers if the run takes over five minutes, on a CPU or TPU by 12 in fine-tuning,
  # and otherwise by 1.
  scan_unroll: int = 0

  # Constants of an architecture. They are not fields, because its name implies them. A
  # subclass overrides them.
  has_positions: ClassVar[bool] = True  # learned position embeddings
  has_segments: ClassVar[bool] = True  # learned segment embeddings
  has_biases: ClassVar[bool] = True  # in the norms and in attention's projections
  has_windows: ClassVar[bool] = False  # some layers attend locally
  kernel_obstacle: ClassVar[str] = ''  # why no kernel can compute its attention
  can_hide: ClassVar[bool] = True  # computes hidden tokens as transformers does
  mlm_activation: ClassVar[str] = ''  # of the MLM head; '' = `activation`
  pooler_activation: ClassVar[str] = 'tanh'
  pooler_is_shared: ClassVar[bool] = False  # token heads and the decoder use the pooler

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      # A larger value comes from a damaged file: no memory holds such a model.
      require(not isinstance(value, int) or value <= _LARGEST,
              f'model.{field.name} is {value}: it can be at most {_LARGEST}')
    self._check_at_least_one('vocab_size', 'hidden_size', 'num_layers', 'num_heads',
                             'intermediate_size', 'max_positions')
    require(self.scan_unroll >= 0,
            f'model.scan_unroll={self.scan_unroll} must not be negative')
    require(self.type_vocab_size >= self.has_segments,
            f'model.type_vocab_size is {self.type_vocab_size}: it must be at least '
            f'{int(self.has_segments)}')
    require(self.hidden_size % self.num_heads == 0,
            f'model.hidden_size={self.hidden_size} is not divisible by '
            f'model.num_heads={self.num_heads}')
    for name, choices in (('activation', ACTIVATIONS), ('remat', REMAT),
                          ('dtype', DTYPES)):
      require_choice(f'model.{name}', getattr(self, name), choices)
    for name in ('dropout', 'attention_dropout'):
      rate = getattr(self, name)
      # Kept weights are divided by 1 - rate.
      require(0 <= rate < 1, f'model.{name}={rate} must lie in [0, 1)')
    require(self.initializer_range >= 0,
            f'model.initializer_range={self.initializer_range} must not be negative')
    require(self.layer_norm_eps > 0,
            f'model.layer_norm_eps={self.layer_norm_eps} must be positive')

  def _check_at_least_one(self, *names: str):
    for name in names:
      value = getattr(self, name)
      require(value >= 1, f'model.{name} is {value}: it must be at least 1')

  @property
  def head_size(self) -> int:
    """K, the width of one head."""
    return self.hidden_size // self.num_heads

  @property
  def embedding_size(self) -> int:
    """E, the width of the embeddings: D unless an architecture has a field for it."""
    return self.hidden_size

  @property
  def projects(self) -> bool:
    """True if the embeddings are projected from E to D."""
    return self.embedding_size != self.hidden_size

  @property
  def stacked_layers(self) -> int:
    """Length of the leading axis of the layers' parameters."""
    return self.num_layers

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
    """The dtype of matrix products; raises TypeError for 'auto', which a run replaces."""
    return jnp.dtype(self.dtype)

  def flops_per_token(self, length: int, predictions: float) -> float:
    """Model FLOPs of a training step for each token of a row.

    A multiply-add counts 2, the backward pass twice the forward pass. Counts the
    encoder's products, attention over the whole row, and the MLM head at the predicted
    positions. Recomputation, embeddings, norms and the optimizer do not count (PaLM,
    appendix B).

    Args:
      length: L, tokens in a row.
      predictions: predicted positions for each token, such as 0.15.
    """
    d, f, e = self.hidden_size, self.intermediate_size, self.embedding_size
    layer = 6 * (4 * d * d + 2 * d * f) + 12 * d * length
    return (self.num_layers * layer + 6 * self.projects * e * d
            + 6 * predictions * (d * e + e * self.vocab_size))
