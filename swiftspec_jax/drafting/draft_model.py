"""A small model that drafts a chain, token by token."""

import dataclasses

import jax
import jax.numpy as jnp

from swiftspec_jax import errors, types
from swiftspec_jax import prefill as prefill_lib
from swiftspec_jax import sampling as sampling_lib
from swiftspec_jax.cache import dense
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import decoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModel:
  """Proposes a chain drawn from the draft model's own distribution.

  Attributes:
    config: configuration of the draft model.
    dtype_name: name of the dtype of its weights and cache.
    num_speculative_tokens: tokens of a draft (K).
  """

  config: ModelConfig
  dtype_name: str
  num_speculative_tokens: int = 4

  def __post_init__(self):
    if self.config.block is not None:
      raise errors.UserError(
        'a draft of blocks drafts over pages; give its model to `ss.Decoder` '
        'or a PageEngine, alone or in a TreeDraft'
      )
    if self.config.reads_features:
      raise errors.UserError(
        'a draft that reads features of the target cannot draft chains in '
        'rows; give its model to `ss.Decoder`, or `tree` beside it'
      )
    is_valid = self.num_speculative_tokens >= 1
    errors.check_fields(
      self, {'num_speculative_tokens': (is_valid, 'at least 1')}
    )

  @property
  def lengths(self):
    return (self.num_speculative_tokens,)

  def init(self, batch_size, capacity, mesh):
    return dense.KVCacheConfig.of_model(
      self.config, batch_size, capacity, self.dtype_name
    ).init(mesh)

  def prefill(self, params, draft_state, token_ids, starts, num_kept, context):
    return prefill_lib.prefill_chunk(
      params,
      draft_state,
      token_ids,
      starts,
      num_kept,
      config=self.config,
      context=context,
    )

  def propose(self, params, state):
    """Drafts K tokens with K forwards.

    The first takes the last two known tokens: when all drafts of the step
    before were accepted, the cache lacks the row of the last of them.
    """
    starts = jnp.maximum(state.lengths - 2, 0)
    first_two = jnp.take_along_axis(
      state.token_ids, starts[:, None] + jnp.arange(2)[None], axis=1
    )
    hidden, cache = decoder.forward(
      params, self.config, first_two, state.draft_state, starts=starts
    )
    last = (state.lengths - 1 - starts)[:, None, None]
    hidden = jnp.take_along_axis(hidden, last, axis=1)
    num_tokens = self.num_speculative_tokens
    drafted = jnp.zeros((state.lengths.shape[0], num_tokens), jnp.int32)
    drafted, probs = self._choose(params, state, hidden, drafted, 0)

    def body(carry, step):
      drafted, cache = carry
      newest = jax.lax.dynamic_slice_in_dim(drafted, step - 1, 1, axis=1)
      hidden, cache = decoder.forward(
        params, self.config, newest, cache, starts=state.lengths + step - 1
      )
      drafted, probs = self._choose(params, state, hidden, drafted, step)
      return (drafted, cache), probs

    (drafted, cache), later_probs = jax.lax.scan(
      body, (drafted, cache), jnp.arange(1, num_tokens)
    )
    if probs is not None:
      probs = jnp.concatenate([probs[None], later_probs])
      probs = jnp.moveaxis(probs[:, :, 0], 0, 1)
    proposal = types.Proposal(
      token_ids=drafted,
      num_drafted=jnp.full_like(state.lengths, num_tokens),
      probs=probs,
    )
    return proposal, cache

  def _choose(self, params, state, hidden, drafted, step):
    """Draws draft token `step`; returns all, and its distribution [B, 1, V]."""
    batch = jnp.arange(drafted.shape[0])[:, None]
    drafts = jnp.arange(drafted.shape[1])[None]
    history = state.token_ids.at[batch, state.lengths[:, None] + drafts].set(
      drafted, mode='drop'
    )
    logits = decoder.unembed(params, self.config, hidden)
    logits = sampling_lib.adjust_logits(
      decoder.widen_logits(params, self.config, logits),
      state.sampling,
      token_ids=history,
      lengths=state.lengths + step,
      prompt_lengths=state.prompt_lengths,
      draft_token_ids=drafted[:, :0],
    )
    if state.sampling.temperatures is None:
      token, probs = jnp.argmax(logits, axis=-1).astype(jnp.int32), None
    else:
      law = sampling_lib.law_logits(
        logits,
        state.sampling,
        kernels=self.config.kernels,
        sharding=state.draft_state.sharding,
      )
      keys = sampling_lib.position_keys(
        state.sampling.seeds,
        (state.lengths + step)[:, None],
        sampling_lib.Stream.DRAFT,
      )
      token, probs = sampling_lib.draw(law, keys), jax.nn.softmax(law, axis=-1)
    return (
      jax.lax.dynamic_update_slice_in_dim(drafted, token, step, axis=1),
      probs,
    )
