"""A draft reads a part of a text: of a new row, or after a pause."""

import functools

import jax
import jax.numpy as jnp

from swiftspec_jax import tree as tree_lib
from swiftspec_jax.config import ModelConfig, TreeConfig
from swiftspec_jax.drafters.texts import text_lookup
from swiftspec_jax.drafters.trees import tree_draft
from swiftspec_jax.models import decoder
from swiftspec_jax.models.params import Params
from swiftspec_jax.step import rows as rows_lib
from swiftspec_jax.tree import arrays, types


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
  """Reads a part of the text of one row, and begins a new tree after it.

  Args:
    params: parameters of the draft model.
    state: donated; the row has keys and values of all tokens before `start`.
    slot: i32[] the row.
    chunk: i32[1, C + 2] tokens from `start` on, with anything after the end of
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
      before_root=arrays.take(before, last[:, None, None])[:, 0].astype(
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
    is_real=jnp.arange(token_ids.shape[1])[None] <= last[:, None],
  )
  lookup = row.lookup
  if lookup is not None:
    lookup = text_lookup.catch_up(lookup, token_ids, start, length)
  row = row.replace(
    cache=cache.replace(kv_lengths=length - 1),
    tree=tree_draft.new_tree(
      tree_config, jnp.take_along_axis(token_ids, last[:, None], axis=1)[:, 0]
    ),
    # Nothing of another tree is left, as after a miss.
    outcome=jnp.full_like(row.outcome, tree_lib.MISS),
    before=jnp.full_like(row.before, types.PLACEHOLDER_TOKEN_ID),
    lookup=lookup,
    features=feature_state,
  )
  return rows_lib.insert_row(state, row, slot)
