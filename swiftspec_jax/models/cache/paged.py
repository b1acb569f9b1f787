"""Paged KV cache: rows of any length share one store of pages.

A row's tokens lie in the pages of its table, in order: position p is in page
p // Z at offset p % Z. Who owns which page is the host's business. Nothing is
ever cleared: a query sees the positions up to its own, and all of those have
been written for the row that it belongs to.

A cache may also keep features of its tokens, for a draft that reads them.

The heads of a token lie side by side, so that a page is whole tiles of a TPU.

On a mesh with an axis 'sequence' each device has a part of every page, so that
the devices' shares of any row differ by less than a page. Only the first ones
may keep tokens: then they alone can go on with them.

Legend: P pages, Z tokens of a page, Y places of a page, which are Z unless some
devices keep none, N tokens, G kv heads, E head_dim, L layers, H features.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding

from kernels_pallas import products
from kernels_pallas.fused_paged_attention import reference
from kernels_pallas.paged_commit import api as commit_api
from kernels_pallas.paged_commit import reference as commit_reference
from swiftspec_jax import errors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models.cache import all_layers
from swiftspec_jax.runtime import sharding

write = reference.write


@struct.dataclass(frozen=True, kw_only=True)
class PagedCache:
  """Keys and values of all layers."""

  keys: list[jax.Array]  # L x [P, Y, G * E]
  values: list[jax.Array]  # L x [P, Y, G * E]
  num_pages: int = struct.field(pytree_node=False)  # P
  page_size: int = struct.field(pytree_node=False)  # Z
  # Of what is read; pages may be wider.
  dtype: jnp.dtype = struct.field(pytree_node=False)
  sharding: NamedSharding = struct.field(pytree_node=False)  # of keys, values
  # [P, Z, H] outputs of layers; None if there are none to keep.
  features: jax.Array | None = None
  feature_layers: tuple[int, ...] = struct.field(pytree_node=False, default=())

  @property
  def num_places(self) -> int:
    """P * Z."""
    return self.num_pages * self.page_size


def init(
  config: ModelConfig,
  num_pages: int,
  page_size: int,
  dtype: jax.typing.DTypeLike,
  mesh: Mesh,
  feature_layers: tuple[int, ...] = (),
) -> PagedCache:
  """Returns an empty cache on the mesh.

  Args:
    config: sizes of the model.
    num_pages: P.
    page_size: Z.
    dtype: dtype in which keys, values and features are read.
    mesh: devices of the model.
    feature_layers: indices of the layers whose outputs are kept besides keys
      and values.

  Raises:
    UserError: the devices of the axis 'sequence' do not divide a page.
  """
  num_parts = sharding.sequence_devices(mesh)
  if page_size % num_parts:
    raise errors.UserError(
      f'page_size={page_size} is no multiple of the {num_parts} devices that '
      'share the tokens of a sequence'
    )
  stored = products.stored_dtype(dtype, mesh)
  pages = sharding.sharding_of(mesh, (None, 'kv_tokens', 'kv_heads'))

  def zeros():
    shapes = ((num_pages, page_size, math.prod(x)) for x in config.kv_heads)
    return [jnp.zeros(shape, stored, device=pages) for shape in shapes]

  features = None
  if feature_layers:
    width = len(feature_layers) * config.embed_dim
    features = jnp.zeros(
      (num_pages, page_size, width),
      stored,
      device=sharding.of_kept_features(mesh, width),
    )
  return PagedCache(
    keys=zeros(),
    values=zeros(),
    num_pages=num_pages,
    page_size=page_size,
    dtype=jnp.dtype(dtype),
    sharding=pages,
    features=features,
    feature_layers=feature_layers,
  )


def commit(
  cache: PagedCache, sources: jax.Array, targets: jax.Array, *, kernels: str
) -> PagedCache:
  """Returns the cache with the tokens of rows moved within their own pages.

  Args:
    cache: cache of the rows.
    sources: i32[B, T] page * Z + offset, all read before any is written.
    targets: i32[B, T]; P * Z or more is written nowhere.
    kernels: name of the code to run, one of
      `kernels_pallas.dispatch.IMPLEMENTATIONS`.
  """
  flat = sources.ravel(), targets.ravel()
  if sharding.sequence_devices(cache.sharding.mesh) > 1:
    move = functools.partial(
      commit_reference.move,
      sources=flat[0],
      targets=flat[1],
      page_size=cache.page_size,
    )
    return jax.tree.map(move, cache)
  moved = functools.partial(
    commit_api.paged_commit,
    sources=sources,
    targets=targets,
    implementation=kernels,
    sharding=cache.sharding,
  )
  features = cache.features
  if features is not None:
    features = commit_reference.move(features, *flat)
  layers = all_layers.apply(moved, cache.keys, cache.values)
  return cache.replace(**layers, features=features)
