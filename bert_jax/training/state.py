"""The sharded training state, and the jitted steps that update and evaluate it."""

from collections.abc import Callable
import functools
import operator
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict
import optax

from bert_jax.objectives import losses
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.parallel import sharding
from bert_jax.tasks.task import Task
from bert_jax.training import optimizer as optimizer_lib


class TrainState(NamedTuple):
  """Everything that a training step reads and writes, except its batch."""

  step: jax.Array  # [] int32, the number of steps so far, including skipped ones
  params: Any
  opt_state: Any
  frozen: Any  # not trained and not in checkpoints: a teacher, the base of LoRA


def root_key(seed: int) -> jax.Array:
  """The root key of a run: threefry draws the same bits on every mesh, shard by shard."""
  return jax.random.key(seed, impl='threefry2x32')


def make_init(task: Task, optimizer: optax.GradientTransformation, mesh: Mesh,
              preset: str) -> tuple[Callable[[jax.Array], TrainState], TrainState]:
  """Returns `init`, which makes the sharded state of step 0 from a key, and its shapes.

  The shapes are ShapeDtypeStructs with shardings: `restore` takes them. They include the
  frozen arrays of the task. `init` leaves these out, and `shard_like` adds them later.

  Raises:
    UserError: the mesh does not divide a parameter.
  """

  def init(key, frozen):
    params = task.init(key)
    # The optimizer sees the boxes, so that its moments inherit the parameters' axes.
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), frozen)

  # Outside the mesh, where unboxing adds no sharding constraint.
  boxed = jax.eval_shape(init, root_key(0), task.frozen)
  shardings = sharding.shardings(boxed, mesh, preset)
  shapes = nn.unbox(boxed)
  for name in ('params', 'frozen'):
    sharding.check_divides(getattr(shapes, name), getattr(shardings, name), preset)
  abstract = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
  return sharding.with_mesh(lambda key: nn.unbox(init(key, {})), mesh, preset,
                            out_shardings=shardings._replace(frozen={})), abstract


def shard_like(tree: Any, abstract: Any) -> Any:
  """Places host arrays, which every process has in full, sharded like `abstract`."""
  return jax.tree.map(lambda x, like: jax.make_array_from_callback(
      like.shape, like.sharding, x.__getitem__), tree, abstract)


def _sum_over_microbatches(function: Callable[[Any], Any], batch: Any,
                           number: int) -> Any:
  """The sum of `function` over `number` microbatches of a batch."""
  parts = mesh_lib.split_rows(batch, number)
  first = jax.tree.map(operator.itemgetter(0), parts)
  zero = jax.tree.map(jnp.zeros_like, jax.eval_shape(function, first))

  def add(total, part):
    return jax.tree.map(jnp.add, total, function(part)), None

  return jax.lax.scan(add, zero, parts)[0]


def make_train_step(task: Task, optimizer: optax.GradientTransformation, mesh: Mesh,
                    preset: str, abstract: TrainState, *, seed: int,
                    accumulation: int) -> Callable:
  """The jitted step: (state, batch) -> (state, `losses.Metrics`). It donates the state.

  The batch has the sharding of `put_batch`, and the state the shardings of `abstract`.

  With microbatches the gradient is the gradient of the whole batch (up to rounding, and
  with different dropout bits): every loss is divided by its count over the whole batch.
  A loss that compares the texts of a batch sees only the texts of its microbatch.

  If the loss or its gradient is not finite, only the step number and the schedule
  advance, and the metric 'skipped' is 1.
  """

  def step(state: TrainState, batch):
    key = jax.random.fold_in(root_key(seed), state.step)

    def gradients(batch, counts):
      """(gradients, metrics) of a batch; `counts` replaces the counts of its losses."""
      def loss(params):
        metrics = task.loss(params, state.frozen, batch, key)
        of_loss = {name: (total, counts.get(name, count))
                   for name, (total, count) in metrics.items()}
        return losses.total_loss(of_loss, task.loss_weights), metrics
      return jax.grad(loss, has_aux=True)(state.params)

    if accumulation == 1:
      grads, metrics = gradients(batch, {})
    else:
      # XLA drops this forward pass, because only the counts are used.
      whole = task.loss(state.params, state.frozen, batch, key)
      counts = {name: whole[name][1] for name in task.loss_weights if name in whole}
      grads, metrics = _sum_over_microbatches(
          functools.partial(gradients, counts=counts), batch, accumulation)

    with jax.named_scope('optimizer'):
      norm = optax.tree.norm(grads)
      updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
      updated = optax.apply_updates(state.params, updates), opt_state
      skipped = state.params, optimizer_lib.after_skipped_step(state.opt_state, opt_state)
      total = losses.total_loss(metrics, task.loss_weights)
      is_finite = jnp.isfinite(norm) & jnp.isfinite(total)
      # A select, not a branch: the device decides without asking the host.
      params, opt_state = jax.tree.map(functools.partial(jnp.where, is_finite),
                                       updated, skipped)
    metrics['grad_norm'] = (norm, jnp.float32(1))
    metrics['skipped'] = (1 - is_finite.astype(jnp.float32), jnp.float32(1))
    return TrainState(state.step + 1, params, opt_state, state.frozen), metrics

  shardings = jax.tree.map(operator.attrgetter('sharding'), abstract)
  return sharding.with_mesh(step, mesh, preset, donate_argnums=0,
                            in_shardings=(shardings, mesh_lib.batch_sharding(mesh)),
                            out_shardings=(shardings, mesh_lib.replicated(mesh)))


def make_programs(task: Task, config: ConfigDict, mesh: Mesh, train_steps: int
                  ) -> tuple[Callable[[jax.Array], TrainState], TrainState, Callable]:
  """Returns (init, abstract state, train step) of a run with the optimizer of its config.

  See `make_init` and `make_train_step`.
  """
  settings = optimizer_lib.OptimizerConfig(**config.optimizer)
  optimizer = optimizer_lib.make_optimizer(settings, train_steps, config.model.dtype)
  init, abstract = make_init(task, optimizer, mesh, config.sharding)
  return init, abstract, make_train_step(
      task, optimizer, mesh, config.sharding, abstract, seed=config.seed,
      accumulation=settings.accumulation)


def eval_microbatches(config: ConfigDict) -> int:
  """The microbatches of an evaluation: only the `measure` of pretraining returns sums."""
  return config.optimizer.accumulation if config.task == 'pretrain' else 1


def make_eval_step(task: Task, mesh: Mesh, preset: str, accumulation: int = 1) -> Callable:
  """The jitted evaluation step: (state, batch) -> `Task.measure`, on every device.

  With `accumulation` above 1, `measure` must return sums: they are added over
  microbatches, so that a batch that trains also fits here.
  """

  def step(state: TrainState, batch):
    measure = functools.partial(task.measure, state.params, state.frozen)
    if accumulation == 1:
      return measure(batch)
    return _sum_over_microbatches(measure, batch, accumulation)

  return sharding.with_mesh(step, mesh, preset, out_shardings=mesh_lib.replicated(mesh))
