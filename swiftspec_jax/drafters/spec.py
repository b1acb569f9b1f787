"""What a user names as the source of drafts, and what the engine asks of it."""

import dataclasses
from typing import ClassVar

from swiftspec_jax import errors
from swiftspec_jax.drafters.engine_drafter import EngineDrafter
from swiftspec_jax.models.model import Model
from swiftspec_jax.runtime import timeline as timeline_lib
from swiftspec_jax.step.program_sizes import ProgramSizes
from swiftspec_jax.step.target import Target

_LENGTH = 7  # draft tokens of a row, where nobody says how many


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
  """What a drafter is made for.

  Attributes:
    target: target of the engine.
    sizes: declared sizes.
    run_ahead: steps that are enqueued before one is read.
    timeline: timeline that notes when programs ran, if somebody wants one.
  """

  target: Target
  sizes: ProgramSizes
  run_ahead: int = 0
  timeline: timeline_lib.Timeline | None = None


class DraftSpec:
  """Base of the frozen dataclasses that name a source of drafts.

  Attributes:
    makes_trees: whether drafts are trees, not chains.
    needs_pages: whether it drafts in the pages of the target, so that slots
      have no rows.
  """

  makes_trees: ClassVar[bool] = False
  needs_pages: ClassVar[bool] = False

  @property
  def name(self) -> str:
    """What messages call it."""
    return type(self).__name__

  @property
  def own_length(self) -> int | None:
    """Most draft tokens of a row, if the spec says how many."""
    return None

  @property
  def default_length(self) -> int:
    """Most draft tokens of a row, if nobody says how many."""
    return _LENGTH

  def longest(self, given: int | None) -> int:
    """Returns the most draft tokens of a row, where nobody declares sizes.

    Args:
      given: number that the user has given, None for none.

    Raises:
      UserError: there is a number, and the spec has its own.
    """
    if given is not None and given < 1:
      raise errors.UserError(
        f'num_speculative_tokens must be at least 1, got {given}'
      )
    own = self.own_length
    if own is None:
      return given or self.default_length
    if given is not None:
      raise errors.UserError(
        f'num_speculative_tokens={given} is for drafts without a length of '
        f'their own, and the draft is {self!r}'
      )
    return own

  def num_forwards(self, length: int) -> int:
    """Returns the forwards for a draft of `length` tokens, or nodes.

    A lookup takes the same time whatever it finds, and persistent trees grow as
    they are told.
    """
    return 1

  def runs_ahead(self, target: Model) -> bool:
    """Returns whether steps are enqueued ahead, where nobody says how many."""
    return False

  @property
  def looks_up(self) -> bool:
    """Whether its drafts have lookups in them, which may stand in for it."""
    return False

  def model_for(self, target: Model) -> Model | None:
    """Returns the model that drafts for a target, None if none does.

    Raises:
      UserError: it has another vocabulary, lies on other devices, or reads
        features that the target does not have.
    """

  def make(self, setup: Setup) -> EngineDrafter:
    """Returns the drafter.

    Raises:
      UserError: the spec does not fit the target or the sizes.
    """
    raise NotImplementedError
