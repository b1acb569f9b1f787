"""Tree attention by the implementation that suits devices and shape.

Legend: B rows, T query tokens, M cache rows of the tree, S cache capacity, G
kv heads, Q query heads for each kv head, E head_dim.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import call_spec, calls, dispatch, registry
from kernels_pallas.tree_attention import filled, reference


def tree_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  prefix_lengths: jax.Array,
  tree_mask: jax.Array | None,
  positions: jax.Array,
  sinks: jax.Array | None = None,
  *,
  scale: float,
  window: int | None = None,
  implementation: str = 'auto',
  sharding: NamedSharding | None = None,
) -> jax.Array:
  """Attention of new tokens to a prefix, seen by all, and a tree after it.

  Args:
    queries: [B, T, G, Q, E], rotated.
    keys: [B, G, S, E] keys of the cache, those of the new tokens included.
    values: [B, G, S, E] values of the cache.
    prefix_lengths: i32[B] rows that every token sees.
    tree_mask: bool[B, T, M] which of the M rows after the prefix each token
      sees. None is a chain: each token sees the rows up to its own.
    positions: i32[B, T] positions of the tokens, read only with a window.
    scale: factor of the scores.
    window: tokens that are visible, the own one included: none sees a position
      of `position - window` or less. None means all.
    sinks: [G, Q] score of each query head that takes a share of the softmax
      and has no value (gpt-oss model card, section 2.2); None means none.
    implementation: one of `dispatch.IMPLEMENTATIONS`.
    sharding: sharding of keys and values, whose first two axes alone may be
      sharded. None means JAX's default device.

  Returns:
    [B, T, G, Q, E]; zeros for a token that sees nothing.

  Raises:
    NotImplementedError: `implementation` cannot do it; never with 'auto'.
  """
  options = {'scale': scale, 'window': window}
  chosen = choose(
    'tree_attention',
    queries,
    keys,
    tree_mask,
    window,
    sinks,
    implementation,
    sharding,
    native=calls.several_devices(sharding),
  )
  arrays = (queries, keys, values, prefix_lengths)
  if chosen == dispatch.REFERENCE:
    is_on_cpu = dispatch.platform_of(sharding) == 'cpu'
    backend = filled if is_on_cpu else reference
    return backend.tree_attention(
      *arrays, tree_mask, positions, sinks, **options
    )
  rows, heads = calls.axes_of(sharding, 2)
  tokens, cache = P(rows, None, heads), P(rows, heads)
  return calls.run(
    'tree_attention',
    chosen,
    (*arrays, *for_kernels(tree_mask, positions, sinks)),
    options,
    sharding,
    (tokens, cache, cache, *[P(rows)] * 3, P(heads)),
    tokens,
  )


def for_kernels(
  tree_mask: jax.Array | None, positions: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, ...]:
  """Returns the last arguments of a kernel: with a mask, and sinks if any.

  The mask of a chain is bool[B, T, T]: each token sees those before.
  """
  if tree_mask is None:
    batch, num_tokens = positions.shape
    chain = jnp.tri(num_tokens, dtype=bool)[None]
    tree_mask = jnp.broadcast_to(chain, (batch, num_tokens, num_tokens))
  return tree_mask, positions, *([] if sinks is None else [sinks])


def choose(
  kernel: str,
  queries: jax.Array,
  keys: jax.Array,
  tree_mask: jax.Array | None,
  window: int | None,
  sinks: jax.Array | None,
  implementation: str,
  sharding: NamedSharding | None,
  **refused: str | None,
) -> str:
  """Returns the implementation of a kernel that attends to rows of a cache.

  The arguments are those of `tree_attention`, and of `calls.choose`.
  """
  cache = calls.local_part(keys, sharding)
  batch_size, num_kv_heads, capacity, head_dim = cache.shape
  num_tokens, num_groups = queries.shape[1], queries.shape[3]
  dtype = queries.dtype
  local = (batch_size, num_tokens, num_kv_heads, num_groups, head_dim)
  tree_size = num_tokens if tree_mask is None else tree_mask.shape[2]
  spec = registry.module(kernel, 'arg_specs').ArgSpec(
    name=f'tokens {dtype}{list(local)}, cache {list(cache.shape)}, {tree_size} '
    f'tree rows, window {window}{"" if sinks is None else ", sinks"}',
    batch_size=min(batch_size, call_spec.MOST_ROWS),
    num_tokens=num_tokens,
    num_kv_heads=num_kv_heads,
    num_groups=num_groups,
    head_dim=head_dim,
    context=capacity - tree_size,
    tree_size=tree_size,
    dtype=dtype.name,
    window=window,
    has_sinks=sinks is not None,
  )
  return calls.choose(
    kernel,
    spec,
    implementation,
    sharding,
    jax.ShapeDtypeStruct(local, dtype),
    cache,
    tree_size,
    **refused,
  )
