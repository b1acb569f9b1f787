"""What the host knows of requests: from the prompt to the result."""

import dataclasses
import enum

from swiftspec_jax import errors
from swiftspec_jax.config import SamplingParams
from swiftspec_jax.models.model import Model
from swiftspec_jax.requests import grammar, results


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """One prompt, as token ids, and how to continue it.

  Attributes:
    token_ids: tokens of the prompt.
    sampling: parameters by which its tokens are chosen.
    reference_token_ids: the output, where `TreeConfig.forced_acceptance` lets
      the draft know it; else not used.
  """

  token_ids: tuple[int, ...]
  sampling: SamplingParams = SamplingParams()
  reference_token_ids: tuple[int, ...] = ()


def check(request: Request, target: Model, max_context: int, who: str) -> None:
  """Raises UserError for a request that cannot be decoded.

  Args:
    request: request to look at.
    target: model that the tokens are for.
    max_context: most tokens, prompt and output together.
    who: name of what has that limit, for the message.
  """
  length, vocab_size = len(request.token_ids), target.config.vocab_size
  if length == 0:
    raise errors.UserError('the prompt is empty; give at least one token')
  if length >= max_context:
    raise errors.UserError(
      f'the prompt has {length} tokens; {who} takes at most {max_context} '
      'tokens, prompt and output together'
    )
  for token_id in (min(request.token_ids), max(request.token_ids)):
    if not 0 <= token_id < vocab_size:
      raise errors.UserError(
        f'the prompt has token {token_id}; ids are 0 to {vocab_size - 1}'
      )
  request.sampling.check_vocabulary(vocab_size)
  if request.sampling.structured_outputs is not None:
    grammar.start(request.sampling.structured_outputs, target)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
  """News of one request.

  Attributes:
    index: number of the request in the list that was given.
    text: text that is certain now and was not in an earlier event.
    result: the whole answer, in the last event of the request; None before.
  """

  index: int
  text: str
  result: results.GenerationResult | None = None


class Source(enum.StrEnum):
  """Who proposed a token of an output; the target has approved all of them."""

  TARGET = 'target'  # nobody: it is the target's own
  DRAFT = 'draft'  # a draft model
  # A text; or a grammar, but for tokens among those of a model's chain. In
  # trees of both, before the model did.
  LOOKUP = 'lookup'


def source_of(by_model: bool) -> Source:
  """Returns who proposed a draft token."""
  return Source.DRAFT if by_model else Source.LOOKUP


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftNode:
  """A draft token that the target has verified.

  Attributes:
    token_id: token.
    parent: index of the node before it among those of its step, -1 after the
      last known token.
    source: who proposed it.
    prob: probability that the drafter gives to it and all nodes above it, None
      where it gives none.
    is_accepted: whether the target has chosen it, and all nodes above it.
  """

  token_id: int
  parent: int
  source: Source
  prob: float | None
  is_accepted: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
  """A token of an output, as people see it."""

  text: str  # that is certain since this token; it can be empty
  source: Source
