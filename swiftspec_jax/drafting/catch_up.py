"""A draft that was left out for some rounds reads what it missed.

One that stands alone reads the end of the text. One that reads features needs
those of the missed rounds, too, so their verdicts are joined to a single one.
Where the host knows texts and features, a row reads any part of its text.
"""

import functools

import jax
import jax.numpy as jnp

from swiftspec_jax import spec_step, types
from swiftspec_jax.config import ModelConfig, TreeConfig
from swiftspec_jax.drafting import feature_draft, text_lookup, tree_draft
from swiftspec_jax.models import decoder
from swiftspec_jax.models.params import Params


@functools.partial(jax.jit, static_argnames='size')
def recent_tokens(
  token_ids: jax.Array, lengths: jax.Array, *, size: int
) -> jax.Array:
  """Returns the end of each text: `size` (C) tokens, and the length.

  Args:
    token_ids: i32[B, S] of the target's state.
    lengths: i32[B] tokens known.
    size: C; static.

  Returns:
    i32[B, C + 1]; a text that is shorter is there from its start, and anything
    stands behind it.
  """
  starts = jnp.maximum(lengths - size, 0)
  places = starts[:, None] + jnp.arange(size)[None]
  places = jnp.minimum(places, token_ids.shape[1] - 1)
  tokens = jnp.take_along_axis(token_ids, places, axis=1)
  return jnp.concatenate([tokens, lengths[:, None]], axis=1)


@functools.partial(jax.jit, donate_argnames='missed')
def join(
  missed: types.PackedVerified, verified: types.PackedVerified
) -> types.PackedVerified:
  """Appends a verdict to those that a draft has missed.

  Args:
    missed: buffer of C tokens, T of which are free in each row; donated.
    verified: verdict on T tokens, with features.
  """
  (packed, features), (new_packed, new_features) = missed, verified
  old = types.VerifiedTokens.unpack(packed)
  new = types.VerifiedTokens.unpack(new_packed)

  def put(values, block):
    return jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))(
      values, block, old.num_tokens, 0
    )

  joined = types.VerifiedTokens(
    token_ids=put(old.token_ids, new.token_ids),
    num_tokens=old.num_tokens + new.num_tokens,
  )
  return joined.pack(), put(features, new_features)


@functools.partial(jax.jit, donate_argnames='missed')
def forget(
  missed: types.PackedVerified, is_forgotten: jax.Array
) -> types.PackedVerified:
  """Empties the rows bool[B] of what a draft has missed, which is donated."""
  packed, features = missed
  counts = jnp.where(is_forgotten, 0, packed[:, -1])
  return packed.at[:, -1].set(counts), features


@functools.partial(
  jax.jit, static_argnames=('config', 'tree_config'), donate_argnames='state'
)
def catch_up(
  params: Params,
  state: tree_draft.TreeDraftState,
  recent: jax.Array,
  *,
  config: ModelConfig,
  tree_config: TreeConfig,
) -> tuple[tree_draft.TreeDraftState, jax.Array]:
  """Reads the end of the texts, and begins new trees behind them.

  Args:
    params: parameters of the draft model.
    state: donated; no row lacks more than C - 1 tokens.
    recent: i32[B, C + 1] of `recent_tokens`. Rows of the cache that are known
      already are computed again, to the same values.
    config: configuration of the draft model; static.
    tree_config: sizes of the tree; static.

  Returns:
    The state, in which each tree is its root alone, the last token of the
    text; and the outcomes i32[B], to wait for.
  """
  token_ids, lengths = recent[:, :-1], recent[:, -1]
  size = token_ids.shape[1]
  starts = jnp.maximum(lengths - size, 0)
  with jax.named_scope('catch_up'):
    _, cache = decoder.forward(
      params, config, token_ids, state.cache, starts=starts
    )
  last = jnp.maximum(lengths - starts - 1, 0)[:, None]
  roots = jnp.take_along_axis(token_ids, last, axis=1)[:, 0]
  lookup = state.lookup
  if lookup is not None:
    lookup = text_lookup.catch_up(lookup, token_ids, starts, lengths)
  outcome = jnp.full_like(state.outcome, types.NO_OUTCOME)
  state = state.replace(
    cache=cache.replace(kv_lengths=jnp.maximum(lengths - 1, 0)),
    tree=tree_draft.new_tree(tree_config, roots),
    outcome=outcome,
    before=jnp.full_like(state.before, types.PLACEHOLDER_TOKEN_ID),
    lookup=lookup,
  )
  return state, jnp.copy(outcome)


@functools.partial(
  jax.jit,
  static_argnames=('config', 'tree_config', 'context'),
  donate_argnames='state',
)
def read_row(
  params: Params,
  state: tree_draft.TreeDraftState,
  slot: jax.Array,
  chunk: jax.Array,
  features: jax.Array | None,
  *,
  config: ModelConfig,
  tree_config: TreeConfig,
  context: int,
) -> tree_draft.TreeDraftState:
  """Reads a part of the text of one row, and begins a new tree behind it.

  Args:
    params: parameters of the draft model.
    state: donated; the row has keys and values of all tokens before `start`.
    slot: i32[] the row.
    chunk: i32[1, C + 2] tokens from `start` on, with anything behind the end of
      the text; `start`; and `length`, tokens of the text up to the last one
      that is read, which is the root afterwards.
    features: [1, C, H] of the target, of the token before each, 0 where there
      is none; None if the draft reads none.
    config: configuration of the draft model; static.
    tree_config: sizes of the tree; static.
    context: rows of the cache under the attention, `start + C` at least;
      static.
  """
  token_ids, start, length = chunk[:, :-2], chunk[:, -2], chunk[:, -1]
  row = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1), state)
  before, feature_state = None, row.features
  last = length - start - 1
  if features is not None:
    before = decoder.project_features(params, config, features)
    feature_state = feature_state.replace(
      before_root=feature_draft.take_chunk(before, last, 1)[:, 0].astype(
        feature_state.before_root.dtype
      )
    )
  _, cache = decoder.forward(
    params,
    config,
    token_ids,
    row.cache,
    starts=start,
    context=context,
    features_before=before,
  )
  lookup = row.lookup
  if lookup is not None:
    lookup = text_lookup.catch_up(lookup, token_ids, start, length)
  row = row.replace(
    cache=cache.replace(kv_lengths=length - 1),
    tree=tree_draft.new_tree(
      tree_config, jnp.take_along_axis(token_ids, last[:, None], axis=1)[:, 0]
    ),
    outcome=jnp.full_like(row.outcome, types.NO_OUTCOME),
    before=jnp.full_like(row.before, types.PLACEHOLDER_TOKEN_ID),
    lookup=lookup,
    features=feature_state,
  )
  return spec_step.insert_row(state, row, slot)
