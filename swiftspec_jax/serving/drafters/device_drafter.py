"""Drafters that look at the texts on the target's devices.

They draft behind texts whose ends the host has not read, so that steps can be
enqueued ahead. How many tokens there were the host learns with the verdict.

Legend: B rows of a view, U slots, K longest draft.
"""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np

from swiftspec_jax import ahead_of_time, drafting, policies, types
from swiftspec_jax.serving.drafters.engine_drafter import (
  NothingToRead,
  SlotTexts,
)
from swiftspec_jax.step.ragged_batch import StepSizes
from swiftspec_jax.step.rows import Rows
from swiftspec_jax.step.slot_drafts import SlotDrafts
from swiftspec_jax.step.target import Target


@functools.partial(jax.jit, static_argnames=('drafter', 'max_length'))
def propose(
  rows: Rows,
  lengths: jax.Array,
  *,
  drafter: drafting.StatelessDrafter,
  max_length: int,
) -> tuple[jax.Array, jax.Array]:
  """Returns drafts behind the texts of all slots.

  Args:
    rows: texts of the slots.
    lengths: i32[U] tokens that are wanted.
    drafter: static drafter.
    max_length: K; static.

  Returns:
    Tokens i32[U, K], and how many of them there are, i32[U].
  """
  token_ids, found = drafter.propose(rows)
  found = jnp.minimum(found, lengths)
  token_ids = token_ids[:, :max_length]
  missing = max_length - token_ids.shape[1]
  token_ids = jnp.pad(token_ids, ((0, 0), (0, missing)))
  is_found = jnp.arange(max_length)[None] < found[:, None]
  # What is no token is not what the target chooses.
  return jnp.where(is_found, token_ids, types.PLACEHOLDER_TOKEN_ID), found


class DeviceDrafter(NothingToRead):
  """Asks a drafter of `swiftspec_jax.drafting` for chains."""

  has_programs = True
  runs_ahead = True

  def __init__(
    self, drafter: drafting.StatelessDrafter, max_length: int, target: Target
  ):
    """Allocates nothing.

    Args:
      drafter: drafter that needs neither parameters nor a state.
      max_length: K.
      target: target whose texts it reads.
    """
    self._drafter = drafter
    self._max_length = max_length
    self._target = target
    self._none_wanted = np.zeros(len(target.rows.lengths), np.int32)
    self._call = ahead_of_time.call

  @property
  def name(self) -> str:
    return repr(self._drafter)

  def draft(
    self, view: policies.StepView, lengths: np.ndarray, texts: SlotTexts
  ) -> SlotDrafts:
    del texts  # those on the devices go further
    wanted = self._none_wanted.copy()
    wanted[view.slots] = lengths
    token_ids, num_found = self._propose(wanted)
    return SlotDrafts(
      drafts=policies.Drafts(lengths=lengths),
      chains=token_ids,
      num_found=num_found,
    )

  def _propose(self, wanted: np.ndarray) -> tuple[jax.Array, jax.Array]:
    return self._call(
      propose,
      self._target.rows,
      self._target.argument(wanted),
      drafter=self._drafter,
      max_length=self._max_length,
    )

  def compiling(self) -> 'DeviceDrafter':
    twin = copy.copy(self)
    twin._target = self._target.compiling()
    twin._call = ahead_of_time.compile_only
    return twin

  def warm_up(self, flat: StepSizes) -> None:
    del flat  # it looks at all slots
    for num_devices in self._target.models:
      self._target.use(num_devices)
      self._propose(self._none_wanted)

  def trial(self, num_rows: int, num_known: int, length: int) -> None:
    del num_rows, num_known, length
    jax.block_until_ready(self._propose(self._none_wanted))
