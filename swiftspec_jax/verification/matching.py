"""Sample and match: a draft token stands if the target chooses the same.

The target chooses a token behind every node, by itself: its best one, or one
drawn with noise that belongs to the position. A draft token is accepted if it
is the choice behind its parent. So the output is what plain decoding with the
same noise gives, token for token, whoever drafted. Exact for drafts that were
not drawn at random; the scheme of SpecExec (arXiv 2406.02532).
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from kernels_pallas import dispatch
from kernels_pallas.verification import api
from kernels_pallas.vocabulary import largest
from swiftspec_jax import sampling as sampling_lib
from swiftspec_jax import types


def choose(
  logits: jax.Array,
  positions: jax.Array,
  sampling: sampling_lib.SamplingState,
  *,
  kernels: str = dispatch.REFERENCE,
  sharding: NamedSharding | None = None,
) -> jax.Array:
  """Returns the target's choice i32[B, T] behind each query.

  The arguments are those of `scores`.
  """
  found = scores(
    logits, positions, sampling, kernels=kernels, sharding=sharding
  )
  return largest.argmax(found).astype(jnp.int32)


def scores(
  logits: jax.Array,
  positions: jax.Array,
  sampling: sampling_lib.SamplingState,
  *,
  kernels: str = dispatch.REFERENCE,
  sharding: NamedSharding | None = None,
) -> jax.Array:
  """Returns f32[B, T, V] whose highest is the target's choice.

  Args:
    logits: f32[B, T, V] of the target, adjusted.
    positions: i32[B, T] of the tokens that are chosen.
    sampling: sampling parameters of the rows.
    kernels: static name, one of `kernels_pallas.dispatch.IMPLEMENTATIONS`.
    sharding: static sharding of any array on the same devices.
  """
  if sampling.temperatures is None:
    return logits
  keys = sampling_lib.position_keys(
    sampling.seeds, positions, sampling_lib.Stream.OUTPUT
  )
  law = sampling_lib.law_logits(
    logits, sampling, kernels=kernels, sharding=sharding
  )
  return sampling_lib.perturb(law, keys)


def verify(proposal: types.Proposal, choices: jax.Array) -> types.Verdict:
  """Verifies a chain.

  Args:
    proposal: K draft tokens for each row.
    choices: i32[B, K + 1] of the target.
  """
  matches = proposal.token_ids == choices[:, :-1]
  num_accepted = count_accepted(matches, proposal.num_drafted)
  # Accepted tokens equal the choices, so the output is a prefix of them.
  is_output = jnp.arange(choices.shape[1])[None] <= num_accepted[:, None]
  return types.Verdict(
    token_ids=jnp.where(is_output, choices, types.PLACEHOLDER_TOKEN_ID),
    num_accepted=num_accepted,
  )


def verify_tree(
  proposal: types.TreeProposal,
  ancestor_mask: jax.Array,
  token_scores: jax.Array,
  *,
  kernels: str = 'auto',
  sharding: NamedSharding | None = None,
) -> tuple[types.Verdict, jax.Array]:
  """Verifies a tree.

  Args:
    proposal: T nodes for each row, the root among them.
    ancestor_mask: bool[B, T, T] of its parents.
    token_scores: f32[B, T, V] of `scores`, behind each node.
    kernels: static name, one of `kernels_pallas.dispatch.IMPLEMENTATIONS`.
    sharding: static sharding of any array on the same devices.

  Returns:
    The verdict, and the path i32[B, T]: the indices of root and accepted
    nodes, then zeros.
  """
  token_ids, num_accepted, path = api.verify_tree(
    token_scores,
    proposal.token_ids,
    proposal.parents,
    proposal.size,
    ancestor_mask,
    implementation=kernels,
    sharding=sharding,
  )
  return types.Verdict(token_ids=token_ids, num_accepted=num_accepted), path


def count_accepted(accepts: jax.Array, num_drafted: jax.Array) -> jax.Array:
  """Length of the run of True from the first draft token on.

  Args:
    accepts: bool[B, K].
    num_drafted: i32[B] draft tokens that count.

  Returns:
    i32[B].
  """
  is_drafted = jnp.arange(accepts.shape[1])[None] < num_drafted[:, None]
  run = jnp.cumprod((accepts & is_drafted).astype(jnp.int32), axis=1)
  return run.sum(axis=1)
