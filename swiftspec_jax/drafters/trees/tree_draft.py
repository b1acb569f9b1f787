"""A draft model that grows a token tree: the draft's part of a tree round.

Pure functions of the draft's own state. `grow` runs while the target verifies;
`advance` follows the verdict and gives the next proposal. Nothing here waits
for the target's arrays but `advance`.

Legend: B rows, T nodes sent, W leaves of a forward, K children of a leaf, S
tokens, M cache rows of the tree.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from swiftspec_jax import tree as tree_lib
from swiftspec_jax.config import ModelConfig, TreeConfig
from swiftspec_jax.drafters.models import feature_draft
from swiftspec_jax.drafters.texts import text_lookup
from swiftspec_jax.drafters.trees import following, forced_acceptance
from swiftspec_jax.models.cache import dense
from swiftspec_jax.models.params import Params
from swiftspec_jax.runtime import sharding as sharding_lib
from swiftspec_jax.step.control_flow import run_if
from swiftspec_jax.tree import types


@struct.dataclass(frozen=True, kw_only=True)
class TreeDraftState:
  """What the draft keeps between rounds; all leaves lead with the row axis."""

  cache: dense.KVCache  # the root and what follows is not committed
  tree: tree_lib.DraftTree
  outcome: jax.Array  # i32[B] of the row's last verdict
  is_busy: jax.Array  # bool[B] rows that decode; nobody waits for the others
  # i32[B] the token before the root, where it lacks keys and values, or
  # PLACEHOLDER_TOKEN_ID.
  before: jax.Array
  reference: forced_acceptance.Reference | None  # where acceptance is forced
  lookup: text_lookup.TextLookup | None  # where the text suggests nodes, too
  features: feature_draft.FeatureState | None  # where the draft reads them


def init(
  config: ModelConfig,
  tree_config: TreeConfig,
  dtype: jax.typing.DTypeLike,
  *,
  batch_size: int,
  capacity: int,
  mesh: Mesh,
) -> TreeDraftState:
  """Returns the state of idle rows.

  Args:
    config: configuration of the draft model.
    tree_config: sizes of the tree.
    dtype: dtype of the cache.
    batch_size: B.
    capacity: S, tokens that prompt and output can have together.
    mesh: mesh of the draft.
  """
  # Besides the tree, there must be room for a forward whose leaves are padding,
  # and for one that reads verified tokens.
  num_read = max(tree_config.num_leaves, tree_config.num_nodes, 2)
  num_scratch = tree_config.num_cache_rows + num_read
  cache = dense.init(config, batch_size, capacity + num_scratch, dtype, mesh)
  put = functools.partial(sharding_lib.replicate, mesh=mesh)
  zeros = np.zeros(batch_size, np.int32)
  reference = None
  if tree_config.forced_acceptance is not None:
    reference = forced_acceptance.make_reference((), 0, capacity)
  lookup = text_lookup.make_row(tree_config, (), capacity)
  reference, lookup = jax.tree.map(
    lambda x: np.repeat(x, batch_size, axis=0), (reference, lookup)
  )
  features = feature_draft.make_state(
    config,
    dtype,
    batch_size,
    tree_config.num_cache_rows + tree_config.num_leaves,
  )
  return TreeDraftState(
    cache=cache,
    tree=put(new_tree(tree_config, zeros)),
    outcome=put(zeros),
    is_busy=put(zeros.astype(bool)),
    before=put(zeros + types.PLACEHOLDER_TOKEN_ID),
    reference=put(reference),
    lookup=put(lookup),
    features=put(features),
  )


@functools.partial(jax.jit, static_argnames='tree_config')
def new_tree(
  tree_config: TreeConfig, root_token_ids: jax.Array
) -> tree_lib.DraftTree:
  """Returns trees of a root alone: i32[B], the last known tokens."""
  return tree_lib.new_tree(
    root_token_ids,
    capacity=tree_config.capacity,
    num_cache_rows=tree_config.num_cache_rows,
    chain_length=1 + tree_config.num_nodes if tree_config.prompt_lookup else 1,
  )


@functools.partial(
  jax.jit,
  static_argnames=('config', 'tree_config'),
  donate_argnames='state',
)
def grow(
  params: Params,
  state: TreeDraftState,
  num_steps: jax.Array,
  min_mass: jax.Array | None = None,
  *,
  config: ModelConfig,
  tree_config: TreeConfig,
) -> tuple[TreeDraftState, jax.Array]:
  """Grows the trees by `num_steps` i32[] forwards, new trees from their roots.

  Where a row lacks the token before its root, the first forward is for such
  rows alone. `min_mass` f32[] is as in `tree.grow`.

  Returns:
    The state and the number i32[] of forwards: fewer if all trees are full.
  """
  num_restarts = jnp.int32(0)
  if not config.reads_features:  # else a verdict expands its root
    with jax.named_scope('restart'):
      is_restart = state.is_busy & (state.before != types.PLACEHOLDER_TOKEN_ID)
      must_restart = jnp.any(is_restart) & (num_steps > 0)
      num_restarts = must_restart.astype(jnp.int32)
      state = run_if(
        must_restart,
        lambda now: following.restart_rows(
          params, now, is_restart, config, tree_config
        ),
        state,
      )
  with jax.named_scope('grow'):
    state, num_forwards = _grow(
      params, state, num_steps - num_restarts, 0, min_mass, config, tree_config
    )
  return state, num_restarts + num_forwards


@functools.partial(
  jax.jit,
  static_argnames=('config', 'tree_config', 'num_nodes'),
  donate_argnames='state',
)
def advance(
  params: Params,
  state: TreeDraftState,
  verified: types.PackedVerified,
  num_restart_steps: jax.Array,
  wait_from: jax.Array,
  budgets: jax.Array | None = None,
  min_mass: jax.Array | None = None,
  *,
  config: ModelConfig,
  tree_config: TreeConfig,
  num_nodes: int,
) -> tuple[TreeDraftState, jax.Array]:
  """Follows a verdict and chooses what to send next, on devices of its own.

  Args:
    params: parameters of the draft model.
    state: donated.
    verified: the packed `VerifiedTokens` of the proposal before, and, if the
      draft reads them, the features. Rows without tokens stay as they are.
    num_restart_steps: i32[] forwards besides the restart, if a new root is not
      expanded.
    wait_from: i32[] fewest rows without a tree, their roots not expanded, that
      hold up the others until they have T nodes. Where there are fewer, they
      send what there is, their roots at least, and `grow` does the rest.
    budgets: i32[B] most nodes that each row sends, its root left out; None for
      T - 1.
    min_mass: f32[] as in `tree.grow`.
    config: configuration of the draft model.
    tree_config: sizes of the tree.
    num_nodes: T to send; trees that are smaller grow until they have them.

  Returns:
    The state and the packed `TreeProposal`. If every root is expanded and
    has T nodes left, there is no draft forward in between, unless the draft
    reads features.
  """
  follow = following.follow
  if config.reads_features:
    follow = following.follow_with_features
  state, verified, is_new, is_waited_for, num_before = follow(
    params, state, verified, wait_from, config, tree_config
  )
  with jax.named_scope('look_up'):
    state = following.look_up(state, verified)
  with jax.named_scope('grow'):
    num_steps = jnp.where(is_waited_for, num_restart_steps, 0)
    least = num_nodes if budgets is None else budgets + 1
    # Nobody waits for late rows.
    least = jnp.where(is_new & ~is_waited_for, 0, least)
    state, num_forwards = _grow(
      params, state, num_steps, least, min_mass, config, tree_config
    )
  num_forwards += num_before
  return state, _propose(state, verified, num_forwards, num_nodes, budgets)


@functools.partial(
  jax.jit,
  static_argnames=('config', 'tree_config', 'num_nodes', 'num_steps'),
  donate_argnames='state',
)
def take_turn(
  params: Params,
  state: TreeDraftState,
  verified: types.PackedVerified,
  budgets: jax.Array | None = None,
  min_mass: jax.Array | None = None,
  *,
  config: ModelConfig,
  tree_config: TreeConfig,
  num_nodes: int,
  num_steps: int,
) -> tuple[TreeDraftState, jax.Array]:
  """Follows a verdict and grows what is sent next, on the target's devices.

  One forward reads what the cache lacks and expands new roots, and `num_steps`
  grow the trees. Unless there is a `min_mass` they do not depend on the trees,
  as a GPU waits for the host at the end of each turn of a loop that does: on an
  H100 a round of Llama 8B with 1B spent 2.8 of 15 ms so.

  Args:
    params: parameters of the draft model.
    state: donated.
    verified: same as in `advance`.
    budgets: same as in `advance`.
    min_mass: f32[] as in `tree.grow`.
    config: configuration of the draft model.
    tree_config: sizes of the tree.
    num_nodes: T to send, or as many as there are.
    num_steps: static number of forwards after the first one.

  Returns:
    The state and the packed `TreeProposal`.
  """
  follow = following.follow_in_turn
  if config.reads_features:
    follow = following.follow_features_in_turn
  state, verified = follow(params, state, verified, config, tree_config)
  with jax.named_scope('look_up'):
    state = following.look_up(state, verified)
  with jax.named_scope('grow'):
    least = None
    if min_mass is not None:
      least = num_nodes if budgets is None else budgets + 1
    state, num_forwards = _grow(
      params, state, num_steps, least, min_mass, config, tree_config
    )
  return state, _propose(state, verified, num_forwards + 1, num_nodes, budgets)


def _propose(state, verified, num_forwards, num_nodes, budgets):
  """Returns the packed `TreeProposal`."""
  with jax.named_scope('select'):
    chosen = tree_lib.select(state.tree, num_nodes, budgets)
  has_followed = verified.num_tokens > 0
  return chosen.replace(
    outcome=jnp.where(has_followed, state.outcome, types.NO_OUTCOME),
    num_forwards=jnp.broadcast_to(num_forwards, chosen.size.shape),
  ).pack()


def _grow(params, state, num_steps, num_nodes, min_mass, config, tree_config):
  """Returns the state with grown trees, and the number of forwards.

  That is `num_steps` where `num_nodes` is None. Trees of idle rows and of rows
  that lack the token before the root stay as they are if their root is not
  expanded.
  """
  is_ready = state.is_busy & (state.before == types.PLACEHOLDER_TOKEN_ID)
  children_fn = functools.partial(
    following.children_of, config=config, tree_config=tree_config
  )

  def draft_fn(carry, leaves):
    cache, features, num_forwards = carry
    lengths = cache.kv_lengths
    of_rows = None if features is None else features.of_rows
    hidden, cache, of_rows = feature_draft.read_leaves(
      params, config, cache, of_rows, leaves, lengths
    )
    if features is not None:
      features = features.replace(of_rows=of_rows)
    children = children_fn(params, hidden, leaves, lengths, state.reference)
    return *children, (cache, features, num_forwards + 1)

  tree, (cache, features, num_forwards) = tree_lib.grow(
    state.tree,
    (state.cache, state.features, jnp.int32(0)),
    draft_fn,
    num_steps=num_steps,
    width=tree_config.num_leaves,
    num_nodes=num_nodes,
    min_mass=min_mass,
    is_growing=is_ready | (state.tree.num_expanded > 0),
  )
  state = state.replace(tree=tree, cache=cache, features=features)
  return state, num_forwards
