"""Writes text in large batches: many continuations of few prefixes, on device.

F prefixes (such as documents) are prefilled once. Each has C rows that go on
from it, all N steps long, without the host in between. A row follows a
script: forced tokens (such as an instruction) and generated passages take
turns. A row that has ended a branch begins the next one after the same prefix,
so that none is ever idle.

Keys lie with the rows last: so a CPU multiplies them with few queries several
times faster.

Legend:
- F prefixes, C rows for each, B = F * C rows
- P longest prefix, N rows of the cache after it, R script length, T steps
- G kv heads, Q query heads for each kv head, E head_dim
- V vocabulary, K stored entries of the distribution, H width of the features
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from tqdm import tqdm

from kernels_pallas import products
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.distillation.writing import prefix_attention, top_tokens
from swiftspec_jax.models import decoder, layers
from swiftspec_jax.models.cache import dense
from swiftspec_jax.models.model import Model
from swiftspec_jax.models.params import Params

GENERATE = -1  # in a script: the model writes here
_PREFILL_CHUNK = 256
_STEPS = 128  # of one program


@struct.dataclass(frozen=True, kw_only=True)
class Script:
  """What the rows do; op r is a forced token, or a generated passage."""

  ops: jax.Array  # i32[B, R] token id, or GENERATE
  begins_branch: jax.Array  # bool[B, R] of forced tokens
  temperatures: jax.Array  # f32[B, R] of generated passages; 0 is greedy
  limits: jax.Array  # i32[B, R] most tokens of generated passages
  stop_token_ids: jax.Array  # i32[stops] end a generated passage


@struct.dataclass(frozen=True, kw_only=True)
class Prefix:
  """Keys and values of the prefixes."""

  keys: list[jax.Array]  # layers x [F, G, E, P]
  values: list[jax.Array]  # layers x [F, G, P, E]
  lengths: jax.Array  # i32[F]


@struct.dataclass(frozen=True, kw_only=True)
class _State:
  keys: list[jax.Array]  # layers x [B, G, E, N]
  values: list[jax.Array]  # layers x [B, G, N, E]
  token_ids: jax.Array  # i32[B] the newest, not yet in the cache
  op_index: jax.Array  # i32[B] of the newest token
  next_ops: jax.Array  # i32[B]
  num_generated: jax.Array  # i32[B] in this passage
  branch_starts: jax.Array  # i32[B] row of the cache
  step: jax.Array  # i32[]
  key: jax.Array


@struct.dataclass(frozen=True, kw_only=True)
class Rollout:
  """What the rows wrote; host arrays."""

  token_ids: np.ndarray  # i32[B, T]
  op_index: np.ndarray  # i32[B, T] op of the script that a token comes from
  top: top_tokens.TopTokens  # [B, T, K] of the next token
  features: np.ndarray | None  # f16[B, T, H]


def prefill(
  model: Model,
  token_ids: np.ndarray,
  lengths: np.ndarray,
  *,
  num_stored: int,
  feature_layers: tuple[int, ...] = (),
) -> tuple[Prefix, top_tokens.TopTokens, np.ndarray | None]:
  """Reads the prefixes.

  Args:
    model: the target.
    token_ids: i32[F, P]; P is a multiple of 64.
    lengths: i32[F] tokens that count.
    num_stored: K.
    feature_layers: layers of the target, whose outputs are stored.

  Returns:
    The prefixes, and as host arrays the distribution [F, P, K] after each
    token and the features f16[F, P, H].
  """
  num_prefixes, capacity = token_ids.shape
  cache = dense.init(
    model.config, num_prefixes, capacity, model.dtype, model.mesh
  )
  parts = []
  for start in range(0, capacity, _PREFILL_CHUNK):
    size = min(_PREFILL_CHUNK, capacity - start)
    cache, *part = _prefill_chunk(
      model.params,
      token_ids[:, start : start + size],
      cache,
      np.full(num_prefixes, start, np.int32),
      config=model.config,
      context=start + size,
      num_stored=num_stored,
      feature_layers=feature_layers,
    )
    parts.append(part)
  parts = jax.device_get(parts)
  top, features = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *parts)
  prefix = Prefix(
    keys=[jnp.swapaxes(keys, 2, 3) for keys in cache.keys],
    values=cache.values,
    lengths=jnp.asarray(lengths),
  )
  return prefix, top, features


@functools.partial(
  jax.jit,
  static_argnames=('config', 'context', 'num_stored', 'feature_layers'),
  donate_argnames='cache',
)
def _prefill_chunk(
  params,
  token_ids,
  cache,
  starts,
  *,
  config,
  context,
  num_stored,
  feature_layers,
):
  hidden, features, cache = decoder.forward_with_features(
    params,
    config,
    token_ids,
    cache,
    starts=starts,
    context=context,
    feature_layers=feature_layers,
  )
  # Of one prefix at a time, as logits are large.
  top = jax.lax.map(
    lambda part: top_tokens.largest(_logits(params, config, part), num_stored),
    hidden,
  )
  return cache, top, _stored(features)


def _stored(features):
  return None if features is None else features.astype(jnp.float16)


def roll_out(
  model: Model,
  prefix: Prefix,
  script: Script,
  *,
  num_steps: int,
  num_stored: int,
  key: jax.Array,
  feature_layers: tuple[int, ...] = (),
  show_progress: str | None = None,
) -> Rollout:
  """Lets each row follow its script.

  Args:
    model: the target.
    prefix: cache of F sequences; rows f * C to f * C + C - 1 go on from prefix
      f.
    script: script of B rows; its first op is a forced token that begins a
      branch.
    num_steps: T, a multiple of 128.
    num_stored: K.
    key: consumed.
    feature_layers: layers of the target, whose outputs are stored.
    show_progress: label of a bar on standard error, None for no bar.
  """
  config = model.config
  batch = len(script.ops)
  own_dtype = products.stored_dtype(model.dtype, model.mesh)

  def empty(are_keys):
    shapes = (
      (batch, heads, head_dim, 0) if are_keys else (batch, heads, 0, head_dim)
      for heads, head_dim in config.kv_heads
    )
    return [jnp.zeros(shape, own_dtype) for shape in shapes]

  zeros = jnp.zeros(batch, jnp.int32)
  state = _State(
    keys=empty(are_keys=True),
    values=empty(are_keys=False),
    token_ids=jnp.asarray(script.ops[:, 0]),
    op_index=zeros,
    next_ops=zeros + 1,
    num_generated=zeros,
    branch_starts=zeros,
    step=jnp.zeros((), jnp.int32),
    key=key,
  )
  outputs = []
  for _ in tqdm(
    range(0, num_steps, _STEPS),
    show_progress,
    disable=show_progress is None,
    leave=False,
  ):
    state, output = _run_steps(
      model.params,
      prefix,
      script,
      state,
      config=config,
      num_stored=num_stored,
      feature_layers=feature_layers,
    )
    outputs.append(jax.device_get(output))
  token_ids, op_index, top, features = jax.tree.map(
    lambda *parts: np.moveaxis(np.concatenate(parts), 0, 1), *outputs
  )
  return Rollout(
    token_ids=token_ids, op_index=op_index, top=top, features=features
  )


@functools.partial(
  jax.jit, static_argnames=('config', 'num_stored', 'feature_layers')
)
def _run_steps(
  params, prefix, script, state, *, config, num_stored, feature_layers
):
  """Runs as many steps as the cache gets new rows here."""

  def longer(rows, axis):
    padding = [(0, _STEPS if i == axis else 0) for i in range(4)]
    return jnp.pad(rows, padding)

  state = state.replace(
    keys=[longer(rows, 3) for rows in state.keys],
    values=[longer(rows, 2) for rows in state.values],
  )

  def step(state, _):
    output = (state.token_ids, state.op_index)
    state, logits, features = _forward(
      params, config, prefix, state, feature_layers
    )
    top = top_tokens.largest(logits, num_stored)
    return _advance(script, state, logits, top), (*output, top, features)

  return jax.lax.scan(step, state, length=_STEPS)


def _forward(params, config, prefix, state, feature_layers):
  """Reads the newest tokens.

  Returns:
    The new state, logits [B, V] and features f16[B, H].
  """
  num_prefixes = len(prefix.lengths)
  batch = len(state.token_ids)
  per_prefix = batch // num_prefixes
  lengths = jnp.repeat(prefix.lengths, per_prefix)
  positions = lengths + state.step - state.branch_starts
  slots = jnp.arange(prefix.keys[0].shape[3])[None]
  rows = jnp.arange(state.keys[0].shape[3])[None]
  in_prefix = (slots < prefix.lengths[:, None])[:, None]
  in_own = (rows >= state.branch_starts[:, None]) & (rows <= state.step)
  visible = {False: (in_prefix, in_own)}
  if config.sliding_window is not None:
    ends = layers.window_ends(positions, config)[:, None]
    near_slots = ends - slots < config.sliding_window
    near_slots = near_slots.reshape(num_prefixes, per_prefix, -1)
    row_positions = positions[:, None] - state.step + rows
    near_rows = ends - row_positions < config.sliding_window
    visible[True] = (in_prefix & near_slots, in_own & near_rows)
  keys, values = [], []

  def attend(i, queries, new_keys, new_values):
    seen, news = config.kv_layer(i), ()
    if new_keys is not None:
      news = (
        (new_keys, state.keys[i], (0, 2, 3, 1), keys),
        (new_values, state.values[i], (0, 2, 1, 3), values),
      )
    for new, old, axes, all_rows in news:
      new = new.transpose(axes).astype(old.dtype)
      all_rows.append(
        jax.lax.dynamic_update_slice_in_dim(
          old, new, state.step, axis=axes.index(1)
        )
      )
    shared = queries.reshape(
      num_prefixes, per_prefix, *queries.shape[2:]
    ).transpose(0, 2, 1, 3, 4)
    attended = prefix_attention.attend(
      shared * jnp.asarray(decoder.query_scale(config), shared.dtype),
      (prefix.keys[seen], prefix.values[seen]),
      (keys[seen], values[seen]),
      *visible[config.is_sliding(i)],
      params['layers'][i].get('sinks'),
    )
    return attended.transpose(0, 2, 1, 3, 4).reshape(queries.shape)

  hidden, features = decoder.run_layers(
    params,
    config,
    state.token_ids[:, None],
    positions[:, None],
    attend,
    feature_layers=feature_layers,
  )
  logits = _logits(params, config, hidden[:, 0])
  state = state.replace(keys=keys, values=values, step=state.step + 1)
  return state, logits, None if features is None else _stored(features[:, 0])


def _logits(params: Params, config: ModelConfig, hidden: jax.Array):
  """Returns f32[B, V] of hidden states [B, D]."""
  return decoder.unembed(params, config, hidden[None])[0]


def _advance(script, state, logits, top):
  """Chooses the next tokens."""

  def of_next(values):
    index = jnp.minimum(state.next_ops, values.shape[1] - 1)
    return jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]

  op = of_next(script.ops)
  is_forced = op != GENERATE
  temperatures = of_next(script.temperatures)
  key, noise_key = jax.random.split(state.key)
  uniform = jax.random.uniform(noise_key, (2, len(op)))
  drawn = top_tokens.draw(logits, top, temperatures, uniform)
  chosen = jnp.where(temperatures > 0, drawn, top.token_ids[:, 0])
  token_ids = jnp.where(is_forced, op, chosen).astype(jnp.int32)
  num_generated = jnp.where(is_forced, 0, state.num_generated + 1)
  is_stop = (token_ids[:, None] == script.stop_token_ids[None]).any(-1)
  ends = is_forced | is_stop | (num_generated >= of_next(script.limits))
  begins = is_forced & of_next(script.begins_branch)
  return state.replace(
    token_ids=token_ids,
    op_index=state.next_ops,
    next_ops=state.next_ops + ends.astype(jnp.int32),
    num_generated=jnp.where(ends, 0, num_generated),
    branch_starts=jnp.where(begins, state.step, state.branch_starts),
    key=key,
  )
