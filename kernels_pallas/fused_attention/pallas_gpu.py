"""Rotation, write and tree attention as a Pallas Triton kernel for GPUs.

One launch behind the product that makes queries, keys and values (SwiftSpec,
section 3.3). Each program rotates the queries it needs in its registers. The
first program of a kv head rotates the new keys, too. It attends to the new
tokens, and writes them; the others leave their rows out, so that nobody reads
what is being written.

Legend:
- B rows, T new tokens, M cache rows of the tree, S cache capacity
- G kv heads, Q query heads for each kv head, E head_dim, W mask words
- J new tokens with padding, N rows of queries
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas.tree_attention import mask_words, triton_blocks
from kernels_pallas.tree_attention import pallas_gpu as tree_kernel

_MIN_TOKENS = 16  # of a product in Triton

Config = tree_kernel.Config


def check(
  heads_shape: tuple[int, ...], tree_size: int, dtype: jax.typing.DTypeLike
) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  *tokens, num_heads, head_dim = heads_shape
  queries_shape = (*tokens, num_heads - 2, head_dim)
  tree_kernel.check(queries_shape, (), tree_size, dtype)


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
  scale: float,
  window: int | None = None,
  config: Config | None = None,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """See `api.fused_attention`; raises NotImplementedError as `check`."""
  check(heads.shape, tree_mask.shape[2], heads.dtype)
  num_tokens, _, num_heads, head_dim = heads.shape[1:]
  num_rows = triton_blocks.num_rows_of(num_tokens, num_heads - 2)
  attended, _, *written = triton_blocks.launch(
    functools.partial(_kernel, tree_size=tree_mask.shape[2]),
    (prefix_lengths, starts, cos, sin),
    heads,
    mask_words.pack(tree_mask),
    positions,
    keys,
    values,
    pl.BlockSpec((None, None, *keys.shape[2:]), lambda b, g, p: (b, g, 0, 0)),
    sinks,
    config=config or tree_kernel.default_config(num_rows, head_dim, keys.dtype),
    name='fused_attention',
    scale=scale,
    window=window,
    soft_cap=None,
    interpret=interpret,
    writes=True,
  )
  return attended, *written


def _kernel(
  prefix_length,  # i32[]
  start,  # i32[]
  cos,  # f32[T, E / 2]
  sin,  # f32[T, E / 2]
  heads,  # [T, Q + 2, E]
  words,  # i32[T, W] mask
  positions,  # i32[T]
  keys,  # [S, E]
  values,  # [S, E]
  *results,  # as `triton_blocks.launch`
  tree_size: int,
  config: Config,
  **options,
):
  *results, written_keys, written_values = results
  num_tokens, num_heads, head_dim = heads.shape
  capacity = keys.shape[0]
  prefix_length = prefix_length[()]
  # As the reference, which updates a slice.
  start = jnp.minimum(start[()], capacity - num_tokens)
  index = jnp.arange(max(pl.next_power_of_2(num_tokens), _MIN_TOKENS))
  is_new = (index < num_tokens)[:, None]
  columns = jnp.arange(head_dim)[None]
  rotated = functools.partial(_rotated, heads, cos, sin)

  def load_new():
    key = index[:, None], num_heads - 2, columns
    value = index[:, None], num_heads - 1, columns
    return (
      rotated(key, is_new).astype(keys.dtype),
      triton_blocks.load_queries(heads, value, is_new).astype(values.dtype),
    )

  @pl.when(pl.program_id(2) == 0)
  def _():
    places = (start + index)[:, None], columns
    written = written_keys, written_values
    for ref, new in zip(written, load_new(), strict=True):
      plgpu.store(ref.at[places], new, mask=is_new)

  triton_blocks.attend(
    rotated,
    words,
    positions,
    keys,
    values,
    results,
    prefix_length=prefix_length,
    end=jnp.minimum(prefix_length + tree_size, capacity),
    place_fn=lambda block, *_: pl.ds(block * config.block_kv, config.block_kv),
    config=config,
    new=triton_blocks.NewRows(
      first=start, num_rows=num_tokens, load_fn=load_new
    ),
    **options,
  )


def _rotated(heads, cos, sin, places, is_row) -> jax.Array:
  """Returns rotated heads [N, E], as `attend` wants queries.

  The other half of a pair is loaded, too: registers cannot be sliced.
  """
  token, head, column = places
  half = heads.shape[2] // 2
  is_first = column < half
  load = functools.partial(plgpu.load, mask=is_row, other=0)
  own, other = (
    load(heads.at[token, head, place]).astype(jnp.float32)
    for place in (column, jnp.where(is_first, column + half, column - half))
  )
  angle = token, column & (half - 1)
  sines = load(sin.at[angle])
  rotated = own * load(cos.at[angle]) + other * jnp.where(
    is_first, -sines, sines
  )
  return rotated.astype(heads.dtype)
