"""Tree attention as a Pallas Triton kernel for NVIDIA GPUs.

A token's result has the same bits alone, in a chain and in a tree, in programs
of the same shapes. So blocks of keys are cut by the positions of the rows, not
by where the rows lie: blocks that the prefix fills are shared by all tokens,
and each token has its own last ones, with the rest of the prefix and its
ancestors in their order. Each block has a softmax of its own. Its maximum is
rounded up to an integer, so that results are brought to a common maximum by
powers of two, which round nothing, wherever that is done. A second launch
combines the results, all tokens at once.

Legend:
- B rows, T query tokens, M cache rows of the tree, S cache capacity
- G kv heads, Q query heads for each kv head, E head_dim
- N rows of queries (T x Q with padding), K block_kv, P splits, J own blocks
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas import products, tiles
from kernels_pallas.tree_attention import (
  mask_words,
  reference,
  running_softmax,
  triton_blocks,
)

_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(tiles.Config):
  """Tiles of the kernel."""

  block_kv: int = tiles.power((32, 64, 128), 64)  # cache rows of a product
  # Programs that share the rows of a kv head.
  num_splits: int = tiles.number((4, 8, 16, 32), 16)
  num_warps: int = tiles.power((4, 8), 4)  # warps of a program
  num_stages: int = tiles.number((2, 3, 4), 2)  # blocks in flight


class Part(NamedTuple):
  """Attention to some rows, of a softmax with a maximum of its own."""

  maximum: jax.Array  # f32[...], an integer
  weight: jax.Array  # f32[...] sum of the weights
  total: jax.Array  # f32[..., E] sum of the values by weight


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


def check(queries: jax.Array, keys: jax.Array, tree_size: int) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  del keys
  mask_words.check(queries, triton_blocks.MAX_QUERY_ROWS, tree_size)
  tiles.check_head_dim(queries.shape[4])


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
  check(queries, keys, tree_mask.shape[2])
  batch, num_tokens, num_kv_heads, num_groups, head_dim = queries.shape
  num_rows = triton_blocks.num_rows_of(num_tokens, num_groups)
  config = config or default_config(num_rows, head_dim, keys.dtype)
  own_rows = _own_rows(prefix_lengths, tree_mask, config.block_kv)
  num_own = own_rows.shape[2] // config.block_kv
  heads = (batch, num_kv_heads)
  row_spec, head_spec = triton_blocks.row_spec, triton_blocks.head_spec

  parts = (config.num_splits, num_rows), (num_tokens, num_own, num_groups)
  shapes = [
    shape for part in parts for shape in (part, part, (*part, head_dim))
  ]
  by_position = [] if window is None else [positions - (window - 1)]
  fields = pl.pallas_call(
    functools.partial(
      _kernel, scale=scale, has_window=window is not None, config=config
    ),
    grid=(*heads, config.num_splits + num_tokens),
    in_specs=[
      row_spec(),
      pl.BlockSpec(
        (None, num_tokens, None, num_groups, head_dim),
        lambda b, g, p: (b, 0, g, 0, 0),
      ),
      row_spec(*own_rows.shape[1:]),
      head_spec(*keys.shape[2:]),
      head_spec(*keys.shape[2:]),
      *[row_spec(num_tokens)] * len(by_position),
    ],
    out_specs=[head_spec(*shape) for shape in shapes],
    out_shape=[jax.ShapeDtypeStruct((*heads, *x), jnp.float32) for x in shapes],
    compiler_params=plgpu.CompilerParams(
      num_warps=config.num_warps, num_stages=config.num_stages
    ),
    interpret=interpret,
    name='tree_attention',
  )(prefix_lengths, queries, own_rows, keys, values, *by_position)
  by_head = [] if sinks is None else [sinks.astype(jnp.float32)]
  return pl.pallas_call(
    functools.partial(_combine_kernel, block_kv=config.block_kv),
    grid=(*heads, num_tokens),
    in_specs=[
      row_spec(),
      *(head_spec(*shape) for shape in shapes),
      *(
        pl.BlockSpec((None, num_groups), lambda b, g, t: (g, 0))
        for _ in by_head
      ),
    ],
    out_specs=pl.BlockSpec(
      (None, None, None, num_groups, head_dim), lambda b, g, t: (b, t, g, 0, 0)
    ),
    out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
    compiler_params=plgpu.CompilerParams(num_warps=4),
    interpret=interpret,
    name='combine_tree_attention',
  )(prefix_lengths, *fields, *by_head)


def _own_rows(prefix_lengths, tree_mask, block_kv):
  """Returns i32[B, T, J x K] rows at the last positions that a token sees.

  They begin with the first one that is in no block of the prefix alone. After
  the token's own row they are -1.
  """
  tree_size = tree_mask.shape[2]
  size = (1 + pl.cdiv(tree_size, block_kv)) * block_kv
  rest = (prefix_lengths % block_kv)[:, None, None]
  offsets = jnp.arange(size)[None, None] - rest
  rank = jnp.cumsum(tree_mask, axis=2) - 1
  is_mine = tree_mask[:, :, None] & (rank[:, :, None] == offsets[..., None])
  nodes = jnp.where(is_mine, jnp.arange(tree_size), -1).max(axis=3)
  in_tree = jnp.where(nodes < 0, -1, prefix_lengths[:, None, None] + nodes)
  in_prefix = prefix_lengths[:, None, None] + offsets
  return jnp.where(offsets < 0, in_prefix, in_tree).astype(jnp.int32)


def _merged(part: Part, other: Part) -> Part:
  """Returns the part of the rows of both."""
  maximum = jnp.maximum(part.maximum, other.maximum)
  factor = _power_of_two(part.maximum - maximum)
  other_factor = _power_of_two(other.maximum - maximum)
  return Part(
    maximum,
    part.weight * factor + other.weight * other_factor,
    part.total * factor[..., None] + other.total * other_factor[..., None],
  )


def _power_of_two(exponent):
  """Returns 2**exponent exactly, of integers f32[...] up to 0."""
  bits = (jnp.maximum(exponent, -127.0).astype(jnp.int32) + 127) << 23
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _kernel(
  prefix_length,  # i32[]
  queries,  # [T, Q, E]
  own_rows,  # i32[T, J x K]
  keys,  # [S, E]
  values,  # [S, E]
  # i32[T] first visible positions, where there is a window; parts [P, N], and
  # [T, J, Q].
  *refs,
  scale: float,
  has_window: bool,
  config: Config,
):
  """Takes the shared blocks of a split, or the own ones of a token."""
  shared, own = Part(*refs[-6:-3]), Part(*refs[-3:])
  num_tokens, num_groups, head_dim = queries.shape
  num_splits, num_rows = shared.maximum.shape
  index = jnp.arange(num_rows)
  is_row = index < num_tokens * num_groups
  token, group = index // num_groups, index % num_groups
  columns = jnp.arange(head_dim)[None]
  places = token[:, None], group[:, None], columns
  tile = plgpu.load(queries.at[places], mask=is_row[:, None], other=0)
  first = None
  if has_window:
    far = jnp.iinfo(jnp.int32).max
    first = plgpu.load(refs[0].at[token], mask=is_row, other=far)[:, None]
  num_shared = jax.lax.div(prefix_length[()], config.block_kv)
  program = pl.program_id(2)
  own_token = jnp.maximum(program - num_splits, 0)
  is_own = program >= num_splits
  is_mine = is_row & is_own & (token == own_token)

  def add(i, part):
    # One path for both kinds of blocks: compiled once, it gives the same bits.
    offsets = i * config.block_kv + jnp.arange(config.block_kv)
    rows = jnp.where(
      is_own,
      plgpu.load(own_rows.at[own_token, offsets], mask=is_own, other=0),
      (program + i * num_splits) * config.block_kv
      + jnp.arange(config.block_kv),
    )
    visible = (rows >= 0)[None]
    if first is not None:
      own_positions = num_shared * config.block_kv + offsets
      visible &= jnp.where(is_own, own_positions, rows)[None] >= first
    other = _part(
      tile, keys, values, (rows[:, None], columns), visible, scale * _LOG2_E
    )
    to = _places(own, (token, i, group), is_mine)
    for (place, mask), x in zip(to, other, strict=True):
      plgpu.store(place, x, mask=mask)
    return _merged(part, other)

  num_blocks = jnp.maximum(num_shared - program + num_splits - 1, 0)
  num_own = own.maximum.shape[1]
  num_blocks = jnp.where(is_own, num_own, jax.lax.div(num_blocks, num_splits))
  nothing = Part(*running_softmax.nothing(num_rows, head_dim))
  part = jax.lax.fori_loop(0, num_blocks, add, nothing)

  @pl.when(~is_own)
  def _():
    for ref, x in zip(shared, part, strict=True):
      ref[program] = x


def _combine_kernel(prefix_length, *refs, block_kv: int):
  """Adds all blocks of a token in their order, and divides by their weight.

  Block i belongs to split i % P, and an own one comes after its shared ones. So
  it does not matter which ones are shared.

  Args:
    prefix_length: i32[].
    *refs: parts [P, N] and [T, J, Q]; sinks f32[Q], where there are any; then
      the result [Q, E].
    block_kv: K.
  """
  shared, own, (*sinks, out) = Part(*refs[:3]), Part(*refs[3:6]), refs[6:]
  num_splits, num_own = shared.maximum.shape[0], own.maximum.shape[1]
  num_groups, head_dim = out.shape
  token = pl.program_id(2)
  group = jnp.arange(pl.next_power_of_2(num_groups))
  is_row = group < num_groups
  nothing = Part(*running_softmax.nothing(len(group), head_dim))

  def load(part, *index):
    places = zip(_places(part, index, is_row), nothing, strict=True)
    return Part(
      *(plgpu.load(ref, mask=mask, other=x) for (ref, mask), x in places)
    )

  own_parts = [load(own, token, i, group) for i in range(num_own)]
  num_shared = jax.lax.div(prefix_length[()], block_kv)
  total = nothing
  if sinks:
    # Each takes the weight of a score without a value.
    score = plgpu.load(sinks[0].at[group], mask=is_row, other=0) * _LOG2_E
    maximum = jnp.ceil(score)
    total = Part(maximum, jnp.exp2(score - maximum), nothing.total)
  for split in range(num_splits):
    part = load(shared, split, token * num_groups + group)
    for i, own_part in enumerate(own_parts):
      is_here = jax.lax.rem(num_shared + i, num_splits) == split
      here = [
        jnp.where(is_here, *x) for x in zip(own_part, nothing, strict=True)
      ]
      part = _merged(part, Part(*here))
    total = _merged(total, part)
  # A row that sees nothing gives zeros.
  weight = jnp.where(total.weight == 0, 1.0, total.weight)
  attended = (total.total / weight[:, None]).astype(out.dtype)
  place = group[:, None], jnp.arange(head_dim)[None]
  plgpu.store(out.at[place], attended, mask=is_row[:, None])


def _places(part, index, mask):
  """Yields where rows i32[N] of each field of a `Part` lie, and their mask."""
  columns = jnp.arange(part.total.shape[-1])[None]
  wide = (x[:, None] if jnp.ndim(x) else x for x in index)
  yield part.maximum.at[index], mask
  yield part.weight.at[index], mask
  yield part.total.at[(*wide, columns)], mask[:, None]


def _part(queries, keys, values, place, visible, scale):
  """Returns the `Part` [N] of a block.

  Args:
    queries: [N, E].
    keys: ref of [S, E].
    values: ref of [S, E].
    place: rows i32[K, 1] and columns i32[1, E]; rows below 0 are none.
    visible: bool[N, K], or bool[1, K].
    scale: factor of the scores, for powers of two.
  """
  precision = products.precision(queries.dtype)
  load = functools.partial(plgpu.load, mask=place[0] >= 0, other=0)
  scores = plgpu.dot(
    queries, load(keys.at[place]), trans_b=True, precision=precision
  )
  scores = scores.astype(jnp.float32) * scale
  visible = jnp.broadcast_to(visible, scores.shape)
  scores = jnp.where(visible, scores, reference.MASKED_SCORE)
  maximum = jnp.ceil(scores.max(axis=1))
  weights = jnp.exp2(scores - maximum[:, None])
  weights = jnp.where(visible, weights, 0.0)
  block = load(values.at[place])
  total = plgpu.dot(weights.astype(block.dtype), block, precision=precision)
  return Part(maximum, weights.sum(axis=1), total.astype(jnp.float32))
