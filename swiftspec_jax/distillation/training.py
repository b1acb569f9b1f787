"""One step of training, pure: options, optimiser, losses and update."""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from swiftspec_jax import errors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.distillation import evaluation, losses, student
from swiftspec_jax.models import params as params_lib

OPTIMISERS = ('adamw', 'muon')
_ADAM_B2 = 0.98
# Root mean square of updates, near that of AdamW (Moonlight, section 2.2).
_MUON_RMS = 0.2
_WEIGHT_DECAY = 0.01  # of all but the norms
_CLIP_NORM = 1.0  # of the gradient
_ADAM_SHARE = 1 / 6  # of Muon's learning rate, for what it does not turn
_PASS_DECAY = 0.8  # weight of a pass against the one before it (EAGLE-3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
  """What a run does; with the data, all that its result depends on.

  Attributes:
    student: architecture of the draft.
    loss: weights of the losses.
    num_steps: optimiser steps.
    tokens_per_batch: tokens of one step, padding included.
    learning_rate: learning rate at its peak.
    warmup_steps: until the peak; then it falls as a cosine.
    final_learning_rate: share of the peak at the end.
    prompt_weight: weight of tokens of prompts and documents; answers have 1.
    user_weight: weight of turns that the target wrote as the user.
    num_passes: tokens of the chain that a draft which reads features is
      trained for; others have one pass.
    seed: seed of initialisation and order.
    compute_dtype: dtype of products; parameters and optimiser are float32.
    optimiser: 'adamw', or 'muon' for the layers, with AdamW for the rest.
  """

  student: student.StudentConfig
  loss: losses.LossWeights
  num_steps: int = 1000
  tokens_per_batch: int = 4096
  learning_rate: float = 6e-4
  warmup_steps: int = 50
  final_learning_rate: float = 0.05
  prompt_weight: float = 0.1
  user_weight: float = 0.3
  num_passes: int = 3
  seed: int = 0
  compute_dtype: str = 'float32'
  optimiser: str = 'adamw'

  def __post_init__(self):
    positive = (
      'num_steps',
      'tokens_per_batch',
      'learning_rate',
      'num_passes',
    )
    checks = {name: (getattr(self, name) > 0, 'positive') for name in positive}
    is_known = self.optimiser in OPTIMISERS
    checks['optimiser'] = (is_known, f'one of {", ".join(OPTIMISERS)}')
    errors.check_fields(self, checks)
    if not 0 <= self.warmup_steps < self.num_steps:
      raise errors.UserError(
        f'warmup_steps={self.warmup_steps} must be at least 0 and less than '
        f'num_steps={self.num_steps}'
      )

  @property
  def role_weights(self) -> tuple[float, float, float]:
    """Weights in the order of `samples.Role`."""
    return (self.prompt_weight, self.user_weight, 1.0)

  def to_json(self) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(self)))


def optimiser(config: TrainingConfig) -> optax.GradientTransformation:
  """Returns clipping and the optimiser, with warm-up and cosine."""
  schedule = optax.warmup_cosine_decay_schedule(
    0.0,
    config.learning_rate,
    config.warmup_steps,
    config.num_steps,
    config.final_learning_rate * config.learning_rate,
  )
  update = {'adamw': _adamw, 'muon': _muon}[config.optimiser]
  return optax.chain(optax.clip_by_global_norm(_CLIP_NORM), update(schedule))


def _is_decayed(params):
  return jax.tree.map(lambda x: x.ndim > 1, params)


def _adamw(schedule):
  return optax.adamw(
    schedule, b2=_ADAM_B2, weight_decay=_WEIGHT_DECAY, mask=_is_decayed
  )


def _muon(schedule):
  """Returns Muon for the layers (Jordan et al., 2024), AdamW for the rest."""
  return optax.contrib.muon(
    schedule,
    consistent_rms=_MUON_RMS,
    weight_decay=_WEIGHT_DECAY,
    weight_decay_mask=_is_decayed,
    adam_b2=_ADAM_B2,
    adam_learning_rate=lambda step: _ADAM_SHARE * schedule(step),
    adam_weight_decay=_WEIGHT_DECAY,
    muon_weight_dimension_numbers=_muon_axes,
  )


def _muon_axes(params):
  """Returns the axes of inputs and outputs of each matrix; None for others."""

  def axes(path, x):
    name = path[-1].key
    if x.ndim < 2 or name == 'unembedding':
      return None
    num_inputs = x.ndim - 1 if name == 'attention_out' else 1
    every = tuple(range(x.ndim))
    return optax.contrib.MuonDimensionNumbers(
      every[:num_inputs], every[num_inputs:]
    )

  return jax.tree_util.tree_map_with_path(axes, params)


def _measures(params, frozen, batch, config, model_config, num_passes):
  """Returns `losses.token_losses` of each pass."""
  dtype = jnp.dtype(config.compute_dtype)

  def cast(x):
    # Norm scales stay float32.
    return x.astype(dtype) if x.ndim > 1 else x

  passes = student.forward(
    jax.tree.map(cast, {**frozen, **params}),
    model_config,
    batch,
    num_passes if model_config.reads_features else 1,
  )
  return [
    losses.token_losses(logits, batch['top_outputs'], batch['top_log_probs'])
    for logits in passes
  ]


def _with_later(passes):
  """Returns the measures of pass 1, and the agreement of the others."""
  later = {
    f'agreement_{number}': measures['agreement']
    for number, measures in enumerate(passes[1:], 2)
  }
  return {**passes[0], **later}


@functools.partial(jax.jit, static_argnames=('config', 'model_config'))
def measure(
  params: params_lib.Params,
  frozen: params_lib.Params,
  batch: dict[str, jax.Array],
  *,
  config: TrainingConfig,
  model_config: ModelConfig,
) -> dict[str, jax.Array]:
  """Returns `losses.token_losses` f32[B, M] of a batch.

  For a draft that reads features these are of tokens after the target's, and
  `agreement_2`, `agreement_3`, ... of later tokens of a chain.

  Args:
    params: those that are trained.
    frozen: the others.
    batch: the arrays of `packing.Batch`, with `top_outputs` for
      `top_token_ids` and, if the draft reads them, `features`.
    config: static configuration of the training.
    model_config: configuration of the draft; static.
  """
  return _with_later(
    _measures(params, frozen, batch, config, model_config, evaluation.CHAIN)
  )


@functools.partial(
  jax.jit, static_argnames=('config', 'model_config'), donate_argnames='state'
)
def train_step(
  state: dict[str, Any],
  frozen: params_lib.Params,
  batch: dict[str, jax.Array],
  *,
  config: TrainingConfig,
  model_config: ModelConfig,
) -> tuple[dict[str, Any], dict[str, jax.Array]]:
  """Returns the state after a step, and the loss and means over answers.

  Args:
    state: 'params' and 'optimiser'; donated.
    frozen: parameters that are not trained.
    batch: same as in `measure`.
    config: static configuration of the training.
    model_config: configuration of the draft; static.
  """

  def loss_fn(params):
    passes = _measures(
      params, frozen, batch, config, model_config, config.num_passes
    )
    measures = _with_later(passes)
    weights = batch['weights']
    total = jnp.maximum(weights.sum(), 1.0)
    shares = _PASS_DECAY ** np.arange(len(passes))
    loss = sum(
      (losses.total_loss(values, config.loss) * weights).sum() / total * share
      for values, share in zip(
        passes, (shares / shares.sum()).tolist(), strict=True
      )
    )
    is_answer = batch['is_answer']
    means = {
      name: jnp.where(is_answer, value, 0.0).sum()
      / jnp.maximum(is_answer.sum(), 1).astype(jnp.float32)
      for name, value in measures.items()
    }
    return loss, means

  (loss, means), gradient = jax.value_and_grad(loss_fn, has_aux=True)(
    state['params']
  )
  # Optax mixes Python numbers and arrays of other types.
  with jax.numpy_dtype_promotion('standard'):
    updates, optimiser_state = optimiser(config).update(
      gradient, state['optimiser'], state['params']
    )
    params = optax.apply_updates(state['params'], updates)
  metrics = {
    'loss': loss,
    'gradient_norm': optax.tree.norm(gradient),
    **means,
  }
  return {'params': params, 'optimiser': optimiser_state}, metrics
