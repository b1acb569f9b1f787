"""The target's part of a tree round, pure: forward, verify, commit.

It needs nothing of the draft but the proposal, so the draft may lie on other
devices and grow its tree meanwhile.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from swiftspec_jax import sampling as sampling_lib
from swiftspec_jax import spec_step, types
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.cache import dense
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.drafting import Drafter
from swiftspec_jax.models import decoder
from swiftspec_jax.models.params import Params
from swiftspec_jax.verification import matching


@functools.partial(
  jax.jit,
  static_argnames=('config', 'num_nodes', 'feature_layers'),
  donate_argnames='state',
)
def verify_step(
  params: Params,
  state: types.DecodeState,
  proposal: jax.Array,
  *,
  config: ModelConfig,
  num_nodes: int,
  feature_layers: tuple[int, ...] = (),
) -> tuple[types.DecodeState, types.PackedVerified, types.StepOutput]:
  """Emits 1 to T tokens for each row that is below its limit.

  Args:
    params: parameters of the target.
    state: donated; its draft state is not used.
    proposal: a packed `TreeProposal`, whose root is the last known token. No
      row has more than T nodes. There may be room for more, and the results
      are padded to as many, so that the draft's programs do not depend on T.
    config: configuration of the target; static.
    num_nodes: T; static.
    feature_layers: static indices of layers whose outputs the draft reads.

  Returns:
    The state, what the draft has to follow, and what the host reads.
  """
  proposal = types.TreeProposal.unpack(proposal)
  max_nodes = proposal.token_ids.shape[1]
  proposal = proposal.first(num_nodes)
  is_chain = proposal.token_ids.shape[1] == 1
  ancestor_mask = tree_lib.ancestor_mask(proposal.parents)
  positions = state.lengths[:, None] + proposal.depths
  with jax.named_scope('target_forward'):
    hidden, features, cache = decoder.forward_with_features(
      params,
      config,
      jnp.maximum(proposal.token_ids, 0),
      state.target_cache,
      starts=state.target_cache.kv_lengths,
      positions=state.target_cache.kv_lengths[:, None] + proposal.depths,
      attention_mask=None if is_chain else ancestor_mask,
      feature_layers=feature_layers,
    )
    logits = decoder.unembed(params, config, hidden)
  with jax.named_scope('verify'):
    adjusted = sampling_lib.adjust_logits(
      logits,
      state.sampling,
      token_ids=state.token_ids,
      lengths=state.lengths,
      prompt_lengths=state.prompt_lengths,
      draft_token_ids=proposal.token_ids[:, 1:],
      depths=proposal.depths,
      ancestor_mask=ancestor_mask,
    )
    devices = {'kernels': config.kernels, 'sharding': cache.sharding}
    verdict, path = matching.verify_tree(
      proposal,
      ancestor_mask,
      matching.scores(adjusted, positions, state.sampling, **devices),
      **devices,
    )
    on_path = jnp.take_along_axis(logits, path[:, :, None], axis=1)
    logprobs = spec_step.logprobs_of(on_path, verdict.token_ids, state.sampling)
    verdict = verdict.replace(
      token_ids=_pad(verdict.token_ids, max_nodes, types.PLACEHOLDER_TOKEN_ID)
    )
  with jax.named_scope('commit'):
    num_emitted = spec_step.count_emitted(state, verdict)
    state = spec_step.append_tokens(state, verdict.token_ids, num_emitted)
    cache = (
      dense.extend(cache, num_emitted)
      if is_chain
      else dense.commit(cache, path, num_emitted, kernels=config.kernels)
    )
    state = state.replace(target_cache=cache)
  verified = types.VerifiedTokens(
    token_ids=verdict.token_ids, num_tokens=num_emitted
  )
  output = types.StepOutput.pack(
    num_emitted=num_emitted,
    proposal=proposal,
    verdict=verdict,
    logprobs=jax.tree.map(lambda x: _pad(x, max_nodes, 0), logprobs),
    path=_pad(path, max_nodes, 0),
  )
  if features is not None:
    features = jnp.take_along_axis(features, path[:, :, None], axis=1)
  return state, _pack_verified(verified, features, max_nodes), output


@functools.partial(
  jax.jit,
  static_argnames=('config', 'drafter', 'max_nodes', 'feature_layers'),
  donate_argnames='state',
)
def pause_step(
  params: Params,
  drafter_params: Any,
  state: types.DecodeState,
  *,
  config: ModelConfig,
  drafter: Drafter,
  max_nodes: int,
  feature_layers: tuple[int, ...] = (),
) -> tuple[types.DecodeState, types.PackedVerified, types.StepOutput]:
  """Emits tokens without the draft model: a step of plain decoding or lookup.

  Args:
    params: parameters of the target.
    drafter_params: parameters of the drafter.
    state: donated; its draft state is that of the drafter.
    config: configuration of the target; static.
    drafter: static drafter that proposes less than `max_nodes` tokens.
    max_nodes: static length to which the results are padded: that of the
      proposals of `verify_step`.
    feature_layers: same as in `verify_step`.

  Returns:
    As `verify_step`.
  """
  state, verified, features, output = spec_step.decode(
    params,
    drafter_params,
    state,
    config=config,
    drafter=drafter,
    feature_layers=feature_layers,
  )
  return state, _pack_verified(verified, features, max_nodes), output


def _pack_verified(verified, features, max_nodes):
  """Returns the `PackedVerified` of T tokens, padded to the most."""
  fill = types.PLACEHOLDER_TOKEN_ID
  verified = verified.replace(
    token_ids=_pad(verified.token_ids, max_nodes, fill)
  )
  if features is None:
    return verified.pack()
  # Rounding costs a little acceptance at most, and halves what travels.
  features = features.astype(jnp.bfloat16)
  return verified.pack(), _pad(features, max_nodes, 0)


def _pad(values, size, fill):
  """Pads [B, T, ...] to [B, size, ...]."""
  padding = [(0, 0)] * values.ndim
  padding[1] = (0, size - values.shape[1])
  return jnp.pad(values, padding, constant_values=fill)
