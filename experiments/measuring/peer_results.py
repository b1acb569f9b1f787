"""What all peers report of a request, from when their tokens came."""

import dataclasses

import numpy as np

import swiftspec_jax as ss
from swiftspec_jax import results


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
  """What a peer did for a request, round by round.

  The first round reads the prompt.

  Attributes:
    start: time at which the request began, in seconds.
    times: times at which the tokens of each round were there, in seconds.
    sizes: number of tokens that each round gave.
    drafted: number of tokens that were drafted for each round.
  """

  start: float
  times: np.ndarray
  sizes: np.ndarray
  drafted: np.ndarray


def make_result(
  target: ss.Model,
  request: ss.Request,
  token_ids: tuple[int, ...],
  rounds: Rounds,
  num_positions: int,
) -> ss.GenerationResult:
  """Returns the result of a request.

  Args:
    target: our own model, for its tokenizer.
    request: request with its prompt as token ids.
    token_ids: tokens of the output, at least one.
    rounds: rounds that gave them.
    num_positions: most tokens that can be drafted for a round.
  """
  return ss.GenerationResult(
    text=target.tokenizer.decode(token_ids, skip_special_tokens=True),
    token_ids=token_ids,
    finish_reason='stop'
    if token_ids[-1] in ends_of(target, request)
    else 'length',
    logprobs=None,
    top_logprobs=None,
    stats=_stats(
      rounds.drafted,
      accepted=rounds.sizes - 1,
      num_positions=num_positions,
      prompt_tokens=len(request.token_ids),
      ttft_seconds=float(rounds.times[0] - rounds.start),
      decode_seconds=float(rounds.times[-1] - rounds.times[0]),
      latency_seconds=float(rounds.times[-1] - rounds.start),
    ),
  )


def ends_of(target: ss.Model, request: ss.Request) -> tuple[int, ...]:
  """Returns the tokens that end the output."""
  return () if request.sampling.ignore_eos else target.config.eos_token_ids


def _stats(
  drafted: np.ndarray,
  accepted: np.ndarray,
  num_positions: int,
  **fields: int | float,
) -> results.GenerationStats:
  """Returns statistics from the draft tokens of each round."""
  positions = np.arange(num_positions)
  new_tokens = int((accepted + 1).sum())
  return results.GenerationStats(
    new_tokens=new_tokens,
    decoded_tokens=new_tokens - int(accepted[0]) - 1,
    num_rounds=len(accepted),
    num_drafted=int(drafted.sum()),
    num_accepted=int(accepted.sum()),
    chosen_lengths=tuple(
      np.bincount(drafted, minlength=num_positions + 1).tolist()
    ),
    drafted_per_position=tuple(
      (drafted[:, None] > positions).sum(axis=0).tolist()
    ),
    accepted_per_position=tuple(
      (accepted[:, None] > positions).sum(axis=0).tolist()
    ),
    **fields,
  )
