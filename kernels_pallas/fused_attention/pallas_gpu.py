"""Rotation, write and tree attention as a Pallas Triton kernel for GPUs.

One launch after the product that makes queries, keys and values (SwiftSpec,
section 3.3). Each program rotates the queries it needs in its registers. The
first program of a kv head rotates the new keys, too. It attends to the new
tokens, and writes them; the others leave their rows out, so that nobody reads
what is being written.

Legend:
- B rows, T new tokens, M cache rows of the tree, S cache capacity
- G kv heads, Q query heads for each kv head, E head_dim, W mask words
- J new tokens with padding
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.fused_attention import reference, triton_heads
from kernels_pallas.tree_attention import mask_words, triton_blocks
from kernels_pallas.tree_attention import pallas_gpu as tree_kernel

Config = tree_kernel.Config
check = tree_kernel.check


def fused_attention(
  heads: jax.Array,
  cos: jax.Array,
  sin: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  starts: jax.Array,
  prefix_lengths: jax.Array,
  tree_mask: jax.Array,
  positions: jax.Array,
  sinks: jax.Array | None = None,
  *,
  config: Config | None = None,
  **options: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """See `api.fused_attention`; raises NotImplementedError as `check`."""
  queries = reference.queries_of(heads)
  check(queries, keys, tree_mask.shape[2])
  _, num_tokens, _, num_groups, head_dim = queries.shape
  num_rows = triton_blocks.num_rows_of(num_tokens, num_groups)
  cos, sin, flat = (x.reshape(-1, *x.shape[2:]) for x in (cos, sin, heads))
  attended, _, *written = triton_blocks.launch(
    functools.partial(_kernel, tree_size=tree_mask.shape[2]),
    (cos, sin),
    (prefix_lengths, starts),
    flat,
    mask_words.pack(tree_mask),
    positions,
    keys,
    values,
    pl.BlockSpec((None, None, *keys.shape[2:]), lambda b, g, p: (b, g, 0, 0)),
    sinks,
    config=config or tree_kernel.default_config(num_rows, head_dim, keys.dtype),
    name='fused_attention',
    writes=True,
    **options,
  )
  return attended.reshape(queries.shape), *written


def _kernel(
  cos,  # f32[B * T, E / 2]
  sin,  # f32[B * T, E / 2]
  prefix_length,  # i32[]
  start,  # i32[]
  heads,  # [B * T, Q + 2, E]
  words,  # i32[T, W] mask
  positions,  # i32[T]
  keys,  # [S, E]
  values,  # [S, E]
  *results,  # as `triton_blocks.launch`
  tree_size: int,
  config: Config,
  **options,
):
  num_tokens, capacity = words.shape[0], keys.shape[0]
  prefix_length = prefix_length[()]
  # As the reference, which updates a slice.
  start = jnp.minimum(start[()], capacity - num_tokens)
  index = triton_heads.indices(num_tokens)
  triton_heads.attend(
    heads,
    cos,
    sin,
    words,
    positions,
    keys,
    values,
    results,
    first_row=start,
    num_tokens=num_tokens,
    places=start + index,
    is_stored=index < num_tokens,
    first_token=pl.program_id(0) * num_tokens,
    prefix_length=prefix_length,
    end=jnp.minimum(prefix_length + tree_size, capacity),
    place_fn=lambda block, *_: pl.ds(block * config.block_kv, config.block_kv),
    config=config,
    **options,
  )
