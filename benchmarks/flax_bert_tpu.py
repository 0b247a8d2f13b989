"""The peer of `benchmarks.tpu_compile`: Flax BERT of transformers 4.57.1 on a TPU.

  python -m benchmarks.flax_bert_tpu --topology=v5e:4x4 --rows=512 --length=128

Runs in its own environment (pip install jax==0.10.2 flax optax transformers==4.57.1
libtpu absl-py): later versions of transformers have no Flax models. Prints one JSON
object.
"""

import json
import os
import time

from absl import app, flags

os.environ.update(JAX_PLATFORMS='cpu', TPU_SKIP_MDS_QUERY='1', TPU_WORKER_HOSTNAMES='localhost',
                  TPU_ACCELERATOR_TYPE='v5litepod-16')

import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import (
  Mesh,  # noqa: E402
  NamedSharding,  # noqa: E402
  PartitionSpec,  # noqa: E402
)
import numpy as np  # noqa: E402
import optax  # noqa: E402
import transformers  # noqa: E402

from bert_jax.planning import traffic  # noqa: E402

_TOPOLOGY = flags.DEFINE_string('topology', 'v5e:4x4', 'TPU slice.')
_ROWS = flags.DEFINE_integer('rows', 512, 'Rows over all chips.')
_LENGTH = flags.DEFINE_integer('length', 128, 'Tokens in a row.')


def main(_):
  """Compiles a step of BERT-large: masked LM at all positions, AdamW, dropout 0.1."""
  devices = topologies.get_topology_desc(platform='tpu', topology_name=_TOPOLOGY.value).devices
  mesh = Mesh(np.array(devices), ('data',))
  model = transformers.FlaxBertForPreTraining(
      transformers.BertConfig(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16,
                              intermediate_size=4096), dtype=jnp.bfloat16, _do_init=False)
  optimizer = optax.adamw(1e-4)

  def init():
    params = model.init_weights(jax.random.PRNGKey(0), (1, _LENGTH.value))
    return params, optimizer.init(params)

  def step(state, ids, labels, seed):
    params, moments = state

    def loss(params):
      logits = model(
          input_ids=ids, attention_mask=jnp.ones_like(ids), token_type_ids=jnp.zeros_like(ids),
          position_ids=jnp.broadcast_to(jnp.arange(_LENGTH.value), ids.shape), params=params,
          dropout_rng=jax.random.PRNGKey(seed), train=True).prediction_logits
      losses = optax.softmax_cross_entropy_with_integer_labels(
          logits.astype(jnp.float32), jnp.maximum(labels, 0))
      return (losses * (labels >= 0)).sum() / (labels >= 0).sum()

    value, grads = jax.value_and_grad(loss)(params)
    updates, moments = optimizer.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), value

  whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ('data',)))
  state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
                       jax.eval_shape(init))
  ids = jax.ShapeDtypeStruct((_ROWS.value, _LENGTH.value), jnp.int32, sharding=split)
  lowered = jax.jit(step, donate_argnums=0).lower(state, ids, ids,
                                                  jax.ShapeDtypeStruct((), jnp.uint32))
  began = time.monotonic()
  compiled = lowered.compile()
  seconds = time.monotonic() - began
  print(json.dumps({'seconds': seconds, 'flops': compiled.cost_analysis()['flops'],
                    'traffic': traffic.total(traffic.operations(compiled.as_text())),
                    'temporaries': compiled.memory_analysis().temp_size_in_bytes}))


if __name__ == '__main__':
  app.run(main)
