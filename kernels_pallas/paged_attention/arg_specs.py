"""Shapes of paged attention in real models, for compilers and measurements."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from kernels_pallas import call_spec, model_shapes, tiles
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

  @classmethod
  def of_pages(
    cls,
    tokens: str,
    queries_shape: tuple[int, ...],
    pages_shape: tuple[int, ...],
    num_columns: int,
    dtype: jax.typing.DTypeLike,
    *,
    has_sinks: bool,
    window: int | None,
    soft_cap: float | None = None,
    is_shared: bool = False,
    pages_dtype: jax.typing.DTypeLike | None = None,
  ) -> 'ArgSpec':
    """Returns the spec of a call.

    Args:
      tokens: dtype and shape of the tokens' argument, in words.
      queries_shape: (X, T, G, Q, E) of a device.
      pages_shape: (P, Z, G * E) of a device.
      num_columns: C.
      dtype: dtype of tokens.
      has_sinks: whether query heads have sinks.
      window: window in tokens, or None.
      soft_cap: bound of the scores, or None.
      is_shared: whether devices share the rows of a page.
      pages_dtype: dtype of pages; None is that of tokens.
    """
    _, size, num_kv_heads, num_groups, head_dim = queries_shape
    page_size = pages_shape[1]
    return cls(
      name=f'{tokens}, pages {list(pages_shape)}, {num_columns} of a row, '
      f'window {window}{", sinks" if has_sinks else ""}'
      f'{", devices share them" if is_shared else ""}',
      # An engine has programs for many numbers of blocks.
      batch_size=call_spec.MOST_ROWS,
      num_tokens=size,
      num_kv_heads=num_kv_heads,
      num_groups=num_groups,
      head_dim=head_dim,
      context=max(num_columns * page_size - size, 0),
      tree_size=size,
      dtype=jnp.dtype(dtype).name,
      window=window,
      soft_cap=soft_cap,
      page_size=page_size,
      # Devices that share rows count the sinks when they merge.
      has_sinks=has_sinks and not is_shared,
      is_shared=is_shared,
      pages_dtype=jnp.dtype(dtype if pages_dtype is None else pages_dtype).name,
    )

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
    """Returns the abstract arguments of `paged_attention`."""
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
    """Returns the keyword arguments."""
    return {**super().options(), 'with_sums': self.is_shared}

  def suits(self, implementation):
    """Whether it can; TPUs take pages of whole lanes."""
    width = self.num_kv_heads * self.head_dim
    return implementation != 'pallas_tpu' or width % tiles.LANES == 0

  def shape_class(self):
    """Without the length of long tables, of which engines have several."""
    sizes = super().shape_class()
    del sizes['tiles']  # of a cache
    return {**sizes, 'context': min(sizes['context'], _MOST_IN_A_CLASS)}

  def with_meaning(self, *arrays):
    """Pages lie apart, and the last block has padding, which nobody sees."""
    queries, *stores, table, lengths, num_tokens, mask, positions = arrays[:8]
    queries, *stores, lengths, mask, positions = super().with_meaning(
      queries, *stores, lengths, mask, positions
    )
    pages = jnp.arange(table.size, dtype=jnp.int32).reshape(table.T.shape)
    num_tokens = jnp.full_like(num_tokens, self.num_tokens)
    num_tokens = num_tokens.at[-1].set((self.num_tokens + 1) // 2)
    mask, _ = padding.hide(num_tokens, mask, positions)
    by_block = (pages.T, lengths, num_tokens, mask, positions)
    return queries, *stores, *by_block, *arrays[8:]

  def with_prefix(self, arrays, length):
    """With as many rows in front of the blocks."""
    *before, lengths, num_tokens, mask, positions = arrays[:8]
    lengths, positions = (
      jnp.full_like(x, length) for x in (lengths, positions)
    )
    return *before, lengths, num_tokens, mask, positions, *arrays[8:]


def arg_specs() -> list[ArgSpec]:
  """Returns all shapes, each once, with the models that have it."""
  return model_shapes.once_each(_all())


def _all() -> Iterator[tuple[str, ArgSpec]]:
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
  fields = {
    'num_tokens': num_tokens,
    'num_kv_heads': model.kv_heads_of(shards),
    'num_groups': model.num_groups,
    'head_dim': model.head_dim,
    'context': capacity - num_tokens,
    'tree_size': num_tokens,
    'dtype': 'bfloat16',
    'window': None,
    'batch_size': _NUM_BLOCKS,
    'page_size': _PAGE_SIZE,
    **changes,
  }
  name = (
    f'X{_NUM_BLOCKS} T{num_tokens} S{capacity} {fields["dtype"]} '
    f'window {fields["window"]}{" sinks" if fields.get("has_sinks") else ""}'
  )
  return ArgSpec(name=name, **fields)
