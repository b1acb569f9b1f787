"""Shapes of paged attention in real models, for compilers and measurements."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from kernels_pallas import model_shapes, tiles
from kernels_pallas.paged_attention import padding
from kernels_pallas.tree_attention import arg_specs as tree_specs

_PAGE_SIZE = 16
_NUM_BLOCKS = 8
_CAPACITY = 8_192
_MOST_IN_A_CLASS = 1_024  # more than any block of keys
_LONG_CAPACITY = 32_768


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgSpec(tree_specs.ArgSpec):
  """The arguments of one call, on one device.

  The blocks are the rows of the batch, and their tokens the tree.

  Attributes:
    page_size: Z.
    is_shared: whether the sums of the softmax are wanted, too, to merge them
      with those of other devices.
    pages_dtype: dtype of the pages; None is that of the queries.
  """

  page_size: int
  is_shared: bool = False
  pages_dtype: str | None = None

  @property
  def capacity(self) -> int:
    """C * Z."""
    rows = self.context + self.tree_size
    return math.ceil(rows / self.page_size) * self.page_size

  def small(self):
    """In pages of eight tokens."""
    small = super().small()
    return dataclasses.replace(small, tree_size=small.num_tokens, page_size=8)

  def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    queries, _, _, lengths, mask, positions, *sinks = super().arrays()
    table = (self.batch_size, self.capacity // self.page_size)
    width = self.num_kv_heads * self.head_dim
    # As many as the blocks have, though caches have more.
    pages = jax.ShapeDtypeStruct(
      (math.prod(table), self.page_size, width), self.pages_dtype or self.dtype
    )
    table = jax.ShapeDtypeStruct(table, jnp.int32)
    by_block = (table, lengths, lengths, mask, positions)
    return queries, pages, pages, *by_block, *sinks

  def options(self):
    sums = {'with_sums': True} if self.is_shared else {}
    return super().options() | sums

  def suits(self, implementation):
    """Whether it can; TPUs take pages of whole lanes."""
    width = self.num_kv_heads * self.head_dim
    return implementation != 'pallas_tpu' or width % tiles.LANES == 0

  def shape_class(self):
    """Without the length of long tables, of which engines have several."""
    sizes = super().shape_class()
    del sizes['tiles']  # of a cache
    return {**sizes, 'context': min(sizes['context'], _MOST_IN_A_CLASS)}

  def with_meaning(self, *arrays, prefix=None):
    """Pages lie apart, and the last block has padding, which nobody sees."""
    queries, *stores, table, lengths, num_tokens, mask, positions = arrays[:8]
    queries, *stores, lengths, mask, positions = super().with_meaning(
      queries, *stores, lengths, mask, positions, prefix=prefix
    )
    pages = jnp.arange(table.size, dtype=jnp.int32).reshape(table.T.shape)
    num_tokens = jnp.full_like(num_tokens, self.num_tokens)
    num_tokens = num_tokens.at[-1].set((self.num_tokens + 1) // 2)
    mask, _ = padding.hide(num_tokens, mask, positions)
    by_block = (pages.T, lengths, num_tokens, mask, positions)
    return queries, *stores, *by_block, *arrays[8:]


@model_shapes.once_each
def arg_specs() -> Iterator[tuple[str, ArgSpec]]:
  """Yields models and their shapes, the same ones several times."""
  for model, shards in itertools.product(
    model_shapes.MODELS, model_shapes.TENSOR_PARALLEL
  ):
    user = f'{model.name}/tp{shards}'
    for num_tokens in model_shapes.NUM_TOKENS:
      for window in dict.fromkeys((None, model.window)):
        yield user, _spec(model, shards, num_tokens, window=window)
    yield user, _spec(model, shards, 8, _LONG_CAPACITY)
    if model.name in tree_specs.FLOAT32_MODELS:
      yield user, _spec(model, shards, 8, dtype='float32')
  for model, shards in itertools.product(
    model_shapes.WITH_SINKS, model_shapes.TENSOR_PARALLEL
  ):
    for window in (None, model.window):
      changes = {'window': window, 'has_sinks': True}
      yield f'{model.name}/tp{shards}', _spec(model, shards, 8, **changes)


def _spec(model, shards, num_tokens, capacity=_CAPACITY, **changes) -> ArgSpec:
  own = {'batch_size': _NUM_BLOCKS, 'page_size': _PAGE_SIZE, **changes}
  context = capacity - num_tokens
  return tree_specs.spec_of(ArgSpec, model, shards, context, num_tokens, **own)
