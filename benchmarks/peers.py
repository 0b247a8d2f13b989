"""The peers of `benchmarks.train`: each makes training steps on given rows.

  python -m benchmarks.peers --side=torch --rows=rows.npz --sizes=12,768,12

Runs in its own environment, which does not need bert_jax: torch and transformers; or
transformers 4.57.1 with jax, flax and optax (later versions have no Flax models); or
keras-hub with jax. Each also needs absl-py.
"""

import functools
import os

from absl import app, flags
import numpy as np

from benchmarks import turns

_SIDES = ('torch', 'torch_bf16', 'torch_full', 'torch_bf16_full', 'torch_compile', 'torch_packed',
          'flax', 'keras')
_SIDE = flags.DEFINE_enum('side', None, _SIDES, 'Which peer.', required=True)
_ROWS = flags.DEFINE_string('rows', None, 'What `benchmarks.train` wrote.', required=True)
_SIZES = flags.DEFINE_list('sizes', None, 'Layers, width, heads.', required=True)
_DEVICE = flags.DEFINE_string('device', 'cpu', 'cpu or cuda.')
_ATTENTION_DROPOUT = flags.DEFINE_float('attention_dropout', 0.1, "Of PyTorch's model.")
_RATE = 1e-4


def _sizes() -> dict[str, int]:
  layers, width, heads = map(int, _SIZES.value)
  return {'num_hidden_layers': layers, 'hidden_size': width, 'num_attention_heads': heads,
          'intermediate_size': 4 * width}


def _torch(rows: dict[str, np.ndarray]):
  """transformers as its users train it: a forward pass with labels at all positions."""
  import torch
  import transformers
  device, side = _DEVICE.value, _SIDE.value
  config = transformers.BertConfig(
      **_sizes(), attention_probs_dropout_prob=_ATTENTION_DROPOUT.value)
  torch.manual_seed(0)
  model = transformers.BertForPreTraining(config).to(device).train()
  optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, fused=True)
  batches = [{name: torch.from_numpy(x).to(device) for name, x in batch.items()}
             for batch in _batches(rows)]

  def loss(batch):
    return model(input_ids=batch['ids'], token_type_ids=batch['segments'],
                 attention_mask=batch['mask'], labels=batch['labels'],
                 next_sentence_label=batch['nsp']).loss

  def packed_loss(batch):
    """PyTorch with the rows of bert_jax and logits only at the masked positions."""
    same = batch['pairs'][:, None, :, None] == batch['pairs'][:, None, None, :]
    hidden = model.bert.encoder(
        model.bert.embeddings(batch['ids'], batch['segments'], batch['positions']),
        attention_mask=torch.where(same & (batch['pairs'] > 0)[:, None, None], 0.0,
                                   -1e9))[0]
    chosen = batch['labels'] >= 0
    scores = model.cls.predictions(hidden[chosen])
    first = hidden[torch.arange(len(hidden), device=device)[:, None], batch['cls']]
    pairs = model.cls.seq_relationship(model.bert.pooler.activation(model.bert.pooler.dense(first)))
    entropy = torch.nn.functional.cross_entropy
    return entropy(scores.float(), batch['labels'][chosen]) + entropy(
        pairs.flatten(0, 1).float(), batch['nsp_of_pairs'].flatten(), ignore_index=-100)

  objective = packed_loss if side == 'torch_packed' else loss
  if side == 'torch_compile' or (side == 'torch_packed' and device != 'cpu'):
    objective = torch.compile(objective)
  half = side.startswith('torch_bf16') or device != 'cpu'

  def step(i: int) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=half):
      value = objective(batches[i % len(batches)])
    value.backward()
    optimizer.step()
    return value.detach()

  return step, f'torch {torch.__version__}, transformers {transformers.__version__}'


def _flax(rows: dict[str, np.ndarray]):
  """transformers' Flax BERT, trained as in its example, with JAX's default generator."""
  import jax
  import jax.numpy as jnp
  import optax
  import transformers
  batches = _batches(rows)
  dtype = jnp.float32 if _DEVICE.value == 'cpu' else jnp.bfloat16
  model = transformers.FlaxBertForPreTraining(
      transformers.BertConfig(**_sizes()), dtype=dtype, _do_init=False)
  optimizer = optax.adamw(_RATE)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def update(params, moments, batch, key):
    def loss(params):
      out = model(input_ids=batch['ids'], attention_mask=batch['mask'],
                  token_type_ids=batch['segments'], params=params, dropout_rng=key, train=True)
      entropy = optax.softmax_cross_entropy_with_integer_labels
      weights = batch['labels'] >= 0
      tokens = entropy(out.prediction_logits.astype(jnp.float32),
                       jnp.maximum(batch['labels'], 0)) * weights
      pairs = entropy(out.seq_relationship_logits.astype(jnp.float32), batch['nsp'])
      return tokens.sum() / weights.sum() + pairs.mean()
    value, grads = jax.value_and_grad(loss)(params)
    updates, moments = optimizer.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments, value

  params = model.init_weights(jax.random.PRNGKey(0), batches[0]['ids'][:1].shape)
  held = [params, optimizer.init(params)]

  def step(i: int) -> jax.Array:
    *held[:], value = update(*held, batches[i % len(batches)], jax.random.PRNGKey(i))
    return value

  return step, f'jax {jax.__version__}, transformers {transformers.__version__}'


def _keras(rows: dict[str, np.ndarray]):
  """KerasHub's masked LM (it has no sentence pairs), at gathered positions.

  Keras fetches the loss after each step.
  """
  os.environ.update(KERAS_BACKEND='jax', TF_CPP_MIN_LOG_LEVEL='3')
  import keras
  import keras_hub
  if _DEVICE.value != 'cpu':
    keras.config.set_dtype_policy('mixed_bfloat16')
  sizes = _sizes()
  model = keras_hub.models.BertMaskedLM(preprocessor=None, backbone=keras_hub.models.BertBackbone(
      vocabulary_size=30_522, num_layers=sizes['num_hidden_layers'],
      num_heads=sizes['num_attention_heads'], hidden_dim=sizes['hidden_size'],
      intermediate_dim=sizes['intermediate_size'], max_sequence_length=512))
  model.compile(optimizer=keras.optimizers.AdamW(_RATE), jit_compile=True,
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=False))
  batches = []
  most = max((batch['labels'] >= 0).sum(1).max() for batch in _batches(rows))
  for batch in _batches(rows):
    chosen = batch['labels'] >= 0
    order = np.argsort(~chosen, axis=1, kind='stable')[:, :most]
    batches.append(({'token_ids': batch['ids'], 'segment_ids': batch['segments'],
                  'padding_mask': batch['mask'], 'mask_positions': order.astype(np.int32)},
                 np.maximum(np.take_along_axis(batch['labels'], order, 1), 0),
                 np.take_along_axis(chosen, order, 1).astype(np.float32)))

  def step(i: int) -> float:
    inputs, labels, weights = batches[i % len(batches)]
    return float(np.ravel(model.train_on_batch(inputs, labels, sample_weight=weights))[0])

  return step, f'keras-hub {keras_hub.__version__}, keras {keras.__version__}'


def _batches(rows: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
  """Splits the arrays [steps, B, ...] into the batches of the steps, [B, ...]."""
  return [{name: x[i] for name, x in rows.items()} for i in range(len(rows['ids']))]


def main(_):
  """Makes steps on request."""
  make = {'flax': _flax, 'keras': _keras}.get(_SIDE.value, _torch)
  is_gpu = _DEVICE.value != 'cpu'
  turns.serve(*make(dict(np.load(_ROWS.value))), warm=turns.BATCHES if is_gpu else 0,
              runs_ahead=is_gpu)


if __name__ == '__main__':
  app.run(main)
