"""Shapes of fused paged attention, for compilers and measurements."""

import dataclasses

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention import arg_specs as paged_specs


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgSpec(paged_specs.ArgSpec):
  """The arguments of one call, on one device, as of paged attention."""

  DONATED = (3, 4)  # keys and values

  @property
  def num_all_tokens(self) -> int:
    """N: the last block has padding."""
    num_whole = (self.batch_size - 1) * self.num_tokens
    return num_whole + (self.num_tokens + 1) // 2

  def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    queries, keys, values, table, lengths, *others = super().arrays()
    _, _, num_kv_heads, num_groups, head_dim = queries.shape
    num_all = self.num_all_tokens
    heads = (num_all, num_kv_heads, num_groups + 2, head_dim)
    angles = jax.ShapeDtypeStruct((num_all, head_dim // 2), jnp.float32)
    of_tokens = jax.ShapeDtypeStruct((num_all,), jnp.int32)
    blocks = (self.batch_size, self.num_tokens)
    return (
      jax.ShapeDtypeStruct(heads, self.dtype),
      angles,
      angles,
      keys,
      values,
      of_tokens,
      jax.ShapeDtypeStruct(blocks, jnp.int32),
      of_tokens,
      lengths,
      table,
      lengths,
      *others,
    )

  def with_meaning(self, heads, cos, sin, keys, values, *arrays, **meaning):
    """Tokens lie one after another; a row may have two blocks."""
    *_, table, lengths, num_tokens, mask, positions = arrays[:9]
    _, keys, values, table, lengths, *by_block = super().with_meaning(
      heads,
      keys,
      values,
      table,
      lengths,
      num_tokens,
      mask,
      positions,
      **meaning,
    )
    blocks = (self.batch_size, self.num_tokens)
    tokens = jnp.arange(self.num_all_tokens, dtype=jnp.int32)
    block_tokens = jnp.arange(blocks[0] * blocks[1], dtype=jnp.int32)
    block_tokens = jnp.minimum(block_tokens, len(tokens) - 1).reshape(blocks)
    blocks_before = jnp.zeros_like(lengths)
    if self.batch_size > 1 and self.context >= self.num_tokens:
      # The first two blocks are of one row.
      blocks_before = blocks_before.at[1].set(1)
      table = table.at[1].set(table[0])
      second = jnp.maximum(lengths[1], self.num_tokens)
      lengths = lengths.at[:2].set(
        jnp.stack([second - self.num_tokens, second])
      )
    rows = lengths[:, None] + jnp.arange(self.num_tokens)[None]
    pages = jnp.take_along_axis(table, rows // self.page_size, axis=1)
    own = pages * self.page_size + rows % self.page_size
    places = own.ravel()[: len(tokens)]
    found = (heads, cos, sin, keys, values, places, block_tokens, tokens)
    found = (*found, blocks_before, table, lengths, *by_block)
    return (*found, *arrays[9:])


def arg_specs() -> list[ArgSpec]:
  """Returns the shapes of paged attention."""
  return [
    ArgSpec(**dataclasses.asdict(spec)) for spec in paged_specs.arg_specs()
  ]
