"""Prompt lookup: continue as the text did after the same n-gram before.

Prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding); vLLM's
`ngram` method. Runs on the device, so the host need not know the tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp

from swiftspec_jax import drafting, errors
from swiftspec_jax.drafting.texts import text_match
from swiftspec_jax.step.rows import Rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookup(drafting.StatelessDrafter):
  """Proposes what followed the longest earlier match of the last tokens.

  Attributes:
    num_speculative_tokens: tokens of a draft (K).
    prompt_lookup_min: shortest n-gram that counts as a match.
    prompt_lookup_max: longest n-gram that is compared. Of equally long
      matches the most recent wins.
  """

  num_speculative_tokens: int = 7
  prompt_lookup_min: int = 2
  prompt_lookup_max: int = 4

  def __post_init__(self):
    is_valid = self.num_speculative_tokens >= 1
    errors.check_fields(
      self, {'num_speculative_tokens': (is_valid, 'at least 1')}
    )
    if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
      raise errors.UserError(
        'prompt lookup needs 1 <= prompt_lookup_min <= prompt_lookup_max, got '
        f'{self.prompt_lookup_min} and {self.prompt_lookup_max}'
      )

  def propose(self, rows: Rows) -> tuple[jax.Array, jax.Array]:
    token_ids, lengths = rows.token_ids, rows.lengths
    sizes = text_match.match_lengths(token_ids, lengths, self.prompt_lookup_max)
    # The longest, and of those the last.
    score = sizes * sizes.shape[1] + jnp.arange(sizes.shape[1])[None]
    place = jnp.argmax(score, axis=1)[:, None]
    length = jnp.take_along_axis(sizes, place, axis=1)[:, 0]
    chains = text_match.continuations(
      token_ids, lengths, place, self.num_speculative_tokens
    )
    # Drafts of idle rows would make the step longer.
    has_draft = (length >= self.prompt_lookup_min) & (rows.room > 0)
    num_drafted = jnp.where(has_draft, self.num_speculative_tokens, 0)
    return chains[:, 0], num_drafted
