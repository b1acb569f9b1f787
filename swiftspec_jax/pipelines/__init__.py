"""What runs on the devices for a batch of rows, behind one interface."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from swiftspec_jax import buckets, types
from swiftspec_jax.config import SamplingParams
from swiftspec_jax.requests import Request


class Pipeline(Protocol):
  """Holds the device states of B rows and enqueues the rounds on them."""

  @property
  def num_speculative_tokens(self) -> int:
    """Most draft tokens that a round can accept."""

  @property
  def capacity(self) -> int:
    """Rows of the target's cache; 0 before `prepare`."""

  def prepare(self, limit: int, sampling: Sequence[SamplingParams]) -> None:
    """Makes all rows idle, with room for `limit` tokens each.

    Allocates, unless the arrays of the last call are large enough.

    Args:
      limit: most tokens of prompt and output together.
      sampling: parameters of the requests to come. The programs of a round are
        compiled for what these use; `admit` widens that for others.
    """

  def admit(
    self,
    slot: int,
    request: Request,
    limit: int,
    chunks: Iterable[buckets.Chunk],
  ) -> None:
    """Prefills a request on its own and puts it into row `slot`; waits."""

  def stop(self, slot: int) -> None:
    """Makes row `slot` idle from the next round on; does not wait."""

  def warmup(self) -> None:
    """Runs every program of a round once, and waits."""

  def dispatch(self) -> types.StepOutput:
    """Enqueues one round; does not wait for its output."""

  def observe(
    self, reports: Mapping[int, types.StepReport], seconds: float | None
  ) -> None:
    """Learns what became of a round.

    Args:
      reports: report of each busy row.
      seconds: time since the round before; None where it did more than that.
    """
