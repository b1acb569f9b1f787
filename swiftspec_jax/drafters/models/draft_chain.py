"""A draft model that drafts chains for the rows of an engine.

Its keys and values of a draft lie after those of the known tokens; what is
accepted is not fed again, but to a draft that reads features: those of the
target come with the verdict.

Legend: B rows of a view, R rows, U slots, K longest draft, V vocabulary, V'
of it what the draft can propose, E embed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.drafters.models.draft_forward import (
  DraftRows,
  feed,
  noise_of_outputs,
)
from swiftspec_jax.drafters.models.model_drafter import ModelDrafter
from swiftspec_jax.models import decoder
from swiftspec_jax.models.cache import paged
from swiftspec_jax.models.params import Params
from swiftspec_jax.step import sampling as sampling_lib
from swiftspec_jax.step import verify


@functools.partial(
  jax.jit, static_argnames=('config', 'length'), donate_argnames='cache'
)
def chains(
  params: Params,
  cache: paged.PagedCache,
  hidden: jax.Array,
  logits: jax.Array,
  noise: jax.Array | None,
  rows: DraftRows,
  num_steps: jax.Array,
  sampling: sampling_lib.SamplingState,
  *,
  config: ModelConfig,
  length: int,
) -> tuple[paged.PagedCache, jax.Array]:
  """Drafts chains, a forward for each token after the first.

  Args:
    params: parameters of the draft.
    cache: donated.
    hidden: [R, E] of the last known tokens.
    logits: f32[R, V'] of the first draft tokens.
    noise: f32[R, K, V] of the target, None where all slots are greedy.
    rows: rows to draft for.
    num_steps: i32[] forwards.
    sampling: sampling parameters of the U slots.
    config: configuration of the draft; static.
    length: K; static.

  Returns:
    The cache, and the drafts i32[U, K].
  """
  num_slots = sampling.seeds.shape[0]
  noise = noise_of_outputs(params, config, noise)

  def choose(logits, step):
    own = None if noise is None else noise[:, step][:, None]
    scores = verify.draft_scores(logits[:, None], own, rows.slots, sampling)
    index = jnp.argmax(scores[:, 0], axis=-1).astype(jnp.int32)
    return decoder.token_ids_of(params, config, index)

  first = choose(logits, 0)
  # Padding belongs to no slot.
  targets = jnp.where(rows.lengths > 0, rows.slots, num_slots)
  drafted = jnp.zeros((num_slots, length), jnp.int32)
  drafted = drafted.at[targets, 0].set(first, mode='drop')

  def body(step, carry):
    cache, hidden, newest, drafted = carry
    # The last token of a draft has no page: it is not fed.
    is_fed = step + 1 < rows.lengths
    hidden, cache, logits = feed(
      params,
      config,
      cache,
      newest,
      rows.positions[:, step],
      is_fed,
      rows,
      hidden if config.reads_features else None,
    )
    newest = choose(logits, step + 1)
    drafted = drafted.at[targets, step + 1].set(newest, mode='drop')
    return cache, hidden, newest, drafted

  cache, _, _, drafted = jax.lax.fori_loop(
    0, num_steps, body, (cache, hidden, first, drafted)
  )
  return cache, drafted


class ChainDrafter(ModelDrafter):
  """Chains: a forward for each token."""

  @property
  def _num_forwards(self) -> int:
    return self._sizes.scheduler.buckets.max_length

  def commit(
    self,
    view: policies.StepView,
    drafted: np.ndarray,
    verified: np.ndarray,
    accepted: np.ndarray,
    is_present: np.ndarray,
  ) -> None:
    if self._model.config.reads_features:
      return
    # The last token of a draft was not fed.
    kept = np.minimum(accepted, np.maximum(drafted - 1, 0))
    self._draft_prefill.keep(view, kept)

  def _num_steps(self, length: int) -> int:
    return length - 1

  def _propose(
    self, hidden, logits, noise, rows, num_steps, sampling
  ) -> jax.Array:
    self.cache, drafted = self._call(
      chains,
      self._model.params,
      self.cache,
      hidden,
      logits,
      noise,
      rows,
      num_steps,
      sampling,
      config=self._model.config,
      length=self._num_forwards,
    )
    return drafted
