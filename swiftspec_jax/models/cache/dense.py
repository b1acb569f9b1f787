"""Dense KV cache with per-row lengths.

Verbs: `write` puts keys and values of new tokens into rows after the
verified prefix, `commit` keeps an accepted path of them. Nothing is ever
cleared: rows at or beyond `kv_lengths` are simply not visible. After the last
row that can ever be committed a cache needs as many scratch rows as one step
writes.

A cache may also keep features of its tokens, for a draft that reads them.

Legend: B rows, S capacity, T new tokens, G kv heads, E head_dim, L layers, H
features.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding

from kernels_pallas import products
from kernels_pallas.fused_attention import reference
from kernels_pallas.kv_commit import api
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models.cache import all_layers
from swiftspec_jax.runtime import sharding

# Rows that kernels read at once; on a TPU the lanes of a register.
_ROW_TILE = 128

write = reference.write


@struct.dataclass(frozen=True, kw_only=True)
class KVCache:
  """Keys and values of all layers.

  [B, G, S, E] keeps the rows of one head together, so that attention is a
  plain batched product without a transposed copy.
  """

  keys: list[jax.Array]  # L x [B, G, S, E]
  values: list[jax.Array]  # L x [B, G, S, E]
  kv_lengths: jax.Array  # i32[B] committed tokens
  capacity: int = struct.field(pytree_node=False)  # S
  # Of keys and values; None is JAX's default device.
  sharding: NamedSharding | None = struct.field(pytree_node=False, default=None)
  # bf16[B, S, H] outputs of layers; None if there are none to keep.
  features: jax.Array | None = None
  feature_layers: tuple[int, ...] = struct.field(pytree_node=False, default=())


def init(
  config: ModelConfig,
  batch_size: int,
  capacity: int,
  dtype: jax.typing.DTypeLike,
  mesh: Mesh,
  feature_layers: tuple[int, ...] = (),
) -> KVCache:
  """Returns an empty cache on the mesh, of the capacity of `capacity_on`.

  Args:
    config: sizes of the model.
    batch_size: B.
    capacity: least S.
    dtype: dtype of keys and values.
    mesh: devices of the model.
    feature_layers: layers whose outputs are kept besides, as in `paged.init`.
  """
  capacity = capacity_on(mesh, capacity)
  rows = sharding.sharding_of(mesh, ('batch', 'kv_heads', None, None))

  def zeros():
    shapes = ((batch_size, g, capacity, e) for g, e in config.kv_heads)
    return [jnp.zeros(shape, dtype, device=rows) for shape in shapes]

  features = None
  if feature_layers:
    # Rounding costs a little acceptance at most, and halves what travels.
    width = len(feature_layers) * config.embed_dim
    features = jnp.zeros(
      (batch_size, capacity, width),
      products.stored_dtype(jnp.bfloat16, mesh),
      device=sharding.of_kept_features(mesh, width),
    )
  return KVCache(
    keys=zeros(),
    values=zeros(),
    kv_lengths=jnp.zeros(
      batch_size, jnp.int32, device=sharding.replicated(mesh)
    ),
    capacity=capacity,
    sharding=rows,
    features=features,
    feature_layers=feature_layers,
  )


def capacity_on(mesh: Mesh, num_rows: int) -> int:
  """Returns a capacity of `num_rows` at least: whole tiles on accelerators."""
  if mesh.devices.flat[0].platform == 'cpu':
    return num_rows
  return math.ceil(num_rows / _ROW_TILE) * _ROW_TILE


def write_features(
  cache: KVCache, features: jax.Array, starts: jax.Array
) -> KVCache:
  """Returns the cache with the features of a block of tokens.

  Args:
    cache: cache to write into.
    features: [B, T, H].
    starts: i32[B] first row of each block, as in `write`.
  """
  # As the rows of a single head.
  rows = write(cache.features[:, None], features[:, :, None], starts)
  return cache.replace(features=rows[:, 0])


def commit(
  cache: KVCache,
  path: jax.Array,
  num_kept: jax.Array,
  *,
  num_rows: int | None = None,
  kernels: str = 'auto',
) -> KVCache:
  """Keeps accepted tokens: moves their rows after the prefix.

  Args:
    cache: cache with speculative rows written after the prefix.
    path: i32[B, T] rows to keep, in order, counted from the end of the
      prefix. Those from `num_kept` on become scratch.
    num_kept: i32[B] number of rows to keep.
    num_rows: static bound: all of `path` is below it. None is T.
    kernels: name of the code to run, one of
      `kernels_pallas.dispatch.IMPLEMENTATIONS`.
  """
  move = functools.partial(
    api.kv_commit,
    starts=cache.kv_lengths,
    path=path,
    num_rows=num_rows or path.shape[1],
    implementation=kernels,
    sharding=cache.sharding,
  )
  return cache.replace(
    **all_layers.apply(move, cache.keys, cache.values),
    kv_lengths=cache.kv_lengths + num_kept,
  )


def extend(cache: KVCache, num_kept: jax.Array) -> KVCache:
  """`commit` of a chain: the first `num_kept` i32[B] new rows, in place."""
  return cache.replace(kv_lengths=cache.kv_lengths + num_kept)
