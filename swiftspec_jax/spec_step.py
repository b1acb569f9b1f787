"""One decoding step, pure: draft, target forward, verify, commit.

Plain decoding is the step whose drafter proposes nothing.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from swiftspec_jax import sampling as sampling_lib
from swiftspec_jax import types, verification
from swiftspec_jax.cache import dense
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.control_flow import run_if
from swiftspec_jax.drafting import Drafter
from swiftspec_jax.models import decoder
from swiftspec_jax.models.params import Params
from swiftspec_jax.step import rows as rows_lib
from swiftspec_jax.step import verify as verify_lib


@functools.partial(
  jax.jit, static_argnames=('config', 'drafter'), donate_argnames='state'
)
def decode_step(
  target_params: Params,
  draft_params: Any,
  state: types.DecodeState,
  *,
  config: ModelConfig,
  drafter: Drafter,
) -> tuple[types.DecodeState, types.StepOutput]:
  """Emits 1 to K + 1 tokens for each row that is below its limit.

  Args:
    target_params: parameters of the target.
    draft_params: parameters of the drafter; None where it has none.
    state: donated.
    config: configuration of the target; static.
    drafter: static drafter.
  """
  with jax.named_scope('draft'):
    proposal, draft_state = drafter.propose(draft_params, state)
  state = state.replace(draft_state=draft_state)
  verify = functools.partial(_verify, target_params, config, state)
  if len(drafter.lengths) > 1:
    verify = functools.partial(_verify_shortest, verify, drafter.lengths)
  cache, verdict, features, logprobs = verify(state.target_cache, proposal)
  with jax.named_scope('commit'):
    num_emitted = count_emitted(state, verdict)
    state = rows_lib.append_tokens(state, verdict.token_ids, num_emitted)
    cache = dense.write_features(cache, features, cache.kv_lengths)
    state = state.replace(target_cache=dense.extend(cache, num_emitted))
  output = types.StepOutput.pack(
    num_emitted=num_emitted,
    proposal=proposal,
    verdict=verdict,
    logprobs=logprobs,
  )
  return state, output


def _verify(params, config, state, cache, proposal):
  """Target forward over root and drafts, and the verdict."""
  root = jnp.take_along_axis(
    state.token_ids, jnp.maximum(state.lengths[:, None] - 1, 0), axis=1
  )
  token_ids = jnp.concatenate([root, proposal.token_ids], axis=1)
  with jax.named_scope('target_forward'):
    hidden, features, cache = decoder.forward_with_features(
      params,
      config,
      token_ids,
      cache,
      starts=cache.kv_lengths,
      feature_layers=cache.feature_layers,
    )
    logits = decoder.unembed(params, config, hidden)
  with jax.named_scope('verify'):
    adjusted = sampling_lib.adjust_logits(
      logits,
      state.sampling,
      token_ids=state.token_ids,
      lengths=state.lengths,
      prompt_lengths=state.prompt_lengths,
      draft_token_ids=proposal.token_ids,
    )
    positions = state.lengths[:, None] + jnp.arange(token_ids.shape[1])[None]
    verdict = verification.verify(
      proposal,
      adjusted,
      positions,
      state.sampling,
      kernels=config.kernels,
      sharding=cache.sharding,
    )
  logprobs = verify_lib.logprobs_of(logits, verdict.token_ids, state.sampling)
  return cache, verdict, features, logprobs


def _verify_shortest(verify, lengths, cache, proposal):
  """Verifies drafts in the shortest step that has room for all of them."""
  num_tokens = proposal.token_ids.shape[1]

  def step(length, cache):
    part = proposal.replace(token_ids=proposal.token_ids[:, :length])
    cache, verdict, *others = verify(cache, part)

    def widen(x, fill):
      padding = [(0, 0)] * x.ndim
      padding[1] = (0, num_tokens - length)
      return jnp.pad(x, padding, constant_values=fill)

    token_ids = widen(verdict.token_ids, types.PLACEHOLDER_TOKEN_ID)
    others = jax.tree.map(lambda x: widen(x, 0), others)
    return cache, verdict.replace(token_ids=token_ids), *others

  shapes = jax.eval_shape(functools.partial(step, lengths[-1]), cache)[1:]
  empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  carry = (cache, *empty)
  longest = jnp.max(proposal.num_drafted)
  shorter = -1
  for length in lengths:
    carry = run_if(
      (longest > shorter) & (longest <= length),
      lambda carry, length=length: step(length, carry[0]),
      carry,
    )
    shorter = length
  return carry


def count_emitted(
  state: types.DecodeState, verdict: types.Verdict
) -> jax.Array:
  """Returns i32[B], the verified tokens for which a row has room."""
  room = jnp.maximum(state.max_lengths - state.lengths, 0)
  return jnp.minimum(verdict.num_accepted + 1, room)
