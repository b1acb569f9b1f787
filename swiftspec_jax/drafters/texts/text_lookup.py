"""What the known text suggests after its end, scored by what came true.

Chains of tokens that followed the last ones before, found in prompt and output
on the draft's device. They enter the draft's tree next to the model's guesses,
so each token needs a log-probability: how often one of its kind, after a
match of its length, was the token that the target chose. That is counted in
each row while it decodes, from a measured prior on: where the output copies,
the chains rise above the model's guesses, and in free text they sink.

A token after one that came true continues a match that is longer by one, so
that the length of the match stands for the depth, too.

Legend: B rows, S tokens of the text, C chains, D tokens of a chain, L lengths
of a match.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from swiftspec_jax import tree as tree_lib
from swiftspec_jax.config import TreeConfig
from swiftspec_jax.drafters.texts import text_match
from swiftspec_jax.tree import arrays, types

_NUM_LENGTHS = 16  # L; longer matches count as these
_PRIOR_TRIED = 8.0  # tokens of a row that weigh as much as the prior


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
  """A way to look chains up.

  Attributes:
    num_chains: C of this kind. The longest matches count, and of equally long
      ones the most recent.
    longest: match that is looked for; all from one token on count, as their
      score decides what they are worth.
    prior: L rates, how often the token after a match of 1, 2, ... tokens was
      right.
  """

  num_chains: int
  longest: int
  prior: tuple[float, ...]


# Measured on the text that SmolLM2-135M-Instruct writes for training drafts.
PROMPT_LOOKUP = Kind(
  num_chains=1,
  longest=4,
  prior=(
    *(0.21, 0.53, 0.62, 0.73, 0.79, 0.83, 0.86, 0.87),
    *(0.88, 0.91, 0.91, 0.91, 0.92, 0.92, 0.94, 0.94),
  ),
)
SUFFIX_LOOKUP = Kind(
  num_chains=4,
  longest=16,
  prior=(
    *(0.33, 0.58, 0.68, 0.73, 0.78, 0.80, 0.83, 0.84),
    *(0.85, 0.89, 0.89, 0.89, 0.90, 0.91, 0.91, 0.96),
  ),
)


@struct.dataclass(frozen=True, kw_only=True)
class TextLookup:
  """The known text and what was made of it; rows lead."""

  # i32[B, S] prompt and output; PLACEHOLDER_TOKEN_ID for what the target does
  # not write, which ends matches and chains.
  token_ids: jax.Array
  lengths: jax.Array  # i32[B]
  chains: jax.Array  # i32[B, C, D] after the end of the text, kind by kind
  match_lengths: jax.Array  # i32[B, C] of the chains; 0 where there is none
  num_tried: jax.Array  # f32[B, kinds, L] tokens that had the chance
  num_right: jax.Array  # f32[B, kinds, L] of them those that came true
  kinds: tuple[Kind, ...] = struct.field(pytree_node=False)


def kinds_of(tree: Any) -> tuple[Kind, ...]:
  """Returns what a `TreeConfig`, or a draft with such fields, looks up."""
  kinds = (
    (tree.prompt_lookup, PROMPT_LOOKUP),
    (tree.suffix_lookup, SUFFIX_LOOKUP),
  )
  return tuple(kind for is_on, kind in kinds if is_on)


def make_row(
  tree_config: TreeConfig,
  token_ids: Sequence[int],
  capacity: int,
  control_token_ids: Sequence[int] = (),
) -> TextLookup | None:
  """Returns the host arrays of one row, None if nothing is to be looked up.

  Args:
    tree_config: configuration that says which lookups the tree has.
    token_ids: tokens of the prompt.
    capacity: S.
    control_token_ids: tokens of prompts that the target does not write.
  """
  kinds = kinds_of(tree_config)
  if not kinds:
    return None
  text = np.zeros((1, capacity), np.int32)
  is_control = np.isin(np.asarray(token_ids, np.int32), control_token_ids)
  known = np.where(is_control, types.PLACEHOLDER_TOKEN_ID, token_ids)
  text[0, : len(token_ids)] = known
  lengths = np.full(1, len(token_ids), np.int32)
  # One token more than can be accepted: the next root.
  return _uncounted(text, lengths, tree_config.num_nodes, kinds)


def _uncounted(token_ids, lengths, length, kinds) -> TextLookup:
  """Returns texts i32[B, S] of which nothing is known but the prior."""
  num_chains = sum(kind.num_chains for kind in kinds)
  shape = (len(lengths), num_chains, length)
  prior = np.asarray([[kind.prior for kind in kinds]], np.float32)
  prior = np.repeat(prior, len(lengths), axis=0)
  num_tried = np.full_like(prior, _PRIOR_TRIED)
  return TextLookup(
    token_ids=token_ids,
    lengths=lengths,
    chains=np.zeros(shape, np.int32),
    match_lengths=np.zeros(shape[:2], np.int32),
    num_tried=num_tried,
    num_right=num_tried * prior,
    kinds=kinds,
  )


def find(
  token_ids: jax.Array,
  lengths: jax.Array,
  *,
  length: int,
  kinds: tuple[Kind, ...],
) -> tuple[jax.Array, jax.Array]:
  """Finds chains after texts of which nothing has been counted.

  Args:
    token_ids: i32[B, S] text, then anything.
    lengths: i32[B] of the text.
    length: D; static.
    kinds: kinds of lookups; static.

  Returns:
    Chains i32[B, C, D] and their log-probabilities, as `look_up`.
  """
  lookup, log_probs = look_up(_uncounted(token_ids, lengths, length, kinds))
  return lookup.chains, log_probs


def follow(lookup: TextLookup, verified: types.VerifiedTokens) -> TextLookup:
  """Counts which chains came true, and appends the verified tokens.

  What counts is the text, not the tree: whether a chain was sent, or only
  found, makes no difference.
  """
  num_tokens = verified.num_tokens[:, None]
  steps = jnp.arange(lookup.chains.shape[2])[None]
  wanted = verified.token_ids[:, : lookup.chains.shape[2]]
  buckets = jnp.arange(lookup.num_tried.shape[2])[None, None]
  num_tried, num_right = [], []
  for chains, sizes in _by_kind(lookup):
    can_be_right = _can_be_right(chains, sizes)
    is_right = (chains == wanted[:, None]) & can_be_right
    is_right = arrays.all_up_to(is_right)
    is_tried = _before(is_right, (sizes > 0)[:, :, None]) & can_be_right
    size = jnp.max(jnp.where(is_tried, sizes[:, :, None], 0), axis=1) + steps
    bucket = _buckets(size)[:, :, None] == buckets
    counts = jnp.any(is_tried, axis=1) & (steps < num_tokens)
    num_tried.append(_count(bucket, counts))
    counts &= jnp.any(is_right, axis=1)
    num_right.append(_count(bucket, counts))
  # Verdicts that were missed come as one, which is longer than chains.
  every = jnp.arange(verified.token_ids.shape[1])[None]
  return lookup.replace(
    token_ids=arrays.put(
      lookup.token_ids,
      lookup.lengths[:, None] + every,
      verified.token_ids,
      every < num_tokens,
    ),
    lengths=lookup.lengths + verified.num_tokens,
    num_tried=lookup.num_tried + jnp.stack(num_tried, axis=1),
    num_right=lookup.num_right + jnp.stack(num_right, axis=1),
  )


def catch_up(
  lookup: TextLookup,
  token_ids: jax.Array,
  starts: jax.Array,
  lengths: jax.Array,
) -> TextLookup:
  """Reads the end of the text, of which no chain was told.

  Args:
    lookup: lookup that lacks some tokens; what it has stays as it is.
    token_ids: i32[B, X] from `starts` on.
    starts: i32[B].
    lengths: i32[B] of the text now.
  """
  places = starts[:, None] + jnp.arange(token_ids.shape[1])[None]
  is_new = (places >= lookup.lengths[:, None]) & (places < lengths[:, None])
  return lookup.replace(
    token_ids=arrays.put(lookup.token_ids, places, token_ids, is_new),
    lengths=lengths,
    match_lengths=jnp.zeros_like(lookup.match_lengths),
  )


def look_up(lookup: TextLookup) -> tuple[TextLookup, jax.Array]:
  """Finds the chains after the end of the text.

  Returns:
    The lookup that has them, and f32[B, C, D], the log-probability of each
    token after those before it; -inf where there is no chain.
  """
  chains, sizes = [], []
  longest = max(kind.longest for kind in lookup.kinds)
  matches = text_match.match_lengths(lookup.token_ids, lookup.lengths, longest)
  for kind in lookup.kinds:
    size = jnp.minimum(matches, kind.longest)
    # The longest match, and of those the last. (XLA CPU has a top-k of floats
    # and sorts all else.)
    score = size * size.shape[1] + jnp.arange(size.shape[1])[None]
    _, places = jax.lax.top_k(score.astype(jnp.float32), kind.num_chains)
    size = arrays.take(size, places)
    sizes.append(size)
    chains.append(
      text_match.continuations(
        lookup.token_ids, lookup.lengths, places, lookup.chains.shape[2]
      )
    )
  lookup = lookup.replace(
    chains=jnp.concatenate(chains, axis=1),
    match_lengths=jnp.concatenate(sizes, axis=1),
  )
  rates = lookup.num_right / lookup.num_tried
  log_probs = [
    _log_probs(chains, sizes, rates[:, i])
    for i, (chains, sizes) in enumerate(_by_kind(lookup))
  ]
  return lookup, jnp.concatenate(log_probs, axis=1)


def _log_probs(chains, sizes, rates):
  """Returns f32[B, C, D] of the chains of one kind.

  The rate of a match is shared by its chains, as they are seen after it.
  """
  is_same = tree_lib.same_prefixes(chains, _can_be_right(chains, sizes))
  num_same = jnp.sum(is_same, axis=2)
  is_node = num_same > 0
  was_same = _before(is_same, is_node[:, :, None] & is_node[:, None])
  steps = jnp.arange(chains.shape[2])[None, None]
  size = jnp.max(jnp.where(was_same, sizes[:, None, :, None], 0), axis=2)
  flat = _buckets(size + steps).reshape(chains.shape[0], -1)
  rate = arrays.take(rates, flat).reshape(chains.shape)
  shares = num_same / jnp.maximum(jnp.sum(was_same, axis=2), 1)
  return jnp.where(is_node, jnp.log(rate * shares), -jnp.inf)


def _can_be_right(chains, sizes):
  """Returns bool[B, C, D], tokens of chains that the target can write."""
  return (chains >= 0) & (sizes > 0)[:, :, None]


def _before(flags, first):
  """Returns the flags of the token before; `first` for the first token."""
  first = jnp.broadcast_to(first, flags.shape)[..., :1]
  return jnp.concatenate([first, flags[..., :-1]], axis=-1)


def _count(bucket, counts):
  """Returns f32[B, L], how many tokens bool[B, D] are in each bucket."""
  return jnp.sum(bucket & counts[:, :, None], axis=1, dtype=jnp.float32)


def _buckets(sizes):
  """Returns the index of the rate after matches of these lengths."""
  return jnp.minimum(sizes, _NUM_LENGTHS) - 1


def _by_kind(lookup: TextLookup) -> Iterator[tuple[jax.Array, jax.Array]]:
  """Yields chains and match lengths of each kind."""
  start = 0
  for kind in lookup.kinds:
    part = slice(start, start + kind.num_chains)
    start += kind.num_chains
    yield lookup.chains[:, part], lookup.match_lengths[:, part]
