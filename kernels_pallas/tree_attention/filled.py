"""The reference on CPUs, over the part of the cache that is filled.

Legend: B rows, M cache rows of the tree, S cache capacity.
"""

import functools

import jax
import jax.numpy as jnp

from kernels_pallas.tree_attention import reference


# All layers share what is traced and lowered.
@functools.partial(jax.jit, static_argnames=('scale', 'window'))
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
) -> jax.Array:
  """See `api.tree_attention`.

  The rows after the longest text cost as much as others, so the smallest of
  some sizes that holds all texts is chosen while the program runs. That is no
  way for GPUs, where the host would have to wait for the choice.
  """
  num_new = queries.shape[1] if tree_mask is None else tree_mask.shape[2]
  sizes = part_sizes(keys.shape[2], keys.dtype)
  num_filled = jnp.max(prefix_lengths) + num_new
  # Outside of the branches, where all layers share it.
  visible = reference.seen_rows(
    prefix_lengths, tree_mask, positions, keys.shape[2], window
  )

  def attend(size, queries, keys, values, visible, sinks):
    attended, _ = reference.attention_part(
      queries,
      keys[:, :, :size],
      values[:, :, :size],
      visible[:, :, :size],
      scale,
      sinks,
    )
    return attended

  return jax.lax.switch(
    jnp.sum(num_filled > jnp.asarray(sizes[:-1], jnp.int32)),
    [functools.partial(attend, size) for size in sizes],
    queries,
    keys,
    values,
    visible,
    sinks,
  )


def part_sizes(capacity: int, dtype: jax.typing.DTypeLike) -> tuple[int, ...]:
  """Returns what parts of the S rows there are programs for, ascending.

  XLA computes the softmax over fewer than 512 rows in another way for few
  queries than for many. Steps of all sizes should give the same bits in
  bfloat16, so there are no smaller parts for it.
  """
  size = 256 if dtype == jnp.float32 else 512
  sizes = []
  while 4 * size <= 3 * capacity:  # a little less is not worth a program
    sizes.append(size)
    size *= 2
  return *sizes, capacity
