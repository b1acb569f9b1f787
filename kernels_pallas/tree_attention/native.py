"""Tree attention in C++, for CPUs.

Only rows that a token sees are read. The n-th of them always takes the same
part in the sums, so a token gets the same bits alone, in a chain and in a tree.

Legend: B rows, T query tokens, M cache rows of the tree, S cache capacity, G
kv heads, Q query heads for each kv head, E head_dim.
"""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import products, tiles
from kernels_pallas.native import library

_LANES = 16  # of the widest vectors of float32


def check(queries: jax.Array, keys: jax.Array, tree_size: int) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  del keys, tree_size
  products.check_dtype(queries.dtype)
  tiles.check_multiple(queries.shape[-1], _LANES, 'numbers of a head')
  library.check('attention')


def tree_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  prefix_lengths: jax.Array,
  tree_mask: jax.Array,
  positions: jax.Array,
  sinks: jax.Array | None = None,
  page_table: jax.Array | None = None,
  num_tokens: jax.Array | None = None,
  *,
  scale: float,
  window: int | None = None,
  returns_cache: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array, jax.Array]:
  """See `api.tree_attention`, and `paged_attention.api` of pages.

  With `returns_cache` keys and values follow, in place. What changes them later
  takes these: as long as nothing says which comes first, XLA makes a copy.
  """
  if sinks is None:
    sinks = jnp.zeros(0)
  if page_table is None:
    page_table = num_tokens = jnp.zeros(0, jnp.int32)
  returned = (keys, values) if returns_cache else ()
  attended, *returned = library.call(
    'attention',
    [
      jax.ShapeDtypeStruct(queries.shape, jnp.float32),
      *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in returned),
    ],
    queries.astype(jnp.float32),
    keys,
    values,
    prefix_lengths,
    tree_mask,
    positions,
    sinks.astype(jnp.float32).reshape(-1),
    page_table,
    num_tokens,
    in_place={1 + i: 1 + i for i in range(len(returned))},
    scale=np.float32(scale),
    window=np.int64(window or 0),
  )
  attended = attended.astype(queries.dtype)
  return (attended, *returned) if returns_cache else attended
