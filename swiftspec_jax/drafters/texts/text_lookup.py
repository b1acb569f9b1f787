"""What the known text suggests after its end, scored by what came true.

A chain of tokens that followed the last ones before, found in prompt and output
on the draft's device. It enters the draft's tree next to the model's guesses,
so each token needs a log-probability: how often one after a match of its length
was the token that the target chose. That is counted in each row while it
decodes, from a measured prior on: where the output copies, the chain rises
above the model's guesses, and in free text it sinks.

A token after one that came true continues a match that is longer by one, so
that the length of the match stands for the depth, too.

Legend: B rows, S tokens of the text, D tokens of a chain, L lengths of a match.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from swiftspec_jax.config import TreeConfig
from swiftspec_jax.drafters.texts import text_match
from swiftspec_jax.tree import arrays, types

_LONGEST = 4  # match that is looked for; all from one token on count
# How often the token after a match of 1, 2, ... L tokens was right, measured on
# the text that SmolLM2-135M-Instruct writes for training drafts. Longer matches
# count as the last ones.
PRIOR = (
  *(0.21, 0.53, 0.62, 0.73, 0.79, 0.83, 0.86, 0.87),
  *(0.88, 0.91, 0.91, 0.91, 0.92, 0.92, 0.94, 0.94),
)
_PRIOR_TRIED = 8.0  # tokens of a row that weigh as much as the prior


@struct.dataclass(frozen=True, kw_only=True)
class TextLookup:
  """The known text and what was made of it; rows lead."""

  # i32[B, S] prompt and output; PLACEHOLDER_TOKEN_ID for what the target does
  # not write, which ends matches and chains.
  token_ids: jax.Array
  lengths: jax.Array  # i32[B]
  chains: jax.Array  # i32[B, D] after the end of the text
  match_lengths: jax.Array  # i32[B] of the chains; 0 where there is none
  num_tried: jax.Array  # f32[B, L] tokens that had the chance
  num_right: jax.Array  # f32[B, L] of them those that came true


def make_row(
  tree_config: TreeConfig,
  token_ids: Sequence[int],
  capacity: int,
  control_token_ids: Sequence[int] = (),
) -> TextLookup | None:
  """Returns the host arrays of one row, None if nothing is to be looked up.

  Args:
    tree_config: configuration that says whether the tree has a lookup.
    token_ids: tokens of the prompt.
    capacity: S.
    control_token_ids: tokens of prompts that the target does not write.
  """
  if not tree_config.prompt_lookup:
    return None
  text = np.zeros((1, capacity), np.int32)
  is_control = np.isin(np.asarray(token_ids, np.int32), control_token_ids)
  known = np.where(is_control, types.PLACEHOLDER_TOKEN_ID, token_ids)
  text[0, : len(token_ids)] = known
  lengths = np.full(1, len(token_ids), np.int32)
  # One token more than can be accepted: the next root.
  return _uncounted(text, lengths, tree_config.num_nodes)


def _uncounted(token_ids, lengths, length) -> TextLookup:
  """Returns texts i32[B, S] of which nothing is known but the prior."""
  prior = np.repeat(np.asarray([PRIOR], np.float32), len(lengths), axis=0)
  num_tried = np.full_like(prior, _PRIOR_TRIED)
  return TextLookup(
    token_ids=token_ids,
    lengths=lengths,
    chains=np.zeros((len(lengths), length), np.int32),
    match_lengths=np.zeros(len(lengths), np.int32),
    num_tried=num_tried,
    num_right=num_tried * prior,
  )


def find(
  token_ids: jax.Array, lengths: jax.Array, *, length: int
) -> tuple[jax.Array, jax.Array]:
  """Finds chains after texts of which nothing has been counted.

  Args:
    token_ids: i32[B, S] text, then anything.
    lengths: i32[B] of the text.
    length: D; static.

  Returns:
    Chains i32[B, D] and their log-probabilities, as `look_up`.
  """
  lookup, log_probs = look_up(_uncounted(token_ids, lengths, length))
  return lookup.chains, log_probs


def follow(lookup: TextLookup, verified: types.VerifiedTokens) -> TextLookup:
  """Counts which chains came true, and appends the verified tokens.

  What counts is the text, not the tree: whether a chain was sent, or only
  found, makes no difference.
  """
  num_tokens = verified.num_tokens[:, None]
  length = lookup.chains.shape[1]
  can_be_right = _can_be_right(lookup)
  is_right = lookup.chains == verified.token_ids[:, :length]
  is_right = arrays.all_up_to(is_right & can_be_right)
  is_tried = jnp.pad(is_right[:, :-1], ((0, 0), (1, 0)), constant_values=True)
  is_tried &= can_be_right & (jnp.arange(length)[None] < num_tokens)
  lengths = jnp.arange(len(PRIOR))[None, None]
  is_of_length = _indices(lookup)[:, :, None] == lengths
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
    num_tried=lookup.num_tried + _count(is_of_length, is_tried),
    num_right=lookup.num_right + _count(is_of_length, is_tried & is_right),
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
    The lookup that has them, and f32[B, D], the log-probability of each token
    after those before it; -inf where there is no chain.
  """
  chains, sizes = text_match.continue_longest(
    lookup.token_ids, lookup.lengths, _LONGEST, lookup.chains.shape[1]
  )
  lookup = lookup.replace(chains=chains, match_lengths=sizes)
  rates = arrays.take(lookup.num_right / lookup.num_tried, _indices(lookup))
  is_node = arrays.all_up_to(_can_be_right(lookup))
  return lookup, jnp.where(is_node, jnp.log(rates), -jnp.inf)


def _can_be_right(lookup):
  """Returns bool[B, D], tokens of chains that the target can write."""
  return (lookup.chains >= 0) & (lookup.match_lengths > 0)[:, None]


def _indices(lookup):
  """Returns i32[B, D], the index of the rate of each token of the chains."""
  steps = jnp.arange(lookup.chains.shape[1])[None]
  return jnp.minimum(lookup.match_lengths[:, None] + steps, len(PRIOR)) - 1


def _count(is_of_length, counts):
  """Returns f32[B, L], how many tokens bool[B, D] are of each length."""
  counts = is_of_length & counts[:, :, None]
  return jnp.sum(counts, axis=1, dtype=jnp.float32)
