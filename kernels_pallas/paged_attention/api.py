"""Paged attention by the implementation that suits devices and shape.

Legend: X blocks, T tokens of a block, P pages, Z rows of a page, C pages of a
table, G kv heads, Q query heads for each kv head, E head_dim.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import call_spec, calls, dispatch, registry
from kernels_pallas.paged_attention import reference, shared_pages
from kernels_pallas.tree_attention import api as tree_api


def paged_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  page_table: jax.Array,
  prefix_lengths: jax.Array,
  num_tokens: jax.Array,
  tree_mask: jax.Array | None,
  positions: jax.Array,
  sinks: jax.Array | None = None,
  *,
  scale: float,
  window: int | None = None,
  page_size: int | None = None,
  is_one_row: bool = False,
  implementation: str = 'auto',
  sharding: NamedSharding | None = None,
) -> jax.Array:
  """Attention of blocks of new tokens to rows in pages.

  A row of the batch has its keys and values in the pages of its table, in
  order. A block is some of its newest tokens: a draft, or a part of a prompt.
  All of them see the rows in front of the block.

  Args:
    queries: [X, T, G, Q, E], rotated.
    keys: [P, Z, G * E] pages, those of the new tokens included; the heads of a
      row lie side by side.
    values: [P, Z, G * E].
    page_table: i32[X, C] pages of the blocks' rows, in order. Where nothing is
      visible there may be none, which is negative.
    prefix_lengths: i32[X] rows that every token of a block sees.
    num_tokens: i32[X] of the blocks; the others are padding.
    tree_mask: bool[X, T, T] which tokens of its block each token sees. None is
      a chain: those up to its own.
    positions: i32[X, T] of the tokens; read with a window only.
    scale: factor of the scores.
    window: a token sees no row of `position - window` or less.
    sinks: [G, Q] or None, as in `tree_attention.api`.
    page_size: rows of a page that hold something, the first ones. It is Z, or
      less where some of the devices that share the rows keep none; None is Z.
      Read only where devices share them.
    is_one_row: whether all blocks are of the same row, one after the other,
      and only the last one with tokens is not full. Plain JAX then copies its
      pages once.
    implementation: one of `dispatch.IMPLEMENTATIONS`.
    sharding: placement of keys and values, whose last axis may be sharded, by
      kv heads, and whose second, by tokens. None is JAX's default device.

  Returns:
    [X, T, G, Q, E]; zeros for a token that sees nothing, and for padding.

  Raises:
    NotImplementedError: `implementation` cannot do it; never with 'auto'.
  """
  options = {'scale': scale, 'window': window}
  chosen = choose(
    'paged_attention',
    queries,
    keys,
    page_table.shape[1],
    window,
    sinks,
    implementation,
    sharding,
    pages_dtype=keys.dtype,
    native=calls.several_devices(sharding),
  )
  arrays = (queries, keys, values, page_table, prefix_lengths, num_tokens)
  _, tokens, heads = calls.axes_of(sharding, 3)
  if chosen == dispatch.REFERENCE and tokens is None:
    if is_one_row and tree_mask is None:
      return reference.of_one_row(*arrays, positions, sinks, **options)
    return reference.paged_attention(
      *arrays, tree_mask, positions, sinks, **options
    )
  if tokens is not None:
    options['with_sums'] = True
  call = calls.function('paged_attention', chosen, options, sharding)
  if tokens is not None:
    call = functools.partial(
      shared_pages.paged_attention,
      call,
      axis_name=tokens,
      page_size=page_size or keys.shape[1],
      window=window,
    )
  arrays += tree_api.for_kernels(tree_mask, positions, sinks)
  if sharding is not None:
    by_head, pages = P(None, None, heads), P(None, tokens, heads)
    call = jax.shard_map(
      call,
      mesh=sharding.mesh,
      in_specs=(by_head, pages, pages, *(P(),) * 5, P(heads))[: len(arrays)],
      out_specs=by_head,
      check_vma=False,
    )
  return call(*arrays)


def choose(
  kernel: str,
  queries: jax.Array,
  keys: jax.Array,
  num_columns: int,
  window: int | None,
  sinks: jax.Array | None,
  implementation: str,
  sharding: NamedSharding | None,
  *,
  pages_dtype: jax.typing.DTypeLike,
  **refused: str | None,
) -> str:
  """Returns the implementation of a kernel that attends to pages.

  `num_columns` is C. The others are those of `paged_attention`, and of
  `calls.choose`.
  """
  num_blocks, size, num_kv_heads, num_groups, head_dim = queries.shape
  pages = calls.local_part(keys, sharding)
  _, page_size, width = pages.shape
  num_kv_heads = num_kv_heads * width // keys.shape[2]
  is_shared = calls.axes_of(sharding, 3)[1] is not None
  local = (num_blocks, size, num_kv_heads, num_groups, head_dim)
  spec = registry.module(kernel, 'arg_specs').ArgSpec(
    name=f'tokens {queries.dtype}{list(local)}, pages {list(pages.shape)}, '
    f'{num_columns} of a row, window {window}'
    f'{"" if sinks is None else ", sinks"}'
    f'{", devices share them" if is_shared else ""}',
    # An engine has programs for many numbers of blocks.
    batch_size=call_spec.MOST_ROWS,
    num_tokens=size,
    num_kv_heads=num_kv_heads,
    num_groups=num_groups,
    head_dim=head_dim,
    context=max(num_columns * page_size - size, 0),
    tree_size=size,
    dtype=queries.dtype.name,
    window=window,
    page_size=page_size,
    # Devices that share rows count the sinks when they merge.
    has_sinks=sinks is not None and not is_shared,
    is_shared=is_shared,
    pages_dtype=jnp.dtype(pages_dtype).name,
  )
  return calls.choose(
    kernel,
    spec,
    implementation,
    sharding,
    jax.ShapeDtypeStruct(local, queries.dtype),
    pages,
    num_columns,
    **refused,
  )
