"""Trees that a draft model grows for the rows of an engine, on the device.

A tree grows in a copy of the row's pages.

Legend:
- R rows, U slots
- K longest draft, T = K + 1 nodes, D forwards, W leaves of a forward
- V vocabulary, V' tokens of it that the draft can propose
- E width of the draft
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from kernels_pallas.paged_attention import reference
from kernels_pallas.vocabulary import largest
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.drafters.models import feature_draft
from swiftspec_jax.drafters.models.draft_forward import (
  DraftRows,
  noise_of_outputs,
)
from swiftspec_jax.drafters.texts import text_lookup
from swiftspec_jax.models import decoder
from swiftspec_jax.models.cache import dense, paged
from swiftspec_jax.models.params import Params
from swiftspec_jax.step import sampling as sampling_lib
from swiftspec_jax.step import verify
from swiftspec_jax.tree import types


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeSizes:
  """What programs that grow trees are compiled for.

  Attributes:
    num_forwards: D.
    num_nodes: T to choose.
    width: W.
    branching: children of a leaf.
    prompt_lookup: same as in `TreeConfig`.
    min_leaf_mass: bound for trees that have the nodes asked for.
  """

  num_forwards: int
  num_nodes: int
  width: int
  branching: int
  prompt_lookup: bool
  min_leaf_mass: float

  @property
  def num_rows(self) -> int:
    """Most nodes that are expanded."""
    return 1 + (self.num_forwards - 1) * self.width

  @property
  def num_found(self) -> int:
    """Most nodes that a lookup brings."""
    return self.num_nodes - 1 if self.prompt_lookup else 0


@functools.partial(jax.jit, static_argnames=('config', 'sharding', 'sizes'))
def grow(
  params: Params,
  cache: paged.PagedCache,
  hidden: jax.Array,
  logits: jax.Array,
  noise: jax.Array | None,
  rows: DraftRows,
  num_steps: jax.Array,
  sampling: sampling_lib.SamplingState,
  *,
  config: ModelConfig,
  sharding: NamedSharding,
  sizes: TreeSizes,
) -> jax.Array:
  """Grows trees after the last known tokens.

  Args:
    params: parameters of the draft.
    cache: cache with the known tokens.
    hidden: [R, E] of the last known tokens.
    logits: f32[R, V'] after them.
    noise: f32[R, D, V] of the target, None where all slots are greedy.
    rows: rows to draft for.
    num_steps: i32[] forwards, at most D - 1.
    sampling: sampling parameters of the U slots.
    config: configuration of the draft; static.
    sharding: sharding of dense keys and values; static.
    sizes: sizes of the tree; static.

  Returns:
    i32[U, 5 T + 3], a packed `types.TreeProposal` by slot.
  """
  num_rows = sizes.num_rows + sizes.width  # with scratch
  children = _children_fn(
    params, config, noise, rows, sampling, sizes.branching
  )
  # The root lies where its row of the tree is: right after the others.
  lengths = rows.positions[:, 0] - 1
  of_rows = None
  if config.reads_features:
    of_rows = jnp.zeros((len(hidden), num_rows, config.hidden_dim))
    of_rows = of_rows.astype(hidden.dtype).at[:, 0].set(hidden)

  def draft_fn(carry, leaves):
    cache, of_rows = carry
    hidden, cache, of_rows = feature_draft.read_leaves(
      params, config, cache, of_rows, leaves, lengths
    )
    logits = decoder.unembed(params, config, hidden)
    return *children(logits, leaves.depths), (cache, of_rows)

  cache = _copy(
    cache,
    config.kv_heads,
    rows.page_table,
    lengths,
    num_rows,
    sharding,
  )
  return grown(
    children(logits[:, None], jnp.zeros_like(rows.slots)[:, None]),
    (cache, of_rows),
    draft_fn,
    rows,
    num_steps,
    sizes,
    num_slots=sampling.seeds.shape[0],
  )


def grown(
  first: tuple[jax.Array, jax.Array],
  carry: Any,
  draft_fn: tree_lib.DraftFn,
  rows: DraftRows,
  num_steps: jax.Array,
  sizes: TreeSizes,
  *,
  num_slots: int,
) -> jax.Array:
  """Returns trees whose roots have children already.

  Args:
    first: tokens [R, 1, children] and their log-probabilities.
    carry: same as in `tree_lib.grow`.
    draft_fn: same as in `tree_lib.grow`.
    rows: same as in `grow`.
    num_steps: same as in `grow`.
    sizes: same as in `grow`.
    num_slots: U.
  """
  tree = tree_lib.new_tree(
    jnp.zeros_like(rows.slots),
    capacity=1 + sizes.num_rows * sizes.branching + sizes.num_found,
    num_cache_rows=sizes.num_rows,
    chain_length=1 + sizes.num_found,
  )
  leaves = tree_lib.root_leaves(tree, jnp.ones_like(rows.slots, bool))
  tree = tree_lib.expand(tree, leaves, *first)
  tree = _with_lookups(tree, rows, sizes)
  stop = {}
  if sizes.min_leaf_mass:
    stop = {'num_nodes': rows.lengths + 1, 'min_mass': sizes.min_leaf_mass}
  tree, _ = tree_lib.grow(
    tree, carry, draft_fn, num_steps=num_steps, width=sizes.width, **stop
  )
  return _best_of(tree, rows, sizes.num_nodes, num_slots)


# Logits f32[R, W, V'] at depths i32[R, W] -> tokens i32[R, W, C] of the best
# children, and their log-probabilities f32[R, W, C].
_ChildrenFn = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def _children_fn(
  params: Params,
  config: ModelConfig,
  noise: jax.Array | None,
  rows: DraftRows,
  sampling: sampling_lib.SamplingState,
  branching: int,
) -> _ChildrenFn:
  """Returns a function that finds `branching` (C) children of nodes."""
  noise = noise_of_outputs(params, config, noise)

  def children(logits, depths):
    own = noise
    if noise is not None:
      own = jnp.take_along_axis(noise, depths[:, :, None], axis=1)
    scores = verify.draft_scores(logits, own, rows.slots, sampling)
    log_probs, index = largest.top_log_probs(scores, branching)
    return decoder.token_ids_of(params, config, index), log_probs

  return children


def _with_lookups(
  tree: tree_lib.DraftTree, rows: DraftRows, sizes: TreeSizes
) -> tree_lib.DraftTree:
  """Returns trees with the chain that the known text suggests."""
  if not sizes.prompt_lookup:
    return tree
  known, length = rows.positions[:, 0], sizes.num_nodes - 1
  chain = text_lookup.find(rows.texts, known, length=length)
  return tree_lib.add_chain(tree, *chain)


def _best_of(
  tree: tree_lib.DraftTree, rows: DraftRows, num_nodes: int, num_slots: int
) -> jax.Array:
  """Returns the best nodes of the trees by slot, a packed `TreeProposal`."""
  chosen = tree_lib.select(tree, num_nodes)
  # Padding belongs to no slot.
  slots = jnp.where(rows.lengths > 0, rows.slots, num_slots)
  zeros = jnp.zeros((num_slots, num_nodes), jnp.int32)
  empty = types.TreeProposal.of_nodes(
    zeros + types.PLACEHOLDER_TOKEN_ID,
    zeros + tree_lib.NO_PARENT,
    zeros,
    log_probs=jnp.full_like(zeros, -jnp.inf, jnp.float32),
  )
  return empty.pack().at[slots].set(chosen.pack(), mode='drop')


def _copy(cache, kv_heads, page_table, lengths, num_more, sharding):
  """Returns the rows' pages as a dense cache with scratch rows after them."""
  context = page_table.shape[1] * cache.page_size
  capacity = dense.capacity_on(sharding.mesh, context + num_more)

  def copy(pages, heads):
    found = reference.read_pages(pages, page_table, heads[0], cache.dtype)
    return jnp.pad(found, ((0, 0), (0, 0), (0, capacity - context), (0, 0)))

  return dense.KVCache(
    keys=[*map(copy, cache.keys, kv_heads)],
    values=[*map(copy, cache.values, kv_heads)],
    kv_lengths=lengths,
    capacity=capacity,
    sharding=sharding,
  )
