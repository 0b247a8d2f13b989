"""Matrix products in the compute dtype, and the dtype of the arrays between them.

On TPUs and GPUs these are plain products. On a CPU with bfloat16 instructions, XLA
multiplies bfloat16 several times faster than float32, but only in one memory layout, and
elementwise work in bfloat16 is slower than in float32. So on a CPU only the factors are
bfloat16, and the backward pass transposes them in memory. PyTorch's autocast has the same
precision.
"""

import functools

import jax
from jax.experimental.layout import Layout, with_layout_constraint
import jax.numpy as jnp

from bert_jax.parallel import sharding


def activation_dtype(dtype: jnp.dtype) -> jnp.dtype:
  """The dtype of arrays between products of `dtype`; norms and softmax are in float32."""
  return jnp.dtype('float32') if sharding.platform() == 'cpu' else dtype


@functools.partial(jax.jit, inline=True)  # without jit, only arrays can have a layout
def _in_order(x: jax.Array) -> jax.Array:
  """Forces a row-major layout: otherwise XLA folds a transpose into the product."""
  return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _half(x: jax.Array) -> jax.Array:
  return _in_order(x.astype(jnp.bfloat16))


def _transposed(x: jax.Array) -> jax.Array:
  return _in_order(x.swapaxes(-1, -2))


def _multiply(x: jax.Array, y: jax.Array) -> jax.Array:
  return jnp.matmul(x, y, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _half_product(x: jax.Array, y: jax.Array, with_transposed: bool) -> jax.Array:
  """x y or x y^T of float32 arrays, multiplied in bfloat16 and summed in float32."""
  return _forward(x, y, with_transposed)[0]


def _forward(x, y, with_transposed):
  x, y = _half(x), _half(y)
  return _multiply(x, _transposed(y) if with_transposed else y), (x, y)


def _backward(with_transposed, factors, gradient):
  x, y = factors
  gradient = _half(gradient)
  if with_transposed:
    return _multiply(gradient, y), _multiply(_transposed(gradient), x)
  return _multiply(gradient, _transposed(y)), _multiply(_transposed(x), gradient)


_half_product.defvjp(_forward, _backward)


def _on_cpu(x: jax.Array, y: jax.Array, with_transposed: bool) -> jax.Array:
  rows = x.reshape(-1, x.shape[-1]) if y.ndim == 2 else x
  # The casts keep the gradients in the dtypes of the arguments.
  out = _half_product(rows.astype(jnp.float32), y.astype(jnp.float32), with_transposed)
  return out.reshape(*x.shape[:-1], out.shape[-1])


def _is_half_on_cpu(dtype: jnp.dtype) -> bool:
  return dtype == jnp.bfloat16 and sharding.platform() == 'cpu'


def product(x: jax.Array, y: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """x y, both cast to `dtype`.

  Args:
    x: [..., N, K], or [..., K] if `y` has two axes.
    y: [..., K, M], or [K, M].
    dtype: of the factors.

  Returns:
    [..., N, M] or [..., M] in `dtype`; float32 on a CPU.
  """
  if _is_half_on_cpu(dtype):
    return _on_cpu(x, y, with_transposed=False)
  return x.astype(dtype) @ y.astype(dtype)


def product_with_transposed(x: jax.Array, y: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """x y^T, both cast to `dtype`.

  Args:
    x: [..., N, K], or [..., K] if `y` has two axes.
    y: [..., M, K], or [M, K].
    dtype: of the factors.

  Returns:
    [..., N, M] or [..., M] float32.
  """
  if _is_half_on_cpu(dtype):
    return _on_cpu(x, y, with_transposed=True)
  axes = '...k,mk->...m' if y.ndim == 2 else '...nk,...mk->...nm'
  return jnp.einsum(axes, x.astype(dtype), y.astype(dtype),
                    preferred_element_type=jnp.float32)
