"""Times the Triton kernels of attention and of the norm with several launches on a GPU.

  python -m benchmarks.gpu_launches --output=launches.json

Each line is the median of five measurements of 30 calls. A call is a forward pass, or a
forward and a backward pass. To time a launch of attention's backward pass, the forward pass
uses the first launch of its list. `gpu_attention._launch` and `gpu_norm._Tile` have the
launches that bert_jax uses.
"""

from concurrent import futures
import json
import statistics
import time
from typing import Any, NamedTuple

from absl import app, flags
from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import turns
from bert_jax.model import gpu_attention, gpu_norm
from bert_jax.model.gpu_attention import Inputs, Shape

_OUTPUT = flags.DEFINE_string('output', None, 'JSON file.', required=True)
_ROWS = flags.DEFINE_integer('rows', 0, 'Of each array, for a trial; 0 = its own.')
_CALLS = flags.DEFINE_integer('calls', 30, 'Of each program, five times.')


class _Rows(NamedTuple):
  """An array [rows, length, heads, 64] and the launches to try."""

  rows: int
  length: int
  heads: int
  rate: float
  reach: int | None
  forward: list[tuple[int, int, int, int]]  # queries, keys, warps, stages
  backward: list[tuple[int, int, int, int]]


_SHORT = [(64, 64, 4, 1), (64, 64, 4, 2), (128, 64, 4, 2), (64, 128, 4, 1), (128, 128, 8, 1)]
_LONG = [(128, 64, 4, 3), (128, 64, 4, 2), (64, 64, 4, 2), (128, 32, 4, 3), (128, 128, 8, 2)]
_BLOCKS = [(64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 1), (64, 64, 8, 2), (128, 128, 8, 1),
           (32, 32, 4, 2)]
_WHOLE = [(128, 128, 8, 1), (128, 128, 4, 1), (128, 128, 16, 1)]
ATTENTION = {
    'rows of 64': _Rows(512, 64, 6, 0.0, None, _SHORT[:2], [(64, 64, 4, 1), (64, 64, 8, 1)]),
    'rows of 128, dropout': _Rows(256, 128, 12, 0.1, None, _SHORT, _WHOLE),
    'rows of 512, dropout': _Rows(32, 512, 16, 0.1, None, _LONG, _BLOCKS),
    'rows of 512': _Rows(32, 512, 16, 0.0, None, _LONG, _BLOCKS),
    'windows of 64, rows of 1024': _Rows(16, 1024, 12, 0.0, 64, _LONG, _BLOCKS)}
NORM = {'width 768': (256, 128, 768), 'width 1024': (32, 512, 1024)}


def _attention(rows: _Rows, forward, backward) -> tuple[Any, Any, Any]:
  """(arguments, the lowered forward pass, the lowered pass with gradients)."""
  batch, rng = _ROWS.value or rows.rows, np.random.default_rng(0)
  shape = Shape(rows.length, 64, rows.rate, rows.reach, jax.default_backend() != 'gpu')
  qkv, bias = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in (
      (batch, rows.length, rows.heads, 3, 64), (rows.heads, 3, 64)))
  texts = jnp.broadcast_to(1 + 2 * jnp.arange(rows.length) // rows.length, (batch, rows.length))
  arrays = (qkv, bias, texts, *(jnp.arange(n, dtype=jnp.uint32) for n in (2, batch, rows.heads)))

  def inputs(qkv, bias, *others):
    return Inputs(qkv, None, bias, *others)

  def out(*arrays):
    return gpu_attention._forward(shape, inputs(*arrays))[0]

  def gradients(*arrays):
    x, saved = gpu_attention._forward(shape, inputs(*arrays))
    of_inputs, = gpu_attention._backward(shape, saved, x)
    return of_inputs.qkv, of_inputs.bias

  def launch(_, is_forward):
    queries, keys, warps, stages = forward if is_forward else backward
    return gpu_attention._Launch((queries, keys), warps, stages)

  gpu_attention._launch = launch
  return arrays, jax.jit(out).lower(*arrays), jax.jit(gradients).lower(*arrays)


def _norm(sizes: tuple[int, int, int], of_warp: int, turns_: int) -> tuple[Any, Any, Any]:
  """As `_attention`."""
  rows, length, width = sizes
  gpu_norm._WIDTH, gpu_norm._TURNS = of_warp, turns_
  jax.clear_caches()  # of traces with other sizes
  x = jnp.ones((_ROWS.value or rows, length, width), jnp.bfloat16)
  vector = jnp.ones(width, jnp.float32)

  def out(x, vector):
    return gpu_norm.norm(x, x, vector.astype(x.dtype), vector, vector, epsilon=1e-12, rate=0.1,
                         random=jax.random.key(0))[0]

  def gradients(x, vector):
    y, pull = jax.vjp(out, x, vector)
    return pull(y)

  return (x, vector), jax.jit(out).lower(x, vector), jax.jit(gradients).lower(x, vector)


def _programs():
  """Yields (name, pass, launch, arguments, lowered program)."""
  for name, rows in ATTENTION.items():
    for launch in rows.forward:
      arrays, program, _ = _attention(rows, launch, rows.backward[0])
      yield name, 'forward', launch, arrays, program
    for launch in rows.backward:
      arrays, _, program = _attention(rows, rows.forward[0], launch)
      yield name, 'both', launch, arrays, program
  for name, sizes in NORM.items():
    for launch in ((1024, 8), (768, 8), (768, 4), (768, 16), (512, 8), (256, 8)):
      arrays, forward, both = _norm(sizes, *launch)
      yield name, 'forward', launch, arrays, forward
      yield name, 'both', launch, arrays, both


def _milliseconds(program, arrays) -> float:
  jax.block_until_ready(program(*arrays))
  times = []
  for _ in range(5):
    began = time.perf_counter()
    for _ in range(_CALLS.value):
      result = program(*arrays)
    jax.block_until_ready(result)
    times.append((time.perf_counter() - began) / _CALLS.value)
  return 1e3 * statistics.median(times)


def main(_):
  """Compiles all programs, times each, and writes and prints the times."""
  turns.busy()
  with futures.ThreadPoolExecutor(12) as pool:
    todo = [(*names, arrays, pool.submit(program.compile))
            for *names, arrays, program in _programs()]
    lines = []
    with turns.alone():
      for name, part, launch, arrays, program in todo:
        line = {'kernel': name, 'pass': part, 'launch': launch}
        try:
          line['ms'] = _milliseconds(program.result(), arrays)
        except jax.errors.JaxRuntimeError as error:  # more registers or memory than there are
          line['error'] = str(error).partition('\n')[0]
        lines.append(line)
        print(json.dumps(line), flush=True)
        epath.Path(_OUTPUT.value).write_text(json.dumps(lines, indent=1))


if __name__ == '__main__':
  app.run(main)
