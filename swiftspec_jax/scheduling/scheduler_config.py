"""Sizes that rows, pages and requests have."""

import dataclasses

from swiftspec_jax import errors
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
  """Sizes of an engine.

  Attributes:
    buckets: the compiled sizes; there are as many slots as rows.
    num_pages: pages of the KV cache.
    max_context: most tokens of a request, prompt and output together.
    page_size: tokens of a page.
    shares_prefixes: whether requests that begin alike share full pages.
  """

  buckets: StepBuckets
  num_pages: int
  max_context: int
  page_size: int = 16
  shares_prefixes: bool = True

  def __post_init__(self):
    checks = {
      'max_context': (self.max_context >= 2, 'at least 2'),
      'num_pages': (self.num_pages >= 1, 'at least 1'),
      'page_size': (self.page_size >= 1, 'at least 1'),
    }
    errors.check_fields(self, checks)

  def check(self, num_prompt_tokens: int, max_new_tokens: int) -> None:
    """Raises UserError for a request that does not fit even alone."""
    limit = min(self.max_context, self.page_size * self.num_pages)
    if num_prompt_tokens + max_new_tokens > limit:
      raise errors.UserError(
        f'a request of {num_prompt_tokens} + {max_new_tokens} tokens is more '
        f'than the {limit} tokens of context and cache'
      )
