"""Layers that the encoders share: initializers, dense, norm, activation, feed-forward."""

from collections.abc import Callable
import functools
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from bert_jax.model.bert_config import BertConfig
from bert_jax.model.products import activation_dtype, product
from bert_jax.parallel import sharding

# The attention score of a masked token. It is finite: with -inf, a softmax over padding
# alone would return NaN.
MASKED = -1e9


def truncated_normal(stddev: float, *axes: str) -> nn.initializers.Initializer:
  """BERT's initializer, a normal truncated at two standard deviations.

  `stddev` is the standard deviation before the truncation, as in TensorFlow's
  `truncated_normal_initializer`, which BERT used. The standard deviation of the values is
  0.88 * `stddev`. `axes` are the logical axes of the parameter.
  """
  return nn.with_logical_partitioning(nn.initializers.truncated_normal(stddev), axes)


def zeros(*axes: str) -> nn.initializers.Initializer:
  """The initializer of a bias with these logical axes."""
  return nn.with_logical_partitioning(nn.initializers.zeros_init(), axes)


def dense(config: BertConfig, features: int, axes: tuple[str, str], *,
          name: str | None = None, stddev: float | None = None,
          dtype: jnp.dtype | None = None, use_bias: bool = True,
          bias_axis: str | None = None) -> nn.Dense:
  """A dense layer: [..., size] -> [..., features].

  `axes` are the logical axes of the kernel. The axis of the bias is `bias_axis`, by
  default the last axis of the kernel. `dtype` is the dtype of the product and of the
  result, by default the compute dtype and the activation dtype. `stddev` defaults to
  `initializer_range`.
  """
  init = truncated_normal(config.initializer_range if stddev is None else stddev, *axes)

  def multiply(x, kernel, *_, **__):
    return product(x, kernel, dtype or config.compute_dtype)

  return nn.Dense(features, use_bias=use_bias,
                  dtype=dtype or activation_dtype(config.compute_dtype), kernel_init=init,
                  bias_init=zeros(bias_axis or axes[1]), name=name, dot_general=multiply)


class Biased(NamedTuple):
  """A matrix product, and the bias that is still to be added to it.

  The GPU kernels that read the product add the bias: another pass over it would cost more
  than the addition.
  """

  product: jax.Array  # [..., features]
  bias: jax.Array | None  # [features]; None = the layer has none

  def sum(self) -> jax.Array:
    """The product with its bias: [..., features]."""
    return self.product if self.bias is None else self.product + self.bias


class LayerNorm(nn.Module):
  """LayerNorm over the last axis: [..., D] -> [..., D], computed in float32."""

  config: BertConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    if _has_norm_kernel(self, x):
      return _norm_by_kernel(self, x)[0]
    ones = nn.with_logical_partitioning(nn.initializers.ones_init(), ('norm',))
    norm = nn.LayerNorm(epsilon=self.config.layer_norm_eps, dtype=jnp.float32,
                        use_bias=self.config.has_biases, scale_init=ones,
                        bias_init=zeros('norm'), use_fast_variance=False, name='norm')
    # Otherwise the parameter paths would have one more level, `norm`.
    nn.share_scope(self, norm)
    return norm(x).astype(x.dtype)


class AddAndNorm(nn.Module):
  """The LayerNorm of x + dropout(y), or of x; one kernel on GPUs that run Triton.

  With `returns_sum` it also returns the sum, for the residual connection. The kernel of
  the backward pass then adds the gradient of the sum to the gradient of the norm.
  """

  config: BertConfig
  returns_sum: bool = False

  @nn.compact
  def __call__(self, x: jax.Array, y: Biased | None = None,
               dropout: nn.Dropout | None = None) -> tuple[jax.Array, jax.Array | None]:
    """(x, y), each [B, L, D] -> (the norm, the sum if `returns_sum`), each [B, L, D].

    Without y, the sum is x.
    """
    if _has_norm_kernel(self, x):
      return _norm_by_kernel(self, x, y, dropout, self.returns_sum)
    norm = LayerNorm(self.config, name='layer_norm')
    nn.share_scope(self, norm)
    if y is not None:
      x = x + (y.sum() if dropout is None else dropout(y.sum()))
    return norm(x), x if self.returns_sum else None


def _may_have_kernels(module: nn.Module) -> bool:
  # Exported programs ask for xla: they run anywhere, with any number of tokens.
  return (module.config.attention != 'xla' and not module.is_initializing()
          and sharding.has_triton())


def _has_norm_kernel(module: nn.Module, x: jax.Array) -> bool:
  if not _may_have_kernels(module) or x.ndim != 3:
    return False
  from bert_jax.model import gpu_norm  # imports Pallas, which is slow
  return gpu_norm.can_run(x.shape[-1])


def _has_gelu_kernel(module: nn.Module) -> bool:
  if not _may_have_kernels(module) or module.config.activation != 'gelu':
    return False
  from bert_jax.model import gpu_gelu
  return gpu_gelu.can_run(module.config.intermediate_size)


def _norm_by_kernel(module: nn.Module, x: jax.Array, y: Biased | None = None,
                    dropout: nn.Dropout | None = None, returns_sum: bool = False
                    ) -> tuple[jax.Array, jax.Array | None]:
  """See `AddAndNorm`; reads the parameters of a `LayerNorm`, which exist already."""
  from bert_jax.model import gpu_norm

  ones, size = nn.initializers.ones_init(), x.shape[-1:]
  scale = module.param('scale', ones, size)
  shift = module.param('bias', ones, size) if module.config.has_biases else None
  drops = dropout is not None and not dropout.deterministic and dropout.rate > 0
  return gpu_norm.norm(x, *(y or (None, None)), scale, shift,
                       epsilon=module.config.layer_norm_eps, rate=dropout.rate if drops else 0.0,
                       random=dropout.make_rng('dropout') if drops else None,
                       returns_sum=returns_sum)


def _gelu(x: jax.Array) -> jax.Array:
  """x * Phi(x) by erf (Hendrycks and Gimpel 2016); `jax.nn.gelu` uses the slower erfc."""
  return 0.5 * x * (1 + jax.lax.erf(x * 0.7071067811865476))


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
  """Returns a nonlinearity: gelu (by erf, as published), gelu_tanh, relu, silu or tanh."""
  return {'gelu': _gelu,
          'gelu_tanh': functools.partial(nn.gelu, approximate=True),
          'relu': nn.relu,
          'silu': nn.silu,
          'tanh': jnp.tanh}[name]


class BiasedDense(nn.Module):
  """A dense layer that leaves the addition of its bias to the caller."""

  config: BertConfig
  features: int
  axes: tuple[str, str]  # logical axes of the kernel

  @nn.compact
  def __call__(self, x: jax.Array) -> Biased:
    """[..., size] -> [..., features]."""
    c, dtype = self.config, activation_dtype(self.config.compute_dtype)
    init = truncated_normal(c.initializer_range, *self.axes)
    kernel = self.param('kernel', init, (x.shape[-1], self.features))
    bias = self.param('bias', zeros(self.axes[1]), (self.features,))
    return Biased(product(x, kernel, c.compute_dtype).astype(dtype), bias.astype(dtype))


class FeedForward(nn.Module):
  """Dense to F, activation, dense back to D: [B, L, D] -> [B, L, D]."""

  config: BertConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> Biased:
    c = self.config
    y = x.reshape(-1, c.hidden_size)  # [B * L, D]
    y = BiasedDense(c, c.intermediate_size, ('embed', 'mlp'), name='up')(y)  # [B * L, F]
    if _has_gelu_kernel(self):
      from bert_jax.model import gpu_gelu
      y = gpu_gelu.gelu(*y)
    else:
      y = activation(c.activation)(nn.with_logical_constraint(y.sum(), ('batch', 'mlp')))
    y = BiasedDense(c, c.hidden_size, ('mlp', 'embed'), name='down')(y)  # [B * L, D]
    return y._replace(product=y.product.reshape(x.shape))
