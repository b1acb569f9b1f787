"""Where the last tokens of a text stand in it a second time.

Prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding) and
SuffixDecoding (arXiv 2411.04975) continue a text from there. It runs on the
device, so the host need not know the tokens.

Legend: B rows, S tokens of the text, D tokens of a continuation.
"""

import jax
import jax.numpy as jnp

from swiftspec_jax.tree import arrays, types


def match_lengths(
  token_ids: jax.Array, lengths: jax.Array, longest: int
) -> jax.Array:
  """Returns i32[B, S], how many tokens up to a place equal the last ones.

  Args:
    token_ids: i32[B, S] text, then anything; a PLACEHOLDER_TOKEN_ID in the text
      matches nothing.
    lengths: i32[B] lengths of the text. Its last place does not match itself.
    longest: static number of tokens that are compared at most.
  """
  size = token_ids.shape[1]
  matches = jnp.arange(size)[None] < lengths[:, None] - 1
  sizes = jnp.zeros_like(token_ids)
  padded = jnp.pad(
    token_ids,
    ((0, 0), (longest, 0)),
    constant_values=types.PLACEHOLDER_TOKEN_ID,
  )
  for back in range(longest):
    last = arrays.take(token_ids, lengths[:, None] - 1 - back)
    start = longest - back
    matches &= (padded[:, start : start + size] == last) & (last >= 0)
    sizes += matches.astype(jnp.int32)
  return sizes


def continue_longest(
  token_ids: jax.Array, lengths: jax.Array, longest: int, num_tokens: int
) -> tuple[jax.Array, jax.Array]:
  """Returns what stands after the longest match, of equals the most recent.

  A continuation that runs into the end of the text goes on periodically.

  Args:
    token_ids: same as in `match_lengths`.
    lengths: same as in `match_lengths`.
    longest: same as in `match_lengths`.
    num_tokens: D; static.

  Returns:
    i32[B, D], and the length i32[B] of the match; 0 where there is none.
  """
  sizes = match_lengths(token_ids, lengths, longest)
  num_places = sizes.shape[1]
  score = sizes * num_places + jnp.arange(num_places)[None]
  size, place = jnp.divmod(jnp.max(score, axis=1, keepdims=True), num_places)
  period = lengths[:, None] - 1 - place
  sources = place + 1 + jnp.arange(num_tokens)[None] % jnp.maximum(period, 1)
  return arrays.take(token_ids, sources), size[:, 0]
