"""The target on its devices: its paged cache, and the forwards of steps.

Legend: N tokens, M queries, B slots, S tokens of the longest text, K longest
draft, V vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swiftspec_jax import sharding
from swiftspec_jax.cache import paged
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.model import Model
from swiftspec_jax.models.params import Params
from swiftspec_jax.serving import choices, paged_forward
from swiftspec_jax.serving.program_sizes import ProgramSizes
from swiftspec_jax.serving.step_input import StepInput


@functools.partial(jax.jit, static_argnames='config', donate_argnames='cache')
def query_logits(
  params: Params,
  cache: paged.PagedCache,
  step_input: StepInput,
  drafted: jax.Array,
  *,
  config: ModelConfig,
) -> tuple[paged.PagedCache, jax.Array, jax.Array]:
  """Returns the cache, logits f32[M, V] and token ids i32[M] of the queries.

  Args:
    params: of the target.
    cache: donated.
    step_input: what is fed.
    drafted: i32[B, K].
    config: static.
  """
  token_ids = step_input.token_ids
  if drafted.size:
    index = step_input.draft_index
    drafts = drafted.reshape(-1)[jnp.maximum(index, 0)]
    token_ids = jnp.where(index >= 0, drafts, token_ids)
  hidden, cache = paged_forward.forward(
    params, config, token_ids, step_input.batch, cache
  )
  hidden = hidden[step_input.query_index]
  logits = paged_forward.logits_of(params, config, hidden)
  return cache, logits, token_ids[step_input.query_index]


class Target:
  """Runs the target's part of steps.

  Attributes:
    sampling: of the slots.
  """

  def __init__(self, model: Model, sizes: ProgramSizes):
    """Allocates the cache."""
    self._model = model
    config = sizes.scheduler
    self._cache = paged.init(
      model.config,
      config.num_pages,
      config.page_size,
      model.dtype,
      model.mesh,
    )
    self._replicated = sharding.replicated(model.mesh)
    self.sampling = choices.SlotSampling(
      config.buckets.max_rows, model.config.vocab_size, self.put
    )

  def put(self, tree: Any) -> Any:
    """Returns host arrays on the devices."""
    return jax.device_put(tree, self._replicated)

  def dispatch(
    self,
    step_input: StepInput,
    drafted: jax.Array,
    level: choices.Level,
    texts: np.ndarray,
  ) -> tuple[jax.Array, jax.Array | None]:
    """Enqueues a step; does not wait for it.

    Args:
      step_input: what is fed.
      drafted: i32[B, K] on the devices.
      level: of sampling.
      texts: i32[B, S] known tokens; only the highest level looks at them.

    Returns:
      Numbers and tokens, and log-probabilities, as `choices.verify` does.
    """
    step_input = self.put(step_input)
    self._cache, logits, token_ids = query_logits(
      self._model.params,
      self._cache,
      step_input,
      drafted,
      config=self._model.config,
    )
    sampling, noise = self.sampling.state(level), None
    if level != choices.Level.GREEDY:
      noise = choices.make_noise(
        sampling.seeds,
        step_input.queries.slots,
        step_input.queries.positions,
        vocab_size=self._model.config.vocab_size,
      )
    return choices.verify(
      logits,
      noise,
      token_ids,
      step_input.queries,
      drafted,
      sampling,
      self.put(texts) if level == choices.Level.ADJUSTED else None,
      kernels=self._model.config.kernels,
      sharding=self._replicated,
    )
