"""The keys and values of a text that its latest tokens look at.

SnapKV (arXiv 2404.14469), as MagicDec drafts with it (arXiv 2408.11049): in
each layer the queries of the latest tokens vote, by their attention, for the
tokens in front of them. Each kv head keeps the best. They are copied to a small
cache, rotated as they are. Their order makes no difference to attention, so the
heads of a place need not belong to the same token.

Legend: W latest tokens, S places under the attention, N kept tokens, G kv
heads, Q query heads for each kv head, E head_dim, C pages.
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct

from kernels_pallas.paged_attention import reference as paged_reference
from kernels_pallas.tree_attention import reference as tree_reference
from swiftspec_jax.cache import paged
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import decoder
from swiftspec_jax.models.params import Params


@struct.dataclass(frozen=True, kw_only=True)
class KnownRow:
  """A row of the target's cache, and where what is kept of it goes."""

  token_ids: jax.Array  # i32[W] latest ones in the cache; then anything
  kv_length: jax.Array  # i32[] tokens in the cache
  page_table: jax.Array  # i32[C]
  first_place: jax.Array  # i32[] page * page size of the small cache


def attend_and_vote(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  visible: jax.Array,
  scale: float,
  sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns attention, and how much of it each place gets.

  Args:
    queries: [W, G, Q, E].
    keys: [G, S, E].
    values: [G, S, E].
    visible: bool[W, S].
    scale: factor of the scores.
    sinks: [G, Q] or None, as in `tree_attention.api`.

  Returns:
    [W, G, Q, E], and votes f32[G, S]: the sum over queries and query heads.
  """
  attended, log_sums = tree_reference.attention_part(
    queries[None], keys[None], values[None], visible[None], scale, sinks
  )
  scores = jnp.einsum(
    'wgqe,gse->wgqs', queries, keys, preferred_element_type=jnp.float32
  )
  shares = jnp.exp(scores * scale - log_sums[0][..., None])
  shares = jnp.where(visible[:, None, None], shares, 0)
  return attended[0], shares.sum(axis=(0, 2))


def best_places(
  votes: jax.Array,
  kv_length: jax.Array,
  *,
  budget: int,
  window: int,
  pooling: int,
) -> jax.Array:
  """Returns the places that each head keeps, in order.

  Args:
    votes: f32[G, S].
    kv_length: i32[] tokens that there are.
    budget: most places to keep, more than `window`.
    window: latest tokens, which are kept without a vote.
    pooling: odd number of neighbours that share their votes.

  Returns:
    i32[G, N], N the smaller one of `budget` and S. Where there are fewer tokens
    than N, places without one come last.
  """
  size = votes.shape[1]
  places = jnp.arange(size)[None]
  is_voted = places < kv_length - window
  votes = jnp.where(is_voted, votes, 0)
  padded = jnp.pad(votes, ((0, 0), (pooling // 2, pooling // 2)))
  pooled = sum(padded[:, i : i + size] for i in range(pooling)) / pooling
  latest = jnp.where(places < kv_length, jnp.inf, -jnp.inf)
  ranks = jnp.where(is_voted, pooled, latest)
  return jnp.sort(jax.lax.top_k(ranks, min(budget, size))[1])


def latest_places(
  num_heads: int, num_places: int, kv_length: jax.Array, budget: int
) -> jax.Array:
  """Returns i32[G, N] as `best_places`: those of the latest tokens."""
  num_kept = min(budget, num_places)
  first = jnp.maximum(kv_length - num_kept, 0)
  return jnp.broadcast_to(first + jnp.arange(num_kept), (num_heads, num_kept))


@functools.partial(
  jax.jit,
  static_argnames=('config', 'budget', 'pooling'),
  donate_argnames='small',
)
def keep_best(
  params: Params,
  cache: paged.PagedCache,
  small: paged.PagedCache,
  row: KnownRow,
  *,
  config: ModelConfig,
  budget: int,
  pooling: int,
) -> paged.PagedCache:
  """Copies what a draft is to see of a row.

  The latest tokens are fed once more for their queries, so it does not matter
  in which chunks the prompt was read, or whether its pages are another
  request's. The target's cache stays as it is.

  Args:
    params: parameters of the target.
    cache: cache of the target, all latest tokens included.
    small: cache of the draft; donated.
    row: row to choose from.
    config: configuration of the target; static.
    budget: same as in `best_places`; static.
    pooling: same as in `best_places`; static.

  Returns:
    The draft's cache.
  """
  window, kv_length = len(row.token_ids), row.kv_length
  positions = jnp.maximum(kv_length - window, 0) + jnp.arange(window)
  keys, values = list(small.keys), list(small.values)

  def attend(i, queries, new_keys, new_values):
    del new_keys, new_values  # the cache has them
    seen = config.kv_layer(i)
    num_heads = queries.shape[2]
    known_keys, known_values = (
      paged_reference.read_pages(
        pages[seen], row.page_table[None], num_heads, queries.dtype
      )[0]
      for pages in (cache.keys, cache.values)
    )
    num_places = known_keys.shape[1]
    distances = positions[:, None] - jnp.arange(num_places)[None]
    visible = (distances >= 0) & (positions < kv_length)[:, None]
    if config.is_sliding(i):
      visible &= distances < config.sliding_window
    attended, votes = attend_and_vote(
      queries[0],
      known_keys,
      known_values,
      visible,
      decoder.query_scale(config),
      params['layers'][i].get('sinks'),
    )
    if seen != i:
      return attended[None]
    if config.is_sliding(i):  # among kept places the window is the same
      kept = latest_places(num_heads, num_places, kv_length, budget)
    else:
      kept = best_places(
        votes, kv_length, budget=budget, window=window, pooling=pooling
      )
    index = jnp.arange(kept.shape[1])
    targets = jnp.where(
      index < kv_length, row.first_place + index, small.num_places
    )
    for pages, known in ((keys, known_keys), (values, known_values)):
      found = jnp.take_along_axis(known, kept[:, :, None], axis=1)
      pages[i] = paged.write(pages[i], jnp.moveaxis(found, 1, 0), targets)
    return attended[None]

  decoder.run_layers(
    params, config, row.token_ids[None], positions[None], attend
  )
  return small.replace(keys=keys, values=values)


@functools.partial(jax.jit, donate_argnames='small')
def append(
  cache: paged.PagedCache,
  small: paged.PagedCache,
  sources: jax.Array,
  targets: jax.Array,
) -> paged.PagedCache:
  """Copies tokens that the target has verified.

  Args:
    cache: cache of the target.
    small: cache of the draft; donated.
    sources: i32[any] page * page size + offset in the target's cache.
    targets: i32[any] the same in the draft's; after its last place for none.

  Returns:
    The draft's cache.
  """
  index = jnp.divmod(sources, cache.page_size)

  def copied(pages, known):
    return paged.write(pages, known[index], targets)

  return small.replace(
    keys=list(map(copied, small.keys, cache.keys)),
    values=list(map(copied, small.values, cache.values)),
  )
