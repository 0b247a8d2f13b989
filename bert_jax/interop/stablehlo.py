"""Exports the encoder as one StableHLO file, to be served without bert_jax."""

from collections.abc import Iterator
import dataclasses

from etils import epath
import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from bert_jax.data.tokens import Tokens
from bert_jax.errors import require
from bert_jax.interop import verify
from bert_jax.interop.pretrained import Pretrained
from bert_jax.model import architectures

FILE = 'encoder.stablehlo'
_PLATFORMS = ('cpu', 'cuda', 'tpu')
_README = """# A BERT encoder as StableHLO

`encoder.stablehlo` holds the function and its parameters, for CPU, GPU and TPU:

```python
import jax.export

encoder = jax.export.deserialize(open('encoder.stablehlo', 'rb').read())
hidden, pooled = encoder.call(ids, type_ids, mask)
```

`ids`, `type_ids` and `mask` are int32 [B, L], for any B and any L up to {longest}; `mask` is 1 on
tokens and 0 on padding. `hidden` is [B, L, {width}] and `pooled` [B, {width}], both float32{note}.
The vocabulary is in `tokenizer/`.
"""


def _encoder(model: Pretrained):
  """A function (ids, type_ids, mask: [B, L] int32) -> (hidden [B, L, D], pooled [B, D]), float32.

  Without a pooler, `pooled` is the hidden state of [CLS].
  """
  variables = {'params': jax.tree.map(jnp.asarray, model.params['params']['bert'])}
  # A kernel is for one platform and for lengths that are known.
  module = architectures.make_encoder(dataclasses.replace(model.config, attention='xla'))

  def encode(ids, type_ids, mask):
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    hidden = module.apply(variables, Tokens(ids, type_ids, positions, mask), method='encode')
    pooled = hidden[:, 0]
    if 'pooler' in model.groups:
      first = jnp.zeros_like(ids[:, :1])
      pooled = module.apply(variables, hidden, first, method='pool')[:, 0]
    return hidden.astype(jnp.float32), pooled.astype(jnp.float32)

  return jax.jit(encode)


def save(model: Pretrained, directory: epath.Path):
  """Writes the encoder, its tokenizer and a README; makes the folder if there is none.

  Raises:
    UserError: its attention has relative positions, which depend on the length.
  """
  require(not model.config.needs_length,
          f'a program for texts of all lengths cannot hold the relative positions of '
          f'{model.config.architecture}: the formats huggingface and bert_jax have them')
  directory.mkdir(parents=True, exist_ok=True)
  longest = model.config.max_positions
  batch, length = jax.export.symbolic_shape('b, l', constraints=[f'l <= {longest}'])
  tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
  exported = jax.export.export(_encoder(model), platforms=_PLATFORMS)(tokens, tokens, tokens)
  (directory / FILE).write_bytes(exported.serialize())
  model.tokenizer.save(directory / 'tokenizer')
  note = '' if 'pooler' in model.groups else ' (the model has no pooler: `pooled` is [CLS] itself)'
  (directory / 'README.md').write_text(
      _README.format(longest=longest, width=model.config.hidden_size, note=note))


def compare(model: Pretrained, directory: epath.Path) -> Iterator[tuple[str, str]]:
  """(name, result) lines that show the encoder in `directory` to be the model's.

  Raises:
    UserError: its outputs differ.
  """
  ours = _encoder(model)
  exported = jax.export.deserialize((directory / FILE).read_bytes())
  for rows, length in ((1, 8), (3, 21)):
    batch = verify.sample(model, rows, length)
    inputs = batch.ids, batch.type_ids, batch.text_ids
    is_real = batch.text_ids > 0  # the states of padding mean nothing
    for a, b in zip(ours(*inputs), exported.call(*inputs)):
      difference = np.abs(np.asarray(a) - np.asarray(b))
      worst = float(np.max(difference[is_real] if difference.ndim == 3 else difference))
      require(worst <= verify.TOLERANCE,
              f'{directory / FILE}: the outputs differ by {worst:.2g}')
  yield 'outputs', 'of two batch shapes, equal to the source'
