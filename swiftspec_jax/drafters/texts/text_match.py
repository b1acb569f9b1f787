"""Where the last tokens of a text stand in it a second time.

Prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding) and
SuffixDecoding (arXiv 2411.04975) continue a text from there. It runs on the
device, so the host need not know the tokens.

Legend: B rows, S tokens of the text, C places, D steps.
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


def continuations(
  token_ids: jax.Array, lengths: jax.Array, places: jax.Array, num_tokens: int
) -> jax.Array:
  """Returns i32[B, C, D], what stands after places of the text.

  A continuation that runs into the end of the text goes on periodically.

  Args:
    token_ids: i32[B, S].
    lengths: i32[B] of the text.
    places: i32[B, C].
    num_tokens: D.
  """
  period = lengths[:, None, None] - 1 - places[:, :, None]
  steps = jnp.arange(num_tokens)[None, None]
  sources = places[:, :, None] + 1 + steps % jnp.maximum(period, 1)
  flat = sources.reshape(sources.shape[0], -1)
  return arrays.take(token_ids, flat).reshape(sources.shape)
