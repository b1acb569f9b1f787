"""Rotation, write and paged attention as a Pallas Triton kernel for GPUs.

As in `fused_attention`, one launch after the product that makes queries, keys
and values. Tokens are read and written where they lie in the flat list of a
step, so that nothing is sorted into blocks. A prompt's block also attends to
the blocks in front of it that the same launch writes: it rotates their keys
again.

Legend: N tokens, X blocks, T tokens of a block, J tokens with padding, W mask
words. P pages, Z rows of a page, C pages of a table. G kv heads, Q query heads
for each of them, E head_dim.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas.fused_attention import triton_heads
from kernels_pallas.fused_paged_attention import reference
from kernels_pallas.paged_attention import padding
from kernels_pallas.paged_attention import pallas_gpu as paged_kernel
from kernels_pallas.tree_attention import mask_words, triton_blocks

Config = paged_kernel.Config
check = paged_kernel.check

_NUM_SCALARS = 4  # of a block, in front of its pages


def fused_paged_attention(
  heads: jax.Array,
  cos: jax.Array,
  sin: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  places: jax.Array,
  block_tokens: jax.Array,
  block_places: jax.Array,
  blocks_before: jax.Array,
  page_table: jax.Array,
  prefix_lengths: jax.Array,
  num_tokens: jax.Array,
  tree_mask: jax.Array,
  positions: jax.Array,
  sinks: jax.Array | None = None,
  *,
  config: Config | None = None,
  **options: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """See `api.fused_paged_attention`; raises NotImplementedError as `check`."""
  queries = reference.queries_of(heads, block_tokens)
  check(queries, keys, page_table.shape[1])
  num_pages, page_size, _ = keys.shape
  _, num_kv_heads, _, head_dim = heads.shape
  mask, positions = padding.hide(num_tokens, tree_mask, positions)
  is_padding = _is_padding(block_tokens, block_places, num_tokens)
  # One array each, which XLA makes in one launch for all layers.
  by_block = prefix_lengths, num_tokens, block_tokens[:, 0], blocks_before
  by_block = jnp.concatenate([jnp.stack(by_block, axis=1), page_table], axis=1)
  by_token = jnp.stack([places, is_padding.astype(jnp.int32)])
  shape = (num_pages * page_size, num_kv_heads, head_dim)
  attended, _, *written = triton_blocks.launch(
    functools.partial(_kernel, page_size=page_size),
    (cos, sin, by_token),
    (by_block,),
    heads,
    mask_words.pack(mask),
    positions,
    keys.reshape(shape),
    values.reshape(shape),
    pl.BlockSpec((shape[0], None, head_dim), lambda b, g, p: (0, g, 0)),
    sinks,
    config=config or paged_kernel.default_config(queries, keys.dtype),
    name='fused_paged_attention',
    writes=True,
    **options,
  )
  return attended, *(x.reshape(keys.shape) for x in written)


def _is_padding(block_tokens, block_places, num_tokens):
  """Returns bool[N], which tokens no block has."""
  block, index = jnp.divmod(block_places, block_tokens.shape[1])
  tokens = jnp.arange(len(block_places))
  is_own = block_tokens.ravel()[block_places] == tokens
  return ~(is_own & (index < num_tokens[block]))


def _kernel(
  cos,  # f32[N, E / 2]
  sin,  # f32[N, E / 2]
  by_token,  # i32[2, N] place, and whether it is padding
  block,  # i32[4 + C] prefix, tokens, first token, blocks before it; pages
  heads,  # [N, Q + 2, E]
  words,  # i32[T, W] mask
  positions,  # i32[T]
  keys,  # [P * Z, E]
  values,  # [P * Z, E]
  *results,  # as `triton_blocks.launch`
  page_size: int,
  **options,
):
  num_all, size, head_dim = heads.shape[0], words.shape[0], heads.shape[2]
  prefix_length, num_tokens, first_token, blocks_before = (
    block[i] for i in range(_NUM_SCALARS)
  )
  index = triton_heads.indices(size)
  nowhere = keys.shape[0]
  place = plgpu.load(
    by_token.at[0, first_token + index], mask=index < num_tokens, other=nowhere
  )
  first_row = prefix_length - blocks_before * size

  # Each block takes care of a part of the padding, wherever its tokens are.
  token = pl.program_id(0) * size + index
  is_mine = (index < size) & (token < num_all)

  @pl.when(pl.program_id(2) == 0)
  def _():
    is_empty = plgpu.load(by_token.at[1, token], mask=is_mine, other=0) > 0
    *_, out, _totals, _maxima, _sums, _keys, _values = results
    group = jnp.arange(pl.next_power_of_2(out.shape[1]))
    columns = jnp.arange(head_dim)
    plgpu.store(
      out.at[token[:, None, None], group[None, :, None], columns[None, None]],
      jnp.zeros((len(token), len(group), head_dim), out.dtype),
      mask=is_empty[:, None, None] & (group < out.shape[1])[None, :, None],
    )

  triton_heads.attend(
    heads,
    cos,
    sin,
    words,
    positions,
    keys,
    values,
    results,
    first_row=first_row,
    num_tokens=num_tokens,
    places=place,
    is_stored=place < nowhere,
    first_token=first_token,
    blocks_before=blocks_before,
    prefix_length=prefix_length,
    end=jnp.where(num_tokens > 0, first_row, 0),
    place_fn=paged_kernel.place_fn(block, page_size, head_dim, _NUM_SCALARS),
    token_count=num_tokens,
    stores_padding=False,
    **options,
  )
