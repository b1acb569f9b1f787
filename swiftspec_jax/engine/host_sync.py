"""News of process 0 for the others that run an engine with it, as JSON.

Process 0 is asked, has the clock and chooses (`policies.from_process_zero`).
What else a step does depends on texts and sizes alone, so all processes enqueue
the same programs in the same order.
"""

from typing import Any

from swiftspec_jax.config import SamplingParams
from swiftspec_jax.engine.jobs import Job
from swiftspec_jax.requests import Request


def job_to_json(job: Job) -> dict[str, Any]:
  """Returns all of a new request."""
  return {
    'request_id': job.request_id,
    'request': request_to_json(job.request),
    'max_speculative_tokens': job.max_speculative_tokens,
    'shows_drafts': job.shows_drafts,
  }


def request_to_json(request: Request) -> dict[str, Any]:
  """Returns all of a request."""
  sampling = vars(request.sampling)
  pairs = [*request.sampling.logit_bias.items()]  # JSON has no other keys
  return {**vars(request), 'sampling': {**sampling, 'logit_bias': pairs}}


def request_of(values: dict[str, Any]) -> Request:
  """Returns the request of `request_to_json`."""
  sampling = _with_tuples(values['sampling'])
  sampling['logit_bias'] = dict(sampling['logit_bias'])
  return Request(
    **{**_with_tuples(values), 'sampling': SamplingParams(**sampling)}
  )


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
  return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
