"""Chains: drafting and verifying are one program on the same devices."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from swiftspec_jax import buckets, spec_step, types
from swiftspec_jax import sharding as sharding_lib
from swiftspec_jax.config import SamplingParams
from swiftspec_jax.drafting import Drafter
from swiftspec_jax.drafting.texts.adaptive_lookup import AdaptiveLookup
from swiftspec_jax.model import Model
from swiftspec_jax.pipelines import step_timing
from swiftspec_jax.pipelines.target_rows import TargetRows
from swiftspec_jax.requests import Request


class ChainPipeline:
  """Plain decoding and chains of draft tokens."""

  def __init__(
    self, target: Model, drafter: Drafter, draft_params: Any, batch_size: int
  ):
    self._target = target
    self._drafter = drafter
    self._draft_params = draft_params
    self._measure_steps = functools.cache(self._measure_steps)
    self._rows = TargetRows(
      target,
      drafter,
      draft_params,
      batch_size=batch_size,
      num_query_tokens=drafter.num_speculative_tokens + 1,
    )

  @property
  def num_speculative_tokens(self) -> int:
    return self._drafter.num_speculative_tokens

  @property
  def capacity(self) -> int:
    return self._rows.capacity

  def prepare(self, limit: int, sampling: Sequence[SamplingParams]) -> None:
    self._rows.prepare(limit, sampling)
    if isinstance(self._drafter, AdaptiveLookup):
      self._draft_params = self._measure_steps(self.capacity)

  def admit(
    self,
    slot: int,
    request: Request,
    limit: int,
    chunks: Iterable[buckets.Chunk],
  ) -> None:
    self._rows.admit(slot, request, limit, chunks)
    jax.block_until_ready(self._rows.state)

  def stop(self, slot: int) -> None:
    self._rows.stop(slot)

  def warmup(self) -> None:
    # Of lookups that find something, and that do not.
    programs = {
      repeats: functools.partial(self._fill, repeats=repeats)
      for repeats in (True, False)
    }
    step_timing.warm_up(programs, self.capacity, self._state)
    self._rows.fill(0)

  def dispatch(self) -> types.StepOutput:
    self._rows.state, output = spec_step.decode_step(
      self._target.params,
      self._draft_params,
      self._rows.state,
      config=self._target.config,
      drafter=self._drafter,
    )
    return output

  def observe(
    self, reports: Mapping[int, types.StepReport], seconds: float | None
  ) -> None:
    del reports, seconds

  def _measure_steps(self, capacity: int) -> jax.Array:
    """Times steps of idle rows, which stay idle, by the length of the draft."""

    def prepare(length, num_known):
      self._draft_params = self._on_mesh(self._drafter.forcing(length))
      return self._fill(num_known)

    seconds = step_timing.median_seconds(
      {n: functools.partial(prepare, n) for n in self._drafter.lengths},
      capacity,
      self._state,
    )
    self._rows.fill(0)
    return self._on_mesh(np.array([*seconds.values()], np.float32))

  def _fill(
    self, num_known: int, *, repeats: bool = True
  ) -> Callable[[], types.StepOutput]:
    self._rows.fill(num_known, repeats=repeats)
    return self.dispatch

  def _state(self) -> types.DecodeState:
    return self._rows.state

  def _on_mesh(self, seconds: np.ndarray) -> jax.Array:
    return sharding_lib.replicate(seconds, self._target.mesh)
