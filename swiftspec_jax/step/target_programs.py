"""The programs of a step of the target.

Legend: M queries, B slots, K longest draft, T = K + 1, V vocabulary.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import attention
from swiftspec_jax.models.cache import dense, paged
from swiftspec_jax.models.params import Params
from swiftspec_jax.step import sampling as sampling_lib
from swiftspec_jax.step import (
  slot_trees,
  stateless_drafter,
  step_input,
  target_forward,
  verify,
)
from swiftspec_jax.step.control_flow import run_if
from swiftspec_jax.step.ragged_batch import StepSizes
from swiftspec_jax.step.rows import Rows
from swiftspec_jax.step.slot_sampling import SamplingLevel
from swiftspec_jax.step.slot_trees import SlotTrees
from swiftspec_jax.step.target_forward import Cache
from swiftspec_jax.step.verdicts import Verdicts
from swiftspec_jax.tree import types


@functools.partial(jax.jit, static_argnames='kernels', donate_argnames='cache')
def commit_nodes(
  cache: Cache, places: jax.Array, packed: jax.Array, *, kernels: str
) -> Cache:
  """Moves the accepted nodes of trees one after another.

  Args:
    cache: donated.
    places: i32[B, T] of the nodes, as `PlacedStep.node_places`.
    packed: packed `Verdicts` on trees.
    kernels: static name, one of `kernels_pallas.dispatch.IMPLEMENTATIONS`.
  """
  num_nodes = places.shape[1]
  verdicts = Verdicts.unpack(packed, num_nodes)
  nodes = jnp.arange(num_nodes)[None]
  is_accepted = nodes <= verdicts.num_accepted[:, None]
  if isinstance(cache, dense.KVCache):
    # What is no accepted node stays: slots without a tree have anything there.
    path = jnp.where(is_accepted, verdicts.tree.path, nodes)
    return _commit_rows(cache, places[:, 0], path, kernels)
  sources = jnp.take_along_axis(places, verdicts.tree.path, axis=1)
  targets = jnp.where(is_accepted, places, cache.num_places)
  return paged.commit(cache, sources[:, 1:], targets[:, 1:], kernels=kernels)


def _commit_rows(cache, starts, path, kernels):
  """Moves what lies at `path` i32[B, T] after `starts` i32[B]."""
  if cache.features is not None:
    places = (starts[:, None] + path)[:, :, None]
    features = jnp.take_along_axis(cache.features, places, axis=1)
    cache = dense.write_features(cache, features, starts)
  # How long rows are is known of the texts.
  cache = cache.replace(kv_lengths=starts)
  return dense.commit(cache, path, jnp.zeros_like(starts), kernels=kernels)


@functools.partial(
  jax.jit,
  static_argnames=('config', 'flat', 'num_queries'),
  donate_argnames='cache',
)
def query_logits(
  params: Params,
  cache: Cache,
  packed: jax.Array,
  rows: Rows,
  drafted: jax.Array | None,
  trees: SlotTrees | None,
  *,
  config: ModelConfig,
  flat: StepSizes,
  num_queries: int,
) -> tuple[Cache, jax.Array, jax.Array, verify.Queries, jax.Array | None]:
  """Runs the target over the tokens of a step.

  Args:
    params: parameters of the target.
    cache: donated.
    packed: step, as `step_input.pack` returns it.
    rows: texts of the slots.
    drafted: i32[B, K]; None in steps without drafts.
    trees: trees of the drafts; None where they are chains, or none.
    config: static configuration of the model.
    flat: static sizes of the program.
    num_queries: M; static.

  Returns:
    The cache; logits f32[M, V], token ids i32[M] and more of the queries; and
    `PlacedStep.node_places`.
  """
  step = step_input.place(
    packed, rows, drafted, trees, cache, flat=flat, num_queries=num_queries
  )
  hidden, cache = target_forward.forward(
    params,
    config,
    step.token_ids,
    step.batch,
    cache,
    is_real=step.slots < len(rows.lengths),
  )
  token_ids = step.token_ids
  if num_queries < flat.num_tokens:
    hidden, token_ids = hidden[step.query_index], token_ids[step.query_index]
  if attention.is_native(config, cache.sharding.mesh):
    hidden = jnp.where(step.is_query[:, None], hidden, 0)
  logits = target_forward.logits_of(params, config, hidden)
  return cache, logits, token_ids, step.queries, step.node_places


def run_parts(
  call: Callable[..., Any],
  params: Params,
  cache: Cache,
  packed: jax.Array,
  rows: Rows,
  chains: jax.Array,
  trees: jax.Array | None,
  sampling: sampling_lib.SamplingState,
  *,
  config: ModelConfig,
  flat: StepSizes,
  num_queries: int,
  level: SamplingLevel,
  sharding: NamedSharding,
  find_masks: Callable[[], tuple[Any, Any]] | None = None,
) -> tuple[Cache, Rows, jax.Array, types.Logprobs | None]:
  """Runs the parts of a step, each by `call`.

  Chains and trees are those of `SlotDrafts`; where there are trees, chains are
  not looked at. `find_masks` returns masks and index of `verify.restrict`; the
  host works on them while the devices run the target. The other arguments are
  those of the parts.

  Returns:
    The cache, and what `verify.verify` returns.
  """
  if trees is not None:
    chains, trees = call(slot_trees.of_proposal, trees)
  with jax.named_scope('target_forward'):
    cache, logits, token_ids, queries, places = call(
      query_logits,
      params,
      cache,
      packed,
      rows,
      chains if flat.has_drafts else None,
      trees,
      config=config,
      flat=flat,
      num_queries=num_queries,
    )
  if find_masks is not None:
    logits = call(verify.restrict, logits, queries, *find_masks())
  noise = None
  if level != SamplingLevel.GREEDY:
    noise = call(
      verify.make_noise,
      sampling.seeds,
      queries.slots,
      queries.positions,
      vocab_size=config.vocab_size,
    )
  with jax.named_scope('verify'):
    rows, verdicts, logprobs = call(
      verify.verify,
      logits,
      noise,
      token_ids,
      queries,
      chains,
      sampling,
      rows,
      trees,
      reads_texts=level == SamplingLevel.ADJUSTED,
      kernels=config.kernels,
      sharding=sharding,
    )
  if trees is not None:
    with jax.named_scope('commit'):
      cache = call(
        commit_nodes, cache, places, verdicts, kernels=config.kernels
      )
  return cache, rows, verdicts, logprobs


@functools.partial(
  jax.jit,
  static_argnames=('config', 'flat', 'num_queries', 'level', 'sharding'),
  donate_argnames=('cache', 'rows'),
)
def run_step(params, cache, packed, rows, *args, **statics):
  """Does what `run_parts` does, in one program."""
  return run_parts(operator.call, params, cache, packed, rows, *args, **statics)


@functools.partial(
  jax.jit,
  static_argnames=(
    *('config', 'flat', 'num_queries', 'level', 'sharding'),
    *('plain', 'drafter', 'max_length'),
  ),
  donate_argnames=('cache', 'rows'),
)
def run_searching_step(
  params: Params,
  cache: Cache,
  packed: jax.Array,
  rows: Rows,
  wanted: jax.Array,
  least_found: jax.Array,
  *args: Any,
  drafter: stateless_drafter.StatelessDrafter,
  max_length: int,
  plain: StepSizes | None,
  flat: StepSizes,
  **statics: Any,
) -> tuple[Any, ...]:
  """Looks drafts up, and does what `run_step` does with them.

  Where none is found, rows feed one token each if there are sizes for it.

  Args:
    params: same as in `query_logits`.
    cache: donated.
    packed: step of rows that decode.
    rows: donated.
    wanted: i32[B] most tokens for each slot.
    least_found: i32[]; above 0 the step is as wide as with drafts.
    *args: further arguments of `run_parts`.
    drafter: static drafter that looks them up.
    max_length: K; static.
    plain: static sizes for one token a row; None for steps that are as wide
      whatever is found.
    flat: static sizes for drafts.
    **statics: further arguments of `run_parts`.

  Returns:
    What `run_parts` does; and `num_found` and chains of `SlotDrafts`.
  """
  with jax.named_scope('look_up'):
    chains, num_found = stateless_drafter.propose(
      rows, wanted, drafter=drafter, max_length=max_length
    )
  run = functools.partial(run_parts, operator.call, params)

  def run_wide(cache, rows):
    return run(cache, packed, rows, chains, None, *args, flat=flat, **statics)

  if plain is None:
    return *run_wide(cache, rows), num_found, chains

  def run_plain(cache, rows):
    cache, rows, *verdicts = run(
      cache,
      step_input.without_drafts(packed),
      rows,
      chains,
      None,
      *args,
      **{**statics, 'flat': plain, 'num_queries': plain.num_rows},
    )
    return cache, rows, *jax.tree.map(pad, tuple(verdicts), outputs)

  def pad(x, wide):
    """Pads what there is of each token of a draft."""
    missing = [(0, 0)] * x.ndim
    missing[1] = (0, wide.shape[1] - x.shape[1])
    return jnp.pad(x, missing)

  outputs = jax.eval_shape(run_wide, cache, rows)[2:]
  empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), outputs)
  carry = (cache, rows, *empty)
  is_wide = jnp.any(num_found > 0) | (least_found > 0)
  carry = run_if(~is_wide, lambda carry: run_plain(*carry[:2]), carry)
  carry = run_if(is_wide, lambda carry: run_wide(*carry[:2]), carry)
  return *carry, num_found, chains
