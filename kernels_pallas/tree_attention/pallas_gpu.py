"""Tree attention as a Pallas Triton kernel for NVIDIA GPUs.

One launch; the rows of the cache lie in order.

Legend:
- B rows, T query tokens, M cache rows of the tree, S cache capacity
- G kv heads, Q query heads for each kv head, E head_dim, W mask words
- N rows of queries (T x Q with padding)
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas import tiles
from kernels_pallas.tree_attention import mask_words, triton_blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(tiles.Config):
  """Tiles of the kernel."""

  block_kv: int = tiles.power((32, 64, 128), 64)  # cache rows of a product
  # Programs that share the rows of a kv head.
  num_splits: int = tiles.number((4, 8, 16, 32), 16)
  num_warps: int = tiles.power((4, 8), 4)  # warps of a program
  num_stages: int = tiles.number((2, 3, 4), 2)  # blocks in flight


def default_config(
  num_rows: int, head_dim: int, dtype: jax.typing.DTypeLike
) -> Config:
  """Returns tiles that fit into the registers of a program; not measured.

  Args:
    num_rows: N.
    head_dim: E.
    dtype: dtype of the cache. Products of float32 are made without matrix
      units.
  """
  is_wide = num_rows * head_dim > 64 * 128
  block_kv = 64
  if jnp.dtype(dtype) == jnp.float32:
    block_kv = 16 if is_wide or head_dim > 128 else 32
  return Config(block_kv=block_kv, num_warps=8 if is_wide else 4)


def check(
  queries_shape: tuple[int, ...],
  keys_shape: tuple[int, ...],
  tree_size: int,
  dtype: jax.typing.DTypeLike,
) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  del keys_shape
  _, num_tokens, _, num_groups, head_dim = queries_shape
  mask_words.check(
    dtype, num_tokens * num_groups, triton_blocks.MAX_QUERY_ROWS, tree_size
  )
  if head_dim not in (16, 32, 64, 128, 256):
    raise NotImplementedError(
      f'head_dim {head_dim} is no power of two from 16 to 256'
    )


def tree_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  prefix_lengths: jax.Array,
  tree_mask: jax.Array,
  positions: jax.Array,
  sinks: jax.Array | None = None,
  *,
  scale: float,
  window: int | None = None,
  config: Config | None = None,
  interpret: bool = False,
) -> jax.Array:
  """See `reference.tree_attention`; raises NotImplementedError as `check`."""
  check(queries.shape, keys.shape, tree_mask.shape[2], queries.dtype)
  num_tokens, _, num_groups, head_dim = queries.shape[1:]
  num_rows = triton_blocks.num_rows_of(num_tokens, num_groups)
  attended, _ = triton_blocks.launch(
    functools.partial(_kernel, tree_size=tree_mask.shape[2]),
    (),
    (prefix_lengths,),
    queries.reshape(-1, *queries.shape[2:]),
    mask_words.pack(tree_mask),
    positions,
    keys,
    values,
    pl.BlockSpec((None, None, *keys.shape[2:]), lambda b, g, p: (b, g, 0, 0)),
    sinks,
    config=config or default_config(num_rows, head_dim, keys.dtype),
    name='tree_attention',
    scale=scale,
    window=window,
    interpret=interpret,
  )
  return attended.reshape(queries.shape)


def _kernel(
  prefix_length,  # i32[]
  queries,  # [B * T, Q, E]
  words,  # i32[T, W] mask
  positions,  # i32[T]
  keys,  # [S, E]
  values,  # [S, E]
  *results,  # as `triton_blocks.launch`
  tree_size: int,
  config: Config,
  **options,
):
  prefix_length = prefix_length[()]
  triton_blocks.attend(
    functools.partial(triton_blocks.load_queries, queries),
    words,
    positions,
    keys,
    values,
    results,
    prefix_length=prefix_length,
    end=jnp.minimum(prefix_length + tree_size, keys.shape[0]),
    place_fn=lambda block, *_: pl.ds(block * config.block_kv, config.block_kv),
    config=config,
    first_token=pl.program_id(0) * words.shape[0],
    **options,
  )
