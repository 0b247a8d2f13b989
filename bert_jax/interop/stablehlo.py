"""Exports the encoder as one StableHLO file for serving without bert_jax."""

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

`ids`, `type_ids` and `mask` are int32 [B, L], for any B and any L up to {longest}; `mask`
is 1 on tokens and 0 on padding. `hidden` is [B, L, {width}] and `pooled` [B, {width}],
both float32{note}. The vocabulary is in `tokenizer/`.
"""


def _encoder(model: Pretrained):
  """Returns a jitted function (ids, type_ids, mask) -> (hidden, pooled).

  The inputs are [B, L] int32; hidden is [B, L, D] and pooled [B, D], both float32.
  Without a pooler, `pooled` is the hidden state of [CLS].
  """
  variables = {'params': jax.tree.map(jnp.asarray, model.params['params']['bert'])}
  # A kernel needs one platform and a static length. Platforms round bfloat16 differently.
  module = architectures.make_encoder(
      dataclasses.replace(model.config, attention='xla', dtype='float32'))

  def encode(ids, type_ids, mask):
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    hidden = module.apply(
        variables, Tokens(ids, type_ids, positions, mask), method='encode')
    pooled = hidden[:, 0]
    if 'pooler' in model.groups:
      first = jnp.zeros_like(ids[:, :1])
      pooled = module.apply(variables, hidden, first, method='pool')[:, 0]
    return hidden.astype(jnp.float32), pooled.astype(jnp.float32)

  return jax.jit(encode)


def save(model: Pretrained, directory: epath.Path):
  """Writes the encoder, its tokenizer and a README, and creates the folder."""
  directory.mkdir(parents=True, exist_ok=True)
  longest = model.config.max_positions
  # Symbolic sizes: one file serves batches of any shape.
  batch, length = jax.export.symbolic_shape('b, l', constraints=[f'l <= {longest}'])
  tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
  export = jax.export.export(_encoder(model), platforms=_PLATFORMS)
  (directory / FILE).write_bytes(export(tokens, tokens, tokens).serialize())
  model.tokenizer.save(directory / 'tokenizer')
  note = ('' if 'pooler' in model.groups else
          ' (the model has no pooler: `pooled` is the hidden state of [CLS])')
  (directory / 'README.md').write_text(
      _README.format(longest=longest, width=model.config.hidden_size, note=note))


def compare(model: Pretrained, directory: epath.Path) -> Iterator[tuple[str, str]]:
  """Compares the encoder in `directory` with the model.

  Yields:
    (name, result) lines for the user.

  Raises:
    UserError: the outputs differ.
  """
  ours = _encoder(model)
  exported = jax.export.deserialize((directory / FILE).read_bytes())
  for rows, length in ((1, 8), (3, 21)):
    batch = verify.sample(model, rows, length)
    inputs = batch.ids, batch.type_ids, batch.text_ids
    is_real = batch.text_ids > 0  # hidden states of padding are arbitrary
    for a, b in zip(ours(*inputs), exported.call(*inputs)):
      difference = np.abs(np.asarray(a) - np.asarray(b))
      worst = float(np.max(difference[is_real] if difference.ndim == 3 else difference))
      require(worst <= verify.TOLERANCE,
              f'{directory / FILE}: the outputs differ by {worst:.2g}')
  yield 'outputs', 'of two batch shapes, equal to the source'
