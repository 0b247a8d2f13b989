"""AdamW, BERT's variant of it, and its successors, with schedule, clipping and decay."""

import dataclasses
from fractions import Fraction
import math

import jax
import jax.numpy as jnp
import optax

from bert_jax import errors
from bert_jax.data.phases import MOST_STEPS
from bert_jax.model import parameters
from bert_jax.training import transforms

NAMES = ('adamw', 'bert_adamw', 'lamb', 'stable_adamw', 'muon', 'normuon')
DECAYS = ('linear', '1-sqrt')

_BOUNDS = (  # (fields, smallest value, largest value, excluded value, rule)
    (('learning_rate', 'eps', 'decay_ratio'), 0, math.inf, 0, 'must be positive'),
    (('warmup_steps', 'weight_decay', 'clip_norm'), 0, math.inf, None,
     'must not be negative'),
    (('b1', 'b2'), 0, 1, 1, 'must lie in [0, 1)'),
    (('warmup_ratio', 'layer_decay', 'decay_ratio'), 0, 1, None, 'must lie in [0, 1]'),
    (('frozen_layers',), -1, math.inf, None, 'must be at least -1'),
    (('accumulation',), 1, math.inf, None, 'must be at least 1'))


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """The optimizer and its schedule."""

  # adamw, bert_adamw (google-research/bert's, without bias correction), lamb (for large
  # batches), stable_adamw (use it with clip_norm=0), muon, normuon.
  name: str = 'adamw'
  learning_rate: float = 1e-4  # the peak, after the warmup
  warmup_steps: int = 10_000  # steps in which the rate rises linearly from 0
  # The warmup as a share of all steps. To use it, set warmup_steps to 0.
  warmup_ratio: float = 0.0
  decay: str = 'linear'  # how the rate falls to 0: linear, 1-sqrt
  # Share of the steps after the warmup in which the rate falls. Before, it is constant.
  decay_ratio: float = 1.0
  b1: float = 0.9  # decay of the first moment
  b2: float = 0.999  # decay of the second moment
  eps: float = 1e-8  # added to the root of the second moment; BERT's is 1e-6
  weight_decay: float = 0.01  # decoupled; of all parameters but biases and norms
  clip_norm: float = 1.0  # largest norm of the whole gradient; 0 = no clipping
  accumulation: int = 1  # microbatches per step
  # The rate of a layer is this factor times the rate of the layer above. As in ELECTRA,
  # the rate of the top layer is the learning rate times the square of the factor. 1 = one
  # rate for all layers.
  layer_decay: float = 1.0
  frozen_layers: int = -1  # -1 = none, 0 = embeddings, n = these and the first n layers

  def __post_init__(self):
    errors.require_choice('optimizer.name', self.name, NAMES)
    errors.require_choice('optimizer.decay', self.decay, DECAYS)
    for names, smallest, largest, excluded, rule in _BOUNDS:
      for name in names:
        value = getattr(self, name)
        errors.require(smallest <= value <= largest and value != excluded,
                       f'optimizer.{name}={value} {rule}')
    errors.require(not (self.warmup_ratio and self.warmup_steps),
                   f'optimizer.warmup_steps={self.warmup_steps} and warmup_ratio='
                   f'{self.warmup_ratio}: give one of them and set the other to 0')


def _warmup(config: OptimizerConfig, train_steps: int) -> int:
  # The ratio as it is written: in floats, 0.29 * 100 is a little less than 29.
  return config.warmup_steps or int(Fraction(str(config.warmup_ratio)) * train_steps)


def check_steps(config: OptimizerConfig, train_steps: int):
  """Raises UserError if the warmup takes the whole run, or the run has too many steps."""
  errors.require(train_steps <= MOST_STEPS,
                 f'the run would have {train_steps:,} steps, and can have '
                 f'{MOST_STEPS:,}: make it shorter')
  name = 'warmup_steps' if config.warmup_steps else 'warmup_ratio'
  errors.require(
      _warmup(config, train_steps) < train_steps,
      f'optimizer.{name}={getattr(config, name)} leaves nothing of the '
      f'{train_steps} training steps: make the run longer or the warmup shorter')


def learning_rate(config: OptimizerConfig, train_steps: int) -> optax.Schedule:
  """The learning rate over the steps: linear warmup to the peak, then decay to 0.

  It is peak * min(t / warmup, 1, (T - t) / (T - S)). T is `train_steps`. The decay
  begins at S: at the end of the warmup, as in fairseq and transformers, or later
  (warmup-stable-decay). In the code of BERT, ALBERT and ELECTRA it begins at step 0, so
  their rate is lower by the factor 1 - warmup / T. With 1-sqrt the rate falls as
  1 - sqrt((t - S) / (T - S)) (Haegele et al., arXiv:2405.18392).

  Returns:
    A function: the number of updates so far, t -> the rate of the next update, float32.

  Raises:
    UserError: see `check_steps`.
  """
  check_steps(config, train_steps)
  warmup = _warmup(config, train_steps)
  start = train_steps - config.decay_ratio * (train_steps - warmup)

  def schedule(t):
    t = jnp.asarray(t, jnp.float32)
    decay = (train_steps - t) / (train_steps - start)
    if config.decay == '1-sqrt':
      decay = 1 - jnp.sqrt(jnp.maximum(1 - decay, 0.0))
    rise = t / warmup if warmup else 1.0
    return config.learning_rate * jnp.clip(jnp.minimum(rise, decay), 0.0, 1.0)

  return schedule


def has_weight_decay(params) -> dict:
  """True for every parameter with weight decay: all except biases and norms."""
  return jax.tree.map(
      lambda kind: kind not in (parameters.Kind.BIAS, parameters.Kind.NORM),
      parameters.kinds(params))


def _clip(most: float) -> optax.GradientTransformation:
  """Scales the gradients so that their global norm is at most `most`.

  optax divides by the norm instead. Both moments need the clipped gradients, and XLA does
  not repeat a division for each moment: it would store all clipped gradients.
  """

  def scale(updates, _):
    factor = jnp.minimum(1, most / optax.tree.norm(updates))
    return jax.tree.map(lambda x: x * factor, updates)

  return optax.stateless(scale)


def make_optimizer(config: OptimizerConfig, train_steps: int,
                   dtype: str = 'float32') -> optax.GradientTransformation:
  """Chains clipping, AdamW (Loshchilov and Hutter 2019) or a successor, and the schedule.

  Muon and NorMuon multiply matrices in `dtype`, as the model does; the rest is float32.
  """
  moments = dict(b1=config.b1, b2=config.b2, eps=config.eps)
  decay = optax.add_decayed_weights(config.weight_decay, mask=has_weight_decay)
  adam = optax.scale_by_adam(**moments)
  direction = {  # from gradients to updates, with weight decay, before the rate
      'adamw': [adam, decay],
      'bert_adamw': [transforms.scale_by_uncorrected_adam(**moments), decay],
      # As in the code of the paper, parameters without decay are not adapted either.
      'lamb': [adam, decay, optax.masked(transforms.trust_ratio(), has_weight_decay)],
      'stable_adamw': [transforms.stable_adam(**moments, decay=decay)],
      'muon': [transforms.muon(adam, jnp.dtype(dtype)), decay],
      'normuon': [transforms.muon(adam, jnp.dtype(dtype), by_neuron=True), decay],
  }[config.name]
  clip = _clip(config.clip_norm) if config.clip_norm else optax.identity()
  steps = [clip, *direction]
  if config.frozen_layers >= 0:
    freeze = transforms.freeze(config.frozen_layers)
    # First, so that frozen layers do not count in the gradient norm. Last, because weight
    # decay would change them.
    steps = [freeze, *steps, freeze]
  if config.layer_decay != 1:
    steps.append(transforms.scale_by_depth(config.layer_decay))
  return optax.chain(
      *steps, optax.scale_by_learning_rate(learning_rate(config, train_steps)))


def after_skipped_step(before: optax.OptState, after: optax.OptState) -> optax.OptState:
  """The state after a skipped step, in which only the schedule moves."""
  # Checkpoints name the parts of the state by index, so the schedule must stay last.
  return (*before[:-1], after[-1])
