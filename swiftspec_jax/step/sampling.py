"""From logits to the distribution of the next token, and the draw itself.

The order is that of vLLM and Hugging Face: penalties, bias and bans,
temperature, top-k, top-p, min-p. Thresholds are found by bisection on the
bits of the logits instead of sorting the vocabulary (`kernels_pallas.
thresholds`), which keeps ties together.

All noise is keyed by the request's seed and the position of the token, so a
row's tokens depend on nothing else in the batch.

Legend: B rows, T query tokens, S cache capacity, V vocabulary, F forced.
"""

import enum
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding

from kernels_pallas import dispatch
from kernels_pallas.thresholds import api
from kernels_pallas.vocabulary import largest
from swiftspec_jax.config import MAX_TOP_LOGPROBS, SamplingParams
from swiftspec_jax.step import buckets

_NUM_FORCED = 16  # forced tokens that there is always room for


class SamplingLevel(enum.IntEnum):
  """How much of `SamplingParams` a request uses."""

  GREEDY = 0
  TEMPERATURE = 1
  TRUNCATED = 2
  ADJUSTED = 3  # penalties, bias, bans, forced tokens, min_tokens, logprobs


class Stream(enum.IntEnum):
  """Independent noise streams at one position of one request."""

  OUTPUT = 0
  DRAFT = 2  # the draft's tokens


@struct.dataclass(frozen=True, kw_only=True)
class SamplingState:
  """SamplingParams of all rows as arrays.

  A field is None where the level has no use for it: the compiled step then has
  no trace of it. `temperatures` None means all rows are greedy.
  """

  seeds: jax.Array  # u32[B]
  temperatures: jax.Array | None  # f32[B], 0 is greedy
  top_ks: jax.Array | None  # i32[B], 0 keeps all
  top_ps: jax.Array | None  # f32[B]
  min_ps: jax.Array | None  # f32[B]
  repetition_penalties: jax.Array | None  # f32[B]
  presence_penalties: jax.Array | None  # f32[B]
  frequency_penalties: jax.Array | None  # f32[B]
  logit_bias: jax.Array | None  # f32[B, V], -inf where banned
  min_tokens: jax.Array | None  # i32[B] of the output before it may end
  is_end: jax.Array | None  # bool[B, V] tokens that would end it
  forced_token_ids: jax.Array | None  # i32[B, F], -1 where free
  with_logprobs: bool = struct.field(pytree_node=False)
  num_top_logprobs: int = struct.field(pytree_node=False)


def make_state(
  batch: Sequence[SamplingParams],
  vocab_size: int,
  level: SamplingLevel,
  *,
  eos_token_ids: Sequence[int] = (),
) -> SamplingState:
  """Returns host arrays for a batch of requests.

  More forced tokens than usual make a program of their own.

  Args:
    batch: one for each row.
    vocab_size: V.
    level: level that covers all of them.
    eos_token_ids: tokens at which the target ends an output.
  """

  def column(field, dtype, least=SamplingLevel.ADJUSTED):
    if level < least:
      return None
    return np.asarray([getattr(params, field) for params in batch], dtype)

  cut = SamplingLevel.TRUNCATED
  is_adjusted = level == SamplingLevel.ADJUSTED
  return SamplingState(
    seeds=column('seed', np.uint32, SamplingLevel.GREEDY),
    temperatures=column('temperature', np.float32, SamplingLevel.TEMPERATURE),
    top_ks=column('top_k', np.int32, cut),
    top_ps=column('top_p', np.float32, cut),
    min_ps=column('min_p', np.float32, cut),
    repetition_penalties=column('repetition_penalty', np.float32),
    presence_penalties=column('presence_penalty', np.float32),
    frequency_penalties=column('frequency_penalty', np.float32),
    logit_bias=_bias(batch, vocab_size) if is_adjusted else None,
    min_tokens=column('min_tokens', np.int32),
    is_end=_ends(batch, vocab_size, eos_token_ids) if is_adjusted else None,
    forced_token_ids=_forced(batch) if is_adjusted else None,
    with_logprobs=is_adjusted,
    # The most or none: each number would need programs of its own.
    num_top_logprobs=min(MAX_TOP_LOGPROBS, vocab_size) if is_adjusted else 0,
  )


def _bias(batch, vocab_size):
  bias = np.zeros((len(batch), vocab_size), np.float32)
  for row, params in zip(bias, batch, strict=True):
    for token_id, value in params.logit_bias.items():
      row[token_id] = value
    row[list(params.banned_token_ids)] = -np.inf
  return bias


def _ends(batch, vocab_size, eos_token_ids):
  is_end = np.zeros((len(batch), vocab_size), bool)
  # Some configurations name tokens that the model does not have.
  is_end[:, [i for i in eos_token_ids if 0 <= i < vocab_size]] = True
  for row, params in zip(is_end, batch, strict=True):
    row[list(params.stop_token_ids)] = True
  return is_end


def _forced(batch):
  longest = max(len(params.forced_token_ids) for params in batch)
  size = buckets.power_of_two(longest, _NUM_FORCED)
  forced = np.full((len(batch), size), -1, np.int32)
  for row, params in zip(forced, batch, strict=True):
    row[: len(params.forced_token_ids)] = params.forced_token_ids
  return forced


def token_counts(
  token_ids: jax.Array,
  starts: jax.Array,
  ends: jax.Array,
  vocab_size: int,
) -> jax.Array:
  """Returns i32[B, V], how often tokens occur from `starts` to `ends`.

  Args:
    token_ids: i32[B, S].
    starts: i32[B].
    ends: i32[B].
    vocab_size: V.
  """
  batch, size = token_ids.shape
  places = jnp.arange(size)[None]
  is_counted = (places >= starts[:, None]) & (places < ends[:, None])
  # Other places count for a token past the vocabulary: dropped.
  ids = jnp.where(is_counted, token_ids, vocab_size)
  counts = jnp.zeros((batch, vocab_size), jnp.int32)
  return counts.at[jnp.arange(batch)[:, None], ids].add(1, mode='drop')


def adjust_logits(
  logits: jax.Array,
  sampling: SamplingState,
  *,
  token_ids: jax.Array,
  lengths: jax.Array,
  prompt_lengths: jax.Array,
) -> jax.Array:
  """Applies penalties, bias, bans and forced tokens.

  Args:
    logits: f32[B, 1, V] after the history.
    sampling: sampling parameters of the rows.
    token_ids: i32[B, S] history.
    lengths: i32[B] of the history.
    prompt_lengths: i32[B].

  Returns:
    f32[B, 1, V], -inf where a token is banned.
  """
  vocab_size = logits.shape[2]
  # Of the token that is chosen, in the output.
  index = (lengths - prompt_lengths)[:, None]

  def counts_from(starts):
    return token_counts(token_ids, starts, lengths, vocab_size)[:, None]

  logits = _penalize(logits, sampling, prompt_lengths, counts_from)
  if sampling.logit_bias is not None:
    logits = logits + sampling.logit_bias[:, None]
  if sampling.min_tokens is not None:
    is_early = index < sampling.min_tokens[:, None]
    is_banned = (is_early & sampling.is_end)[:, None]
    logits = jnp.where(is_banned, -jnp.inf, logits)
  if sampling.forced_token_ids is not None:
    size = sampling.forced_token_ids.shape[1]
    forced = jnp.take_along_axis(
      sampling.forced_token_ids, jnp.clip(index, 0, size - 1), axis=1
    )
    forced = jnp.where(index < size, forced, -1)[:, :, None]
    is_forced = forced == jnp.arange(vocab_size)[None, None]
    only_forced = jnp.where(is_forced, 0.0, -jnp.inf)
    logits = jnp.where(forced < 0, logits, only_forced)
  return logits


def _penalize(logits, sampling, prompt_lengths, counts_from):
  """Applies the penalties on tokens that were seen.

  Args:
    logits: f32[B, 1, V].
    sampling: sampling parameters of the rows.
    prompt_lengths: i32[B].
    counts_from: function from places i32[B] to how often each token occurs
      from there on, i32[B, 1, V].
  """
  if sampling.repetition_penalties is not None:
    seen = counts_from(jnp.zeros_like(prompt_lengths)) > 0
    penalty = sampling.repetition_penalties[:, None, None]
    penalized = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = jnp.where(seen, penalized, logits)
  frequency = sampling.frequency_penalties
  presence = sampling.presence_penalties
  if frequency is None and presence is None:
    return logits
  counts = counts_from(prompt_lengths)
  if frequency is not None:
    penalty = frequency[:, None, None]
    logits = logits - penalty * counts.astype(logits.dtype)
  if presence is not None:
    penalty = presence[:, None, None]
    logits = jnp.where(counts > 0, logits - penalty, logits)
  return logits


def distribution_logits(
  logits: jax.Array,
  sampling: SamplingState,
  *,
  kernels: str = dispatch.REFERENCE,
  sharding: NamedSharding | None = None,
) -> jax.Array:
  """Returns the logits of the distribution that tokens are drawn from.

  Args:
    logits: f32[B, T, V], adjusted.
    sampling: sampling parameters of the rows, with `temperatures`.
    kernels: static name, one of `kernels_pallas.dispatch.IMPLEMENTATIONS`.
      The distribution does not depend on it.
    sharding: static sharding of any array on the same devices.

  Returns:
    f32[B, T, V]; excluded tokens are -inf, in greedy rows all but one.
  """
  is_greedy = sampling.temperatures == 0
  adjusted = (
    logits / jnp.where(is_greedy, 1, sampling.temperatures)[:, None, None]
  )
  top_ks, top_ps = sampling.top_ks, sampling.top_ps
  if top_ks is not None:
    top_ks = jnp.where(top_ks == 0, adjusted.shape[2], top_ks)
  if top_ps is not None:
    # Rounded sums can reach 1 without the least probable tokens.
    top_ps = jnp.where(top_ps < 1, top_ps, jnp.inf)
  if top_ks is not None or top_ps is not None:
    thresholds = api.find_thresholds(
      adjusted, top_ks, top_ps, implementation=kernels, sharding=sharding
    )
    adjusted = jnp.where(adjusted >= thresholds[:, :, None], adjusted, -jnp.inf)
  if sampling.min_ps is not None:
    floor = adjusted.max(-1, keepdims=True) + jnp.log(
      sampling.min_ps[:, None, None]
    )
    adjusted = jnp.where(adjusted >= floor, adjusted, -jnp.inf)
  best = largest.argmax(logits)[..., None]
  is_best = jnp.arange(logits.shape[2])[None, None] == best
  only_best = jnp.where(is_best, 0.0, -jnp.inf)
  return jnp.where(is_greedy[:, None, None], only_best, adjusted)


def position_keys(
  seeds: jax.Array, positions: jax.Array, stream: Stream
) -> jax.Array:
  """Returns keys [B, T] for noise at `positions` i32[B, T]."""

  def key_of(seed, position):
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.fold_in(key, int(stream))

  return jax.vmap(jax.vmap(key_of, (None, 0)))(seeds, positions)


def gumbel_noise(keys: jax.Array, vocab_size: int) -> jax.Array:
  """Returns the noise f32[B, T, V] of keys [B, T], which are consumed."""
  noise_of = jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,)))
  return jax.vmap(noise_of)(keys)
