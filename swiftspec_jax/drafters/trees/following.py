"""What a verdict does to the trees of a draft, their caches and features.

Legend: B rows, W leaves of a forward, K children of a leaf, D embed.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.vocabulary import largest
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.config import ModelConfig, TreeConfig
from swiftspec_jax.drafters.models import feature_draft
from swiftspec_jax.drafters.texts import text_lookup
from swiftspec_jax.drafters.trees import forced_acceptance
from swiftspec_jax.models import decoder
from swiftspec_jax.models.cache import dense
from swiftspec_jax.models.params import Params
from swiftspec_jax.step.control_flow import run_if
from swiftspec_jax.tree import arrays, types


def _is_waited_for(is_new, wait_from):
  """Returns bool[], whether new trees of rows bool[B] grow first."""
  return jnp.sum(is_new) >= jnp.maximum(wait_from, 1)


def _is_new(state):
  """Returns bool[B], rows whose roots are not expanded."""
  return state.is_busy & (state.tree.num_expanded == 0)


def follow(params, state, verified, wait_from, config, tree_config):
  """Follows a verdict, and expands the roots that are not, if that is due.

  Returns:
    The state; the verdict, unpacked; rows bool[B] that need a new tree; bool[]
    whether these grow first; and the number of forwards.
  """
  verified = types.VerifiedTokens.unpack(verified)
  state, num_missing = _commit(state, verified, config)
  with jax.named_scope('take_in'):
    state, num_missing, num_prefills = _prefill(
      params, state, verified, num_missing, config, tree_config
    )
  with jax.named_scope('restart'):
    state = state.replace(before=_before_roots(state, verified, num_missing))
    is_new = _is_new(state)
    is_waited_for = _is_waited_for(is_new, wait_from)
    state = run_if(
      is_waited_for,
      lambda now: restart_rows(params, now, is_new, config, tree_config),
      state,
    )
  num_forwards = is_waited_for.astype(jnp.int32) + num_prefills
  return state, verified, is_new, is_waited_for, num_forwards


def follow_in_turn(params, state, verified, config, tree_config):
  """Follows a verdict, and expands the new roots in one forward.

  It also reads the accepted tokens without keys and values.

  Returns:
    The state, and the verdict, unpacked.
  """
  verified = types.VerifiedTokens.unpack(verified)
  state, num_missing = _commit(state, verified, config)
  with jax.named_scope('restart'):
    # A chain may have been sent before the draft has seen it.
    size = 2 if state.tree.chain_length == 1 else verified.token_ids.shape[1]
    root = state.tree.root_token_ids
    token_ids = jnp.where(
      (verified.num_tokens > 0)[:, None],
      _missing(verified, num_missing, size),
      root[:, None],
    )
    state = _read_roots(
      params, state, token_ids, num_missing, _is_new(state), config, tree_config
    )
  return state, verified


def follow_features_in_turn(params, state, verified, config, tree_config):
  """Does the same for a draft that reads features, and all verified tokens."""
  state, verified, root = _read_verified(
    params, state, verified, config, tree_config
  )
  with jax.named_scope('restart'):
    state = _expand_roots(
      params, state, root, _is_new(state), config, tree_config
    )
  return state, verified


def _before_roots(state, verified, num_missing):
  """Returns i32[B] the `before` of a state that has followed a verdict."""
  index = verified.num_tokens[:, None] - 2
  before = arrays.take(verified.token_ids, index)[:, 0]
  before = jnp.where(num_missing > 0, before, types.PLACEHOLDER_TOKEN_ID)
  return jnp.where(verified.num_tokens > 0, before, state.before)


def follow_with_features(
  params, state, verified, wait_from, config, tree_config
):
  """Does the same for a draft that reads features, and all verified tokens."""
  state, verified, root = _read_verified(
    params, state, verified, config, tree_config
  )
  with jax.named_scope('restart'):
    is_new = _is_new(state)
    state = run_if(
      jnp.any(is_new),
      lambda now: _expand_roots(params, now, root, is_new, config, tree_config),
      state,
    )
  is_waited_for = _is_waited_for(is_new, wait_from)
  return state, verified, is_new, is_waited_for, jnp.int32(1)


def _read_verified(params, state, verified, config, tree_config):
  """Follows a verdict and reads its tokens with the target's features.

  Returns:
    The state; the verdict, unpacked; and hidden states [B, 1, D] of the roots.
  """
  packed, features = verified
  verified = types.VerifiedTokens.unpack(packed)
  with jax.named_scope('reroot'):
    state, moved = _reroot(state, verified)
  with jax.named_scope('read_verified'):
    cache, feature_state = feature_draft.follow(
      params,
      state.cache,
      state.features,
      verified,
      features,
      state.tree,
      moved,
      config=config,
    )
    state = state.replace(cache=cache, features=feature_state)
  return state, verified, feature_state.of_rows[:, :1]


def _commit(state, verified, config):
  """Re-roots the trees and commits what the verdict leaves of them.

  Returns:
    The state, and the accepted tokens i32[B] without keys and values.
  """
  with jax.named_scope('reroot'):
    state, moved = _reroot(state, verified)
    cache = dense.commit(
      state.cache, moved.path, moved.num_committed, kernels=config.kernels
    )
  num_missing = verified.num_tokens - moved.num_committed
  return state.replace(cache=cache), num_missing


def _reroot(state, verified):
  """Returns the state with the tree after a verdict, and what moves."""
  tree, moved = tree_lib.reroot(
    state.tree, verified.token_ids, verified.num_tokens
  )
  has_news = verified.num_tokens > 0
  outcome = jnp.where(has_news, moved.outcome, state.outcome)
  return state.replace(tree=tree, outcome=outcome), moved


def _prefill(params, state, verified, num_missing, config, tree_config):
  """Takes accepted tokens without keys and values into the cache, but one.

  A chain may be sent before the draft has seen it. Rows that lack more than
  one token have a tree of a root alone, so that the rows after their prefix
  are free. The others write after their trees.

  Returns:
    The state, the tokens i32[B] that are still missing, at most one, and the
    number of forwards.
  """
  if state.tree.chain_length == 1:
    return state, num_missing, jnp.int32(0)

  def body(now):
    cache, num_missing, num_forwards = now
    num_new = jnp.clip(num_missing - 1, 0, tree_config.num_leaves)
    token_ids = _missing(verified, num_missing, tree_config.num_leaves)
    after = cache.kv_lengths + tree_config.num_cache_rows
    _, cache = decoder.forward(
      params,
      config,
      jnp.maximum(token_ids, 0),
      cache,
      starts=jnp.where(num_new > 0, cache.kv_lengths, after),
      is_real=jnp.arange(tree_config.num_leaves)[None] < num_new[:, None],
    )
    cache = dense.extend(cache, num_new)
    return cache, num_missing - num_new, num_forwards + 1

  cache, num_missing, num_forwards = jax.lax.while_loop(
    lambda now: jnp.any(now[1] > 1),
    body,
    (state.cache, num_missing, jnp.int32(0)),
  )
  return state.replace(cache=cache), num_missing, num_forwards


def _missing(verified, num_missing, size):
  """Returns i32[B, size], the tokens that are missing and those after them."""
  # The root, which is never missing, comes before the verified tokens.
  first = verified.num_tokens - num_missing - 1
  steps = jnp.arange(size)[None]
  return arrays.take(verified.token_ids, first[:, None] + steps)


def look_up(state, verified):
  """Adds what the text suggests after the new roots."""
  if state.lookup is None:
    return state
  lookup = text_lookup.follow(state.lookup, verified)
  lookup, log_probs = text_lookup.look_up(lookup)
  tree = tree_lib.add_chain(state.tree, lookup.chains, log_probs)
  return state.replace(tree=tree, lookup=lookup)


def restart_rows(params, state, is_new, config, tree_config):
  """Expands the roots of rows bool[B] in one forward of two tokens.

  After a miss the token before the root may lack keys and values, too; it
  takes the first place then.
  """
  root = state.tree.root_token_ids
  is_missing = is_new & (state.before != types.PLACEHOLDER_TOKEN_ID)
  token_ids = jnp.stack(
    [jnp.where(is_missing, state.before, root), root], axis=1
  )
  num_missing = is_missing.astype(jnp.int32)
  before = jnp.where(is_new, types.PLACEHOLDER_TOKEN_ID, state.before)
  return _read_roots(
    params,
    state.replace(before=before),
    token_ids,
    num_missing,
    is_new,
    config,
    tree_config,
  )


def _read_roots(
  params, state, token_ids, num_missing, is_new, config, tree_config
):
  """Reads what is missing and the roots after it, and expands these.

  Args:
    params: parameters of the draft.
    state: state after the verdict.
    token_ids: i32[B, any] of each row `num_missing` i32[B] tokens, its root,
      and anything.
    num_missing: tokens without keys and values.
    is_new: bool[B] rows with something to read. The others are kept: the
      forward writes after their trees.
    config: configuration of the draft.
    tree_config: sizes of the tree.
  """
  cache = state.cache
  after = cache.kv_lengths + tree_config.num_cache_rows
  hidden, cache = decoder.forward(
    params,
    config,
    jnp.maximum(token_ids, 0),
    cache,
    starts=jnp.where(is_new, cache.kv_lengths, after),
    is_real=is_new[:, None]
    & (jnp.arange(token_ids.shape[1])[None] <= num_missing[:, None]),
  )
  num_missing = jnp.where(is_new, num_missing, 0)
  state = state.replace(cache=dense.extend(cache, num_missing))
  hidden = jnp.take_along_axis(hidden, num_missing[:, None, None], axis=1)
  return _expand_roots(params, state, hidden, is_new, config, tree_config)


def _expand_roots(params, state, hidden, is_new, config, tree_config):
  """Expands the roots of rows bool[B], whose hidden states are [B, 1, D]."""
  leaves = tree_lib.root_leaves(state.tree, is_new)
  children = children_of(
    params,
    hidden,
    leaves,
    state.cache.kv_lengths,
    state.reference,
    config=config,
    tree_config=tree_config,
  )
  return state.replace(tree=tree_lib.expand(state.tree, leaves, *children))


def children_of(
  params: Params,
  hidden: jax.Array,
  leaves: tree_lib.Leaves,
  kv_lengths: jax.Array,
  reference: forced_acceptance.Reference | None,
  *,
  config: ModelConfig,
  tree_config: TreeConfig,
) -> tuple[jax.Array, jax.Array]:
  """Returns the K best children of each leaf and their log-probabilities.

  Args:
    params: parameters of the draft.
    hidden: [B, W, D] of the leaves.
    leaves: leaves of the tree.
    kv_lengths: i32[B] of the prefix.
    reference: text that forces acceptance, or None.
    config: configuration of the draft; static.
    tree_config: static sizes of the tree.

  Returns:
    i32[B, W, K] and f32[B, W, K].
  """
  with jax.named_scope('children'):
    logits = decoder.unembed(params, config, hidden)
    log_probs, indices = largest.top_log_probs(logits, tree_config.branching)
    token_ids = decoder.token_ids_of(params, config, indices)
  if reference is None:
    return token_ids, log_probs
  return forced_acceptance.force(
    reference,
    token_ids,
    log_probs,
    leaves.token_ids,
    kv_lengths[:, None] + leaves.depths,
    tree_config.forced_acceptance,
  )
