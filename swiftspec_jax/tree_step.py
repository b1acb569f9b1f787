"""The target's part of a tree round, pure: forward, verify, commit.

It needs nothing of the draft but the proposal, so the draft may lie on other
devices and grow its tree meanwhile.
"""

import functools

import jax
import jax.numpy as jnp

from swiftspec_jax import sampling as sampling_lib
from swiftspec_jax import spec_step, types
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.cache import dense
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import decoder
from swiftspec_jax.models.params import Params
from swiftspec_jax.step import rows as rows_lib
from swiftspec_jax.step import verify as verify_lib
from swiftspec_jax.verification import matching


@functools.partial(
  jax.jit, static_argnames=('config', 'num_nodes'), donate_argnames='state'
)
def verify_step(
  params: Params,
  state: types.DecodeState,
  proposal: jax.Array,
  *,
  config: ModelConfig,
  num_nodes: int,
) -> tuple[types.DecodeState, types.StepOutput]:
  """Emits 1 to T tokens for each row that is below its limit.

  Args:
    params: parameters of the target.
    state: donated; its draft state is not used.
    proposal: a packed `TreeProposal`, whose root is the last known token. No
      row has more than T nodes. There may be room for more, and the results
      are padded to that number.
    config: configuration of the target; static.
    num_nodes: T; static.

  Returns:
    The state, and what the host reads.
  """
  proposal = types.TreeProposal.unpack(proposal)
  max_nodes = proposal.token_ids.shape[1]
  proposal = proposal.first(num_nodes)
  is_chain = proposal.token_ids.shape[1] == 1
  ancestor_mask = tree_lib.ancestor_mask(proposal.parents)
  with jax.named_scope('target_forward'):
    cache = state.target_cache
    hidden, features, cache = decoder.forward_with_features(
      params,
      config,
      jnp.maximum(proposal.token_ids, 0),
      cache,
      starts=cache.kv_lengths,
      positions=cache.kv_lengths[:, None] + proposal.depths,
      attention_mask=None if is_chain else ancestor_mask,
      feature_layers=cache.feature_layers,
    )
    logits = decoder.unembed(params, config, hidden)
  with jax.named_scope('verify'):
    verdict, path = matching.verify_tree(
      proposal,
      ancestor_mask,
      _scores(config, state, proposal, ancestor_mask, logits),
      kernels=config.kernels,
      sharding=cache.sharding,
    )
    on_path = jnp.take_along_axis(logits, path[:, :, None], axis=1)
    logprobs = verify_lib.logprobs_of(
      on_path, verdict.token_ids, state.sampling
    )
    verdict = verdict.replace(
      token_ids=_pad(verdict.token_ids, max_nodes, types.PLACEHOLDER_TOKEN_ID)
    )
  with jax.named_scope('commit'):
    num_emitted = spec_step.count_emitted(state, verdict)
    state = rows_lib.append_tokens(state, verdict.token_ids, num_emitted)
    if features is not None:
      on_path = jnp.take_along_axis(features, path[:, :, None], axis=1)
      cache = dense.write_features(cache, on_path, cache.kv_lengths)
    cache = (
      dense.extend(cache, num_emitted)
      if is_chain
      else dense.commit(cache, path, num_emitted, kernels=config.kernels)
    )
    state = state.replace(target_cache=cache)
  output = types.StepOutput.pack(
    num_emitted=num_emitted,
    proposal=proposal,
    verdict=verdict,
    logprobs=jax.tree.map(lambda x: _pad(x, max_nodes, 0), logprobs),
    path=_pad(path, max_nodes, 0),
  )
  return state, output


def _scores(config, state, proposal, ancestor_mask, logits):
  """Returns f32[B, T, V] whose highest is the choice behind each node."""
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
  return matching.scores(
    adjusted,
    state.lengths[:, None] + proposal.depths,
    state.sampling,
    kernels=config.kernels,
    sharding=state.target_cache.sharding,
  )


def _pad(values, size, fill):
  """Pads [B, T, ...] to [B, size, ...]."""
  padding = [(0, 0)] * values.ndim
  padding[1] = (0, size - values.shape[1])
  return jnp.pad(values, padding, constant_values=fill)
