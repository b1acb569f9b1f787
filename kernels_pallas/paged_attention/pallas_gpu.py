"""Paged attention as a Pallas Triton kernel for NVIDIA GPUs.

As in `tree_attention`, one launch in which several programs share the rows of a
kv head. Rows of keys and values are loaded from where the page table says, so
that pages may be of any size. Those after the end of a row are not read.

Legend: X blocks of tokens, T tokens of a block, W mask words. P pages, Z rows
of a page, C pages of a table. G kv heads, Q query heads for each of them, E
head_dim, K block_kv.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas import tiles
from kernels_pallas.paged_attention import padding
from kernels_pallas.tree_attention import mask_words, triton_blocks
from kernels_pallas.tree_attention import pallas_gpu as tree_kernel

Config = tree_kernel.Config

_ENOUGH_PROGRAMS = 512  # for a device; not measured


def check(queries: jax.Array, pages: jax.Array, num_columns: int) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  del num_columns
  tiles.check_pages(pages)
  tree_kernel.check(queries, pages, queries.shape[1])


def paged_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  page_table: jax.Array,
  prefix_lengths: jax.Array,
  num_tokens: jax.Array,
  tree_mask: jax.Array,
  positions: jax.Array,
  sinks: jax.Array | None = None,
  *,
  config: Config | None = None,
  with_sums: bool = False,
  **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """See `reference.paged_attention`; raises NotImplementedError as `check`."""
  check(queries, keys, page_table.shape[1])
  _, _, num_kv_heads, _, head_dim = queries.shape
  num_pages, page_size, _ = keys.shape
  mask, positions = padding.hide(num_tokens, tree_mask, positions)
  keys, values = (
    pages.reshape(num_pages * page_size, num_kv_heads, head_dim)
    for pages in (keys, values)
  )
  attended, log_sums = triton_blocks.launch(
    functools.partial(_kernel, page_size=page_size),
    (),
    (page_table, prefix_lengths, num_tokens),
    queries.reshape(-1, *queries.shape[2:]),
    mask_words.pack(mask),
    positions,
    keys,
    values,
    pl.BlockSpec((len(keys), None, head_dim), lambda b, g, p: (0, g, 0)),
    sinks,
    config=config or default_config(queries, keys.dtype),
    name='paged_attention',
    **options,
  )
  attended = attended.reshape(queries.shape)
  log_sums = padding.zero(log_sums, num_tokens)
  return (attended, log_sums) if with_sums else attended


def default_config(queries: jax.Array, dtype: jax.typing.DTypeLike) -> Config:
  """Returns tiles; where there are many blocks, their rows are not split.

  Args:
    queries: [X, T, G, Q, E].
    dtype: dtype of the pages.
  """
  num_blocks, size, num_kv_heads, num_groups, head_dim = queries.shape
  num_rows = triton_blocks.num_rows_of(size, num_groups)
  config = tree_kernel.default_config(num_rows, head_dim, dtype)
  enough = pl.cdiv(_ENOUGH_PROGRAMS, num_blocks * num_kv_heads)
  return dataclasses.replace(config, num_splits=min(config.num_splits, enough))


def _kernel(
  page_table,  # i32[C]
  prefix_length,  # i32[]
  num_tokens,  # i32[]
  queries,  # [X * T, Q, E]
  words,  # i32[T, W] mask
  positions,  # i32[T]
  keys,  # [P * Z, E]
  values,  # [P * Z, E]
  *results,  # as `triton_blocks.launch`
  page_size: int,
  **options,
):
  prefix_length, num_tokens = prefix_length[()], num_tokens[()]
  triton_blocks.attend(
    functools.partial(triton_blocks.load_queries, queries),
    words,
    positions,
    keys,
    values,
    results,
    prefix_length=prefix_length,
    end=padding.ends_of(
      prefix_length, num_tokens, page_table.shape[0] * page_size
    ),
    place_fn=place_fn(page_table, page_size, queries.shape[2]),
    first_token=pl.program_id(0) * words.shape[0],
    token_count=num_tokens,
    **options,
  )


def place_fn(
  page_table, page_size: int, head_dim: int, first_column: int = 0
) -> Callable[..., Any]:
  """Returns what `triton_blocks.attend` calls to find rows in pages.

  Args:
    page_table: i32[any] reference of a kernel, which has the pages of the row.
    page_size: Z.
    head_dim: E.
    first_column: place of the first page there.
  """
  lanes = jnp.arange(head_dim)[None]

  def place(_, rows, is_row):
    pages = plgpu.load(
      page_table.at[first_column + rows // page_size],
      mask=is_row,
      other=None if is_row is None else 0,
    )
    places = jnp.maximum(pages, 0) * page_size + rows % page_size
    return places[:, None], lanes

  return place
