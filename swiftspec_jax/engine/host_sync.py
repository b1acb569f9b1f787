"""News of process 0 for the others that run an engine with it, as JSON.

Process 0 is asked, has the clock and chooses (`policies.from_process_zero`).
What else a step does depends on texts and sizes alone, so all processes enqueue
the same programs in the same order.
"""

from collections.abc import Sequence
from typing import Any

from swiftspec_jax.config import SamplingParams
from swiftspec_jax.engine.jobs import Job
from swiftspec_jax.requests import Request


def to_json(
  submitted: Sequence[Job],
  cancelled: Sequence[int],
  text: Sequence[int] | None,
  fact: Any,
) -> dict[str, Any]:
  """Returns what has happened since the last step.

  Args:
    submitted: new requests.
    cancelled: ids of requests that nobody wants any more.
    text: tokens of a text that is rated before the step, or None.
    fact: JSON value that the engine needs besides.
  """
  return {
    'submitted': [
      {
        'request_id': job.request_id,
        'request': request_to_json(job.request),
        'max_speculative_tokens': job.max_speculative_tokens,
        'shows_drafts': job.shows_drafts,
      }
      for job in submitted
    ],
    'cancelled': cancelled,
    'text': text,
    'fact': fact,
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
