"""Tree attention by the implementation that suits devices and shape.

Legend: B rows, T query tokens, M cache rows of the tree, S cache capacity, G
kv heads, Q query heads for each kv head, E head_dim.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import dispatch, registry, trials, tuning
from kernels_pallas.tree_attention import arg_specs, filled, reference


def tree_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  prefix_lengths: jax.Array,
  tree_mask: jax.Array | None,
  positions: jax.Array,
  *,
  scale: float,
  window: int | None = None,
  soft_cap: float | None = None,
  sinks: jax.Array | None = None,
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
    soft_cap: bound of the scores, which become
      `soft_cap * tanh(scores / soft_cap)`. None means no bound.
    sinks: [G, Q] score of each query head that takes a share of the softmax
      and has no value (gpt-oss model card, section 2.2); None means none.
    implementation: name of the code to run, one of
      `dispatch.IMPLEMENTATIONS`.
    sharding: sharding of keys and values, whose first two axes alone may be
      sharded. None means JAX's default device.

  Returns:
    [B, T, G, Q, E]; zeros for a token that sees nothing.

  Raises:
    NotImplementedError: `implementation` cannot do it; never with 'auto'.
  """
  options = {'scale': scale, 'window': window, 'soft_cap': soft_cap}
  arrays = (queries, keys, values, prefix_lengths, tree_mask, positions)
  chosen = _choose(
    queries, keys, tree_mask, options, sinks, implementation, sharding
  )
  if chosen == dispatch.REFERENCE:
    is_on_cpu = dispatch.platform_of(sharding) == 'cpu'
    backend = filled if is_on_cpu else reference
    return backend.tree_attention(*arrays, **options, sinks=sinks)
  if tree_mask is None:
    tree_mask = chain_mask(positions)
  call = registry.function('tree_attention', chosen)
  call = functools.partial(call, **options)
  call = tuning.tuned('tree_attention', chosen, call, sharding)
  arrays = (queries, keys, values, prefix_lengths, tree_mask, positions)
  if sinks is not None:
    arrays = (*arrays, sinks)
  if sharding is not None:
    rows, heads = (*sharding.spec, None, None)[:2]
    call = jax.shard_map(
      call,
      mesh=sharding.mesh,
      in_specs=(
        P(rows, None, heads),
        P(rows, heads),
        P(rows, heads),
        P(rows),
        P(rows),
        P(rows),
        P(heads),
      )[: len(arrays)],
      out_specs=P(rows, None, heads),
      check_vma=False,
    )
  return call(*arrays)


def chain_mask(positions: jax.Array) -> jax.Array:
  """Returns bool[B, T, T], the mask of a chain: each token sees those before.

  Args:
    positions: i32[B, T] of the tokens, of which the shape is read.
  """
  batch, num_tokens = positions.shape
  chain = jnp.tri(num_tokens, dtype=bool)[None]
  return jnp.broadcast_to(chain, (batch, num_tokens, num_tokens))


def _choose(queries, keys, tree_mask, options, sinks, implementation, sharding):
  """Returns the name of the implementation."""
  shape = _local_shape(keys.shape, sharding)
  tokens = (shape[0], queries.shape[1], shape[1], *queries.shape[3:])
  tree_size = queries.shape[1] if tree_mask is None else tree_mask.shape[2]
  checks = registry.checks(
    'tree_attention', tokens, shape, tree_size, queries.dtype
  )
  if sinks is not None:
    checks['mosaic_gpu'] = _refuse_sinks
  if sharding is not None and sharding.mesh.size > 1:
    checks['native'] = refuse_devices
  spec = arg_specs.ArgSpec.of_call(
    f'queries {queries.dtype}{list(tokens)}',
    shape,
    queries.dtype,
    num_tokens=queries.shape[1],
    num_groups=queries.shape[3],
    tree_size=tree_size,
    has_sinks=sinks is not None,
    window=options['window'],
    soft_cap=options['soft_cap'],
  )
  return dispatch.choose(
    'tree_attention',
    spec.name,
    implementation,
    dispatch.platform_of(sharding),
    checks,
    trial=functools.partial(trials.verdict, 'tree_attention', spec, sharding),
  )


def _refuse_sinks():
  raise NotImplementedError('it has no attention sinks')


def refuse_devices() -> None:
  """Refuses a kernel of one device."""
  raise NotImplementedError('several devices share the cache')


def _local_shape(shape, sharding):
  """Returns the shape of a device's part."""
  return shape if sharding is None else sharding.shard_shape(shape)
