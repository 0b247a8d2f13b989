"""Layers that the encoders share: initializers, dense, norm, activation, feed-forward."""

from collections.abc import Callable
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp

from bert_jax.model.bert_config import BertConfig
from bert_jax.model.products import activation_dtype, product

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

  return nn.Dense(features, use_bias=use_bias, dtype=dtype or activation_dtype(config),
                  kernel_init=init, bias_init=zeros(bias_axis or axes[1]), name=name,
                  dot_general=multiply)


class LayerNorm(nn.Module):
  """LayerNorm over the last axis: [..., D] -> [..., D], computed in float32."""

  config: BertConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    ones = nn.with_logical_partitioning(nn.initializers.ones_init(), ('norm',))
    norm = nn.LayerNorm(epsilon=self.config.layer_norm_eps, dtype=jnp.float32,
                        use_bias=self.config.has_biases, scale_init=ones,
                        bias_init=zeros('norm'), use_fast_variance=False, name='norm')
    # Otherwise the parameter paths would have one more level, `norm`.
    nn.share_scope(self, norm)
    return norm(x).astype(x.dtype)


def _gelu(x: jax.Array) -> jax.Array:
  """x * Phi(x) by erf (Hendrycks and Gimpel 2016); `jax.nn.gelu` uses the slower erfc."""
  return 0.5 * x * (1 + jax.lax.erf(x * 0.7071067811865476))


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
  """Returns a nonlinearity: gelu (by erf, as published), gelu_tanh, relu or tanh."""
  return {'gelu': _gelu,
          'gelu_tanh': functools.partial(nn.gelu, approximate=True),
          'relu': nn.relu,
          'tanh': jnp.tanh}[name]


class FeedForward(nn.Module):
  """Dense to F, activation, dense back to D: [B, L, D] -> [B, L, D]."""

  config: BertConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    c = self.config
    y = x.reshape(-1, c.hidden_size)  # [B * L, D]
    y = dense(c, c.intermediate_size, ('embed', 'mlp'), name='up')(y)  # [B * L, F]
    y = nn.with_logical_constraint(y, ('batch', 'mlp'))
    y = activation(c.activation)(y)
    y = dense(c, c.hidden_size, ('mlp', 'embed'), name='down')(y)  # [B * L, D]
    return y.reshape(x.shape)
