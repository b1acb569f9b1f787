"""Shapes of tree attention in real models, for compilers and measurements."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from kernels_pallas import call_spec, model_shapes

_ROW_TILE = 128
# In float32 the built-in models, and the widest blocks of keys.
FLOAT32_MODELS = (*model_shapes.BUILTIN, 'gemma3-4b', 'llama-8b')
# A grown draft tree.
_GROWN_TREE = 128
_GROWN_CONTEXT = 1_000
_SINKS_CONTEXT = 8_192
_SHORT_PREFIX = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgSpec(call_spec.CallSpec):
  """The arguments of one call, on one device.

  Attributes:
    num_tokens: T.
    num_kv_heads: G.
    num_groups: Q.
    head_dim: E.
    context: rows of the prefix.
    tree_size: M.
    dtype: dtype of queries and cache.
    window: window of a sliding layer in tokens; None means all.
    batch_size: B.
    has_sinks: whether query heads have sinks.
  """

  ROUNDED = ('batch_size', 'num_tokens', 'context', 'tree_size')
  num_tokens: int
  num_kv_heads: int
  num_groups: int
  head_dim: int
  context: int
  tree_size: int
  dtype: str
  window: int | None
  batch_size: int = 1
  has_sinks: bool = False

  @property
  def capacity(self) -> int:
    """S, in whole tiles."""
    rows = self.context + self.tree_size
    return math.ceil(rows / _ROW_TILE) * _ROW_TILE

  @property
  def num_bytes(self) -> int:
    """Bytes of queries, results, and the rows that the window shows."""
    heads, rows, queries = self._sizes()
    return 2 * heads * (rows + queries) * jnp.dtype(self.dtype).itemsize

  @property
  def num_flops(self) -> int:
    heads, rows, queries = self._sizes()
    return 4 * heads * rows * queries

  def _sizes(self) -> tuple[int, int, int]:
    """Returns columns of all kv heads, their visible rows, and queries."""
    rows = self.context + self.tree_size
    if self.window is not None:
      rows = min(rows, self.window + self.tree_size)
    heads = self.batch_size * self.num_kv_heads * self.head_dim
    return heads, rows, self.num_tokens * self.num_groups

  def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    batch, tokens = self.batch_size, self.num_tokens
    heads = (self.num_kv_heads, self.num_groups)
    cache = (batch, self.num_kv_heads, self.capacity, self.head_dim)
    return (
      jax.ShapeDtypeStruct((batch, tokens, *heads, self.head_dim), self.dtype),
      jax.ShapeDtypeStruct(cache, self.dtype),
      jax.ShapeDtypeStruct(cache, self.dtype),
      jax.ShapeDtypeStruct((batch,), jnp.int32),
      jax.ShapeDtypeStruct((batch, tokens, self.tree_size), jnp.bool_),
      jax.ShapeDtypeStruct((batch, tokens), jnp.int32),
      *[jax.ShapeDtypeStruct(heads, self.dtype)] * self.has_sinks,
    )

  def options(self) -> dict[str, float | int | None]:
    return {'scale': self.head_dim**-0.5, 'window': self.window}

  def shape_class(self):
    """With the rows of queries, and how many tiles blocks of keys may have."""
    query_rows = self.num_tokens * self.num_groups
    return {
      **super().shape_class(),
      'query_rows': call_spec.next_power_of_2(query_rows),
      'tiles': math.gcd(self.capacity // _ROW_TILE, 12),
    }

  def small(self):
    """Two rows, whose trees have more than the new tokens."""
    return dataclasses.replace(
      self,
      batch_size=2,
      num_tokens=4,
      num_kv_heads=2,
      num_groups=3,
      head_dim=32,
      context=26,
      tree_size=6,
    )

  def with_meaning(
    self, queries, keys, values, lengths, mask, positions, *sinks, prefix=None
  ):
    """Each token sees itself, and stands right after as many rows."""
    prefix = self.context if prefix is None else prefix
    rows = jnp.arange(self.tree_size - self.num_tokens, self.tree_size)
    own = jnp.arange(self.tree_size)[None] == rows[:, None]
    return (
      queries,
      keys,
      values,
      jnp.full_like(lengths, prefix),
      mask | own[None],
      jnp.full_like(positions, prefix),
      *sinks,
    )

  def draws(self, key):
    """After a short prefix, too: after a long one the tree weighs little."""
    for own_key in jax.random.split(key):
      for prefix in (self.context, min(_SHORT_PREFIX, self.context)):
        yield self.make_arrays(own_key, prefix=prefix)


@model_shapes.once_each
def arg_specs() -> Iterator[tuple[str, ArgSpec]]:
  """Yields models and their shapes, the same ones several times."""
  sizes = itertools.product(
    model_shapes.MODELS,
    model_shapes.TENSOR_PARALLEL,
    model_shapes.CONTEXTS,
    model_shapes.NUM_TOKENS,
  )
  for model, shards, context, num_tokens in sizes:
    user = f'{model.name}/tp{shards}'
    for window in dict.fromkeys((None, model.window)):
      yield user, _spec(model, shards, context, num_tokens, window=window)
    if num_tokens == 8 and context == _GROWN_CONTEXT:
      yield user, _spec(model, shards, context, 8, tree_size=_GROWN_TREE)
      yield user, _spec(model, shards, context, 8, batch_size=4)
      if model.name in FLOAT32_MODELS:
        yield user, _spec(model, shards, context, 8, dtype='float32')
  for model, shards, num_tokens in itertools.product(
    model_shapes.WITH_SINKS,
    model_shapes.TENSOR_PARALLEL,
    model_shapes.NUM_TOKENS,
  ):
    for window in (None, model.window):
      changes = {'window': window, 'has_sinks': True}
      yield (
        f'{model.name}/tp{shards}',
        _spec(model, shards, _SINKS_CONTEXT, num_tokens, **changes),
      )


def spec_of(make, model, shards, context, num_tokens, **changes):
  """Returns a spec of the class `make` for a model's part of a device."""
  fields = {
    'num_tokens': num_tokens,
    'num_kv_heads': model.kv_heads_of(shards),
    'num_groups': model.num_groups,
    'head_dim': model.head_dim,
    'context': context,
    'tree_size': num_tokens,
    'dtype': 'bfloat16',
    'window': None,
    'batch_size': 1,
    **changes,
  }
  name = (
    f'B{fields["batch_size"]} T{num_tokens} M{fields["tree_size"]} '
    f'ctx{context} {fields["dtype"]} window {fields["window"]}'
    f'{" sinks" if fields.get("has_sinks") else ""}'
  )
  return make(name=name, **fields)


_spec = functools.partial(spec_of, ArgSpec)
