"""What a draft does with its target's features, in a tree (EAGLE-3 style).

Each token is read together with the feature of the one before it. Of verified
tokens that is the target's, which comes with the verdict; of nodes it is the
draft's own hidden state at their parent. So after each verdict the verified
tokens are read once more, with the target's features: one forward, which gives
their keys and values and expands the new root. Nodes that were grown before
the verdict keep what their own features made of them: in asynchronous mode that
is worth a little acceptance, and never a token.

Legend: B rows, T tokens of a verdict, W leaves, M cache rows of the tree, D
embed, H features of the target.
"""

import jax
import jax.numpy as jnp
from flax import struct

from swiftspec_jax import errors
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import decoder
from swiftspec_jax.models.cache import dense
from swiftspec_jax.models.model import Model
from swiftspec_jax.models.params import Params
from swiftspec_jax.tree import arrays, types


@struct.dataclass(frozen=True, kw_only=True)
class FeatureState:
  """What a draft that reads features keeps of them; rows lead."""

  # [B, M + W, D] hidden states at the rows of the tree; padding is last.
  of_rows: jax.Array
  before_root: jax.Array  # [B, D] of the prompt's last token but one


def make_state(
  config: ModelConfig, dtype: jax.typing.DTypeLike, batch_size: int, size: int
) -> FeatureState | None:
  """Returns an empty state for M + W = `size`; None without features."""
  if not config.reads_features:
    return None
  return FeatureState(
    of_rows=jnp.zeros((batch_size, size, config.hidden_dim), dtype),
    before_root=jnp.zeros((batch_size, config.hidden_dim), dtype),
  )


def check_layers(draft: Model, target: Model) -> None:
  """Raises UserError if the draft reads what the target does not have."""
  if not draft.config.reads_features:
    return
  layers, width = draft.config.feature_layers, target.config.embed_dim
  is_wide = draft.config.feature_dim == len(layers) * width
  if max(layers) >= target.config.num_layers or not is_wide:
    raise errors.UserError(
      f'{draft.name} reads layers {layers} of its target, '
      f'{draft.config.feature_dim} numbers; {target.name} has '
      f'{target.config.num_layers} layers of {width}: load the target that '
      'the draft was trained for'
    )


def check_lives(draft: Model) -> None:
  """Raises UserError if a draft has no hidden states for persistent trees."""
  if draft.config.block is not None:
    raise errors.UserError(
      f'{draft.name} drafts a whole block in one forward, so that no tree of '
      'it lives on; give it to an engine alone (mode chain) or in a TreeDraft '
      '(mode tree)'
    )


def read_leaves(
  params: Params,
  config: ModelConfig,
  cache: dense.KVCache,
  of_rows: jax.Array | None,
  leaves: tree_lib.Leaves,
  lengths: jax.Array,
) -> tuple[jax.Array, dense.KVCache, jax.Array | None]:
  """Runs the draft over leaves of its trees.

  Args:
    params: parameters of the draft.
    config: configuration of the draft.
    cache: cache of the draft.
    of_rows: [B, any, D] hidden states at the rows of the tree; None where the
      draft reads no features.
    leaves: leaves of the trees.
    lengths: i32[B] rows of the cache in front of the trees.

  Returns:
    Hidden states [B, W, D], the cache, and `of_rows` with these.
  """
  before = None if of_rows is None else _before_leaves(of_rows, leaves)
  hidden, cache = decoder.forward(
    params,
    config,
    jnp.maximum(leaves.token_ids, 0),
    cache,
    starts=lengths + leaves.cache_slots[:, 0],
    positions=lengths[:, None] + leaves.depths,
    attention_mask=leaves.attention_mask,
    features_before=before,
    is_real=leaves.nodes != tree_lib.NO_NODE,
  )
  if of_rows is not None:
    of_rows = _put(of_rows, hidden, leaves.cache_slots[:, 0])
  return hidden, cache, of_rows


def _before_leaves(of_rows: jax.Array, leaves: tree_lib.Leaves) -> jax.Array:
  """Returns the features [B, W, D] of what stands before the leaves.

  That is the parent; or, of a leaf whose parent is in the same forward, the
  nearest node above that has been expanded.

  Args:
    of_rows: [B, any, D] hidden states at the rows of the tree.
    leaves: leaves of the tree.
  """
  rows = jnp.arange(leaves.attention_mask.shape[2])[None, None]
  is_above = leaves.attention_mask & (rows < leaves.cache_slots[:, :1, None])
  # Nodes are expanded after those above them.
  nearest = jnp.where(is_above, rows, 0).max(axis=2)
  return _take(of_rows, nearest)


def follow(
  params: Params,
  cache: dense.KVCache,
  state: FeatureState,
  verified: types.VerifiedTokens,
  features: jax.Array,
  tree: tree_lib.DraftTree,
  moved: tree_lib.Reroot,
  *,
  config: ModelConfig,
) -> tuple[dense.KVCache, FeatureState]:
  """Reads verified tokens with the target's features, and commits them.

  The forward writes after the rows of the tree, so that those of surviving
  nodes stay; one move then brings all to their places. Afterwards the first row
  of the tree is that of the root, whether that is a node with children or not
  yet. A row without news that has such a root already stays as it is.

  Args:
    params: parameters of the draft.
    cache: cache when the verdict came; needs T rows after the M of the
      tree.
    state: state when the verdict came.
    verified: the verdict.
    features: [B, T, H] of the old root and all verified tokens but the last.
    tree: after the verdict.
    moved: changes that the verdict made to it.
    config: static configuration of the model.
  """
  num_rows = tree.num_cache_rows
  num_tokens = verified.num_tokens
  has_news = num_tokens > 0
  root = tree.root_token_ids
  token_ids = jnp.where(has_news[:, None], verified.token_ids, root[:, None])
  steps = jnp.arange(token_ids.shape[1])
  before = decoder.project_features(params, config, features)
  before = jnp.where(
    has_news[:, None, None], before, state.before_root[:, None]
  )
  hidden, cache = decoder.forward(
    params,
    config,
    jnp.maximum(token_ids, 0),
    cache,
    starts=cache.kv_lengths + num_rows,
    # The old root comes first.
    positions=(cache.kv_lengths + has_news.astype(jnp.int32))[:, None]
    + steps[None],
    attention_mask=_chain_mask(has_news, num_rows, len(steps)),
    features_before=before,
  )
  is_read = has_news | (tree.num_expanded == 0)
  last = jnp.maximum(num_tokens - 1, 0)
  path, survivors = _path(moved, num_tokens, is_read, last + num_rows)
  is_root = jnp.arange(num_rows)[None, :, None] == 0
  kept = jnp.where(
    is_root & is_read[:, None, None],
    _take(hidden, last[:, None]),
    _take(state.of_rows, survivors),
  )
  state = state.replace(of_rows=state.of_rows.at[:, :num_rows].set(kept))
  cache = dense.commit(
    cache,
    path,
    num_tokens,
    num_rows=num_rows + token_ids.shape[1],
    kernels=config.kernels,
  )
  return cache, state


def _chain_mask(has_news, num_rows, size):
  """Returns bool[B, T, M + T]: the old root, if there is one, and a chain."""
  steps = jnp.arange(size)
  is_first_row = jnp.arange(num_rows) == 0
  sees_root = has_news[:, None, None] & is_first_row[None, None]
  chain = steps[:, None] >= steps[None]
  shape = (has_news.shape[0], size)
  return jnp.concatenate(
    [
      jnp.broadcast_to(sees_root, (*shape, num_rows)),
      jnp.broadcast_to(chain[None], (*shape, size)),
    ],
    axis=2,
  )


def _path(moved, num_tokens, is_read, root_row):
  """Returns which rows to keep i32[B, M + T], and the surviving ones i32[B, M].

  Rows to keep are the old root, the verified tokens after it, the new root
  (`root_row` where it was read), the other nodes of its tree.
  """
  num_rows = moved.path.shape[1]
  survivors = arrays.take(
    moved.path, moved.num_committed[:, None] + jnp.arange(num_rows)[None]
  )
  places = jnp.arange(num_rows + 1)[None] - num_tokens[:, None]
  from_tree = arrays.take(survivors, places)
  root = jnp.where(is_read, root_row, survivors[:, 0])[:, None]
  steps = jnp.arange(num_rows + 1)[None]
  chain = jnp.where(steps == 0, 0, num_rows + steps - 1)
  path = jnp.where(places < 0, chain, jnp.where(places == 0, root, from_tree))
  return path, survivors


def _take(values, indices):
  """Returns values [B, n, D] at i32[B, m]."""
  return arrays.take(values, indices[:, :, None])


def _put(values, new, starts):
  """Writes [B, m, D] into [B, n, D] from i32[B] on."""
  return jax.vmap(
    lambda row, block, start: jax.lax.dynamic_update_slice_in_dim(
      row, block, start, axis=0
    )
  )(values, new.astype(values.dtype), starts)
