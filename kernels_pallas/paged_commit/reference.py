"""The move of kept rows in pages in plain JAX: what the kernel follows.

Legend: B rows, T places of each, P pages, Z places of a page, C numbers of a
token.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kernels_pallas.fused_paged_attention import reference

# Implementations must give equal numbers.
TOLERANCES: dict[str, float] = {}


def paged_commit(
  caches: Sequence[jax.Array], sources: jax.Array, targets: jax.Array
) -> list[jax.Array]:
  """Returns the pages with the rows moved; see `api.paged_commit`."""
  sources, targets = sources.ravel(), targets.ravel()
  return [move(pages, sources, targets) for pages in caches]


def move(
  pages: jax.Array,
  sources: jax.Array,
  targets: jax.Array,
  page_size: int | None = None,
) -> jax.Array:
  """Returns pages [P, Y, C] with tokens copied to other places.

  Args:
    pages: [P, Y, C], of which all places are read before any is written.
    sources: i32[N] page * Z + offset.
    targets: i32[N]; P * Z or more is written nowhere.
    page_size: Z; None if Y is Z.
  """
  if len(sources) == 1:
    # XLA for GPUs slices a single row, and to slice what devices share it first
    # gathers all of it; the second row is written nowhere.
    sources = jnp.append(sources, 0)
    targets = jnp.append(targets, pages.shape[0] * pages.shape[1])
  rows = pages[jnp.divmod(sources, page_size or pages.shape[1])]
  return reference.write(pages, rows, targets, page_size)
