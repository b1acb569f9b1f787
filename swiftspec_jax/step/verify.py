"""What the target chooses after its queries, and what stands of the drafts.

The method is sample and match, the scheme of SpecExec (arXiv 2406.02532): the
target chooses a token after every node, its best one, or one drawn with noise
that belongs to the request's seed and the position. A draft token is accepted
if it is the choice after its parent. So a request has the same output whatever
it shares its steps with, whatever was drafted for it, and whether or not it was
preempted.

Every query is a row of its own here, so rows of different lengths need no
padding.

Legend: M queries, T queries of the longest draft, K = T - 1, B slots, S tokens
of the longest text, R rows, W tokens of each, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding

from kernels_pallas.verification import api, reference
from kernels_pallas.vocabulary import largest
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.step import rows as rows_lib
from swiftspec_jax.step import sampling as sampling_lib
from swiftspec_jax.step.rows import Rows
from swiftspec_jax.step.slot_trees import SlotTrees
from swiftspec_jax.step.verdicts import TreePart, Verdicts
from swiftspec_jax.tree import types

_LEAST_LOGIT = -1e30  # whose exponential is 0, and that a temperature divides


@struct.dataclass(frozen=True, kw_only=True)
class Queries:
  """Tokens after which the target chooses."""

  slots: jax.Array  # i32[M]
  positions: jax.Array  # i32[M, 1] of the tokens that are chosen
  index: jax.Array  # i32[B, T] the queries of each slot, among the M
  num_drafted: jax.Array  # i32[B] draft tokens to verify
  is_sampled: jax.Array  # bool[B] slots that emit tokens
  # Whether the M are W for each slot, in the order of the slots.
  is_in_order: bool = struct.field(pytree_node=False, default=False)

  @property
  def is_node(self) -> jax.Array:
    """bool[B, T]: which queries of the slots belong to a draft."""
    num_drafted = self.num_drafted[:, None]
    nodes = jnp.arange(self.index.shape[1])[None]
    return (nodes <= num_drafted) & (num_drafted > 0)

  @property
  def nodes(self) -> jax.Array:
    """i32[M]: which node of its slot each is; 0 where it is none."""
    nodes = jnp.broadcast_to(
      jnp.arange(self.index.shape[1])[None], self.index.shape
    )
    num_queries = len(self.slots)
    index = jnp.where(self.is_node, self.index, num_queries)
    return jnp.zeros(num_queries, jnp.int32).at[index].set(nodes, mode='drop')


@functools.partial(jax.jit, static_argnames='vocab_size')
def make_noise(
  seeds: jax.Array, slots: jax.Array, positions: jax.Array, *, vocab_size: int
) -> jax.Array:
  """Returns the noise f32[M, T, V] of the tokens at some positions.

  A program of its own, as it takes longer to compile than all that use it.

  Args:
    seeds: u32[B] of the slots.
    slots: i32[M].
    positions: i32[M, T].
    vocab_size: V; static.
  """
  keys = sampling_lib.position_keys(
    seeds[slots], positions, sampling_lib.Stream.OUTPUT
  )
  return sampling_lib.gumbel_noise(keys, vocab_size)


@functools.partial(jax.jit, donate_argnames='logits')
def restrict(
  logits: jax.Array, queries: Queries, masks: jax.Array, index: jax.Array
) -> jax.Array:
  """Returns logits f32[M, V] that are -inf where grammars forbid tokens.

  Args:
    logits: f32[M, V]; donated.
    queries: rows and places of the queries.
    masks: i32[M, W] bits of tokens that may come; the lowest bit of the first
      word is that of token 0.
    index: i32[B, T] masks after the nodes of the slots; -1 for none.
  """
  index = index[queries.slots, queries.nodes]
  words = masks[index]
  bits = (words[:, :, None] >> jnp.arange(32)[None, None]) & 1
  is_allowed = bits.reshape(len(words), -1)[:, : logits.shape[1]] > 0
  is_allowed |= (index < 0)[:, None]
  # A model may give no probability to anything that is allowed.
  return jnp.where(is_allowed, jnp.maximum(logits, _LEAST_LOGIT), -jnp.inf)


@functools.partial(
  jax.jit,
  static_argnames=('reads_texts', 'kernels', 'sharding'),
  donate_argnames='rows',
)
def verify(
  logits: jax.Array,
  noise: jax.Array | None,
  token_ids: jax.Array,
  queries: Queries,
  drafted: jax.Array,
  sampling: sampling_lib.SamplingState,
  rows: Rows,
  trees: SlotTrees | None,
  *,
  reads_texts: bool,
  kernels: str,
  sharding: NamedSharding,
) -> tuple[Rows, jax.Array, types.Logprobs | None]:
  """Verifies drafts, and appends what stands to the texts.

  Args:
    logits: f32[M, V] logits of the target.
    noise: f32[M, 1, V] Gumbel noise, None where all slots are greedy.
    token_ids: i32[M] tokens of the queries.
    queries: rows and places of the queries.
    drafted: i32[B, K'] draft tokens, at least K if any are verified.
    sampling: sampling parameters of the slots.
    rows: texts of the slots; donated.
    trees: trees of the drafts; None where they are chains.
    reads_texts: whether the sampling looks at the texts; static.
    kernels: static name, one of `kernels_pallas.dispatch.IMPLEMENTATIONS`.
    sharding: static sharding of any array on the same devices.

  Returns:
    The texts; the packed `Verdicts` of the B slots; and the log-probabilities
    at the tokens, or None.
  """
  verdicts, logprobs = _judge(
    logits,
    noise,
    token_ids,
    queries,
    drafted,
    sampling,
    rows if reads_texts else None,
    trees,
    devices={'kernels': kernels, 'sharding': sharding},
  )
  num_emitted = jnp.minimum(verdicts.num_accepted + 1, rows.room)
  rows = rows_lib.append_tokens(
    rows,
    verdicts.token_ids,
    jnp.where(queries.is_sampled, num_emitted, 0),
  )
  return rows, verdicts.pack(), logprobs


def _judge(
  logits, noise, token_ids, queries, drafted, sampling, rows, trees, devices
):
  """Returns what `verify` packs; with `rows` its sampling reads texts."""
  slots, positions = queries.slots, queries.positions[:, 0]
  own = jax.tree.map(lambda x: x[slots], sampling)
  adjusted = logits[:, None]
  if rows is not None:
    texts = rows.token_ids
    # Drafts are part of the text that the queries after them look at.
    if trees is None:
      texts = texts.at[slots, positions - 1].set(token_ids)[slots]
    else:
      texts = _texts_behind(texts, queries, drafted, trees)
    adjusted = sampling_lib.adjust_logits(
      adjusted,
      own,
      token_ids=texts,
      lengths=positions,
      prompt_lengths=rows.prompt_lengths[slots],
    )
  scores = adjusted
  if noise is not None:
    scores = sampling_lib.distribution_logits(adjusted, own, **devices) + noise
  scores = scores[:, 0]
  if trees is None:
    choices = largest.argmax(scores).astype(jnp.int32)
    verdicts = _verify_chains(choices, queries, drafted)
  else:
    verdicts, choices = _verify_trees(scores, queries, drafted, trees, devices)
  logprobs = None
  if own.with_logprobs:
    logprobs = types.Logprobs.at(
      logits[:, None], choices[:, None], own.num_top_logprobs
    )
  index = queries.index
  if trees is not None:
    index = jnp.take_along_axis(index, verdicts.tree.path, axis=1)
  return verdicts, jax.tree.map(lambda x: x[:, 0][index], logprobs)


def _verify_chains(choices, queries, drafted):
  """Returns the verdicts on chains, with choices i32[M]."""
  choices = choices[queries.index]
  places = jnp.arange(choices.shape[1] - 1)[None]
  matches = drafted[:, : choices.shape[1] - 1] == choices[:, :-1]
  matches &= places < queries.num_drafted[:, None]
  return Verdicts(
    num_accepted=matches.cumprod(axis=1).sum(axis=1, dtype=jnp.int32),
    num_levels=queries.num_drafted,
    token_ids=choices,  # accepted tokens equal them
    tree=None,
  )


def _verify_trees(scores, queries, drafted, trees, devices):
  """Returns the verdicts on trees, and the choices i32[M]."""
  # A tree may have fewer nodes than were asked for, such as after a draft whose
  # logits are NaN: what is no node matches no choice.
  is_node = trees.parents[:, 1:] != tree_lib.NO_PARENT
  drafted = jnp.where(is_node, drafted, reference.NO_TOKEN)
  nodes = (
    jnp.pad(drafted, ((0, 0), (1, 0))),  # what the root is does not matter
    trees.parents,
    queries.num_drafted + 1,
    trees.ancestor_mask,
  )
  if queries.is_in_order:
    *found, choices = _verify_in_order(scores, nodes, devices)
    width = len(scores) // len(choices)
    choices = _padded(choices, width).reshape(-1)
  else:
    choices = largest.argmax(scores).astype(jnp.int32)
    found = reference.follow(choices[queries.index], *nodes)
  token_ids, num_accepted, path = found
  slots = jnp.arange(len(path))[:, None]
  verdicts = Verdicts(
    num_accepted=num_accepted,
    num_levels=jnp.where(queries.is_node, trees.depths, 0).max(axis=1),
    token_ids=token_ids,
    tree=TreePart(path=path, is_looked_up=trees.is_looked_up[slots, path]),
  )
  return verdicts, choices


def _verify_in_order(scores, nodes, devices):
  """Returns what `api.verify_tree` does of scores f32[B * W, V].

  Tokens and path are padded to T, the choices i32[B, W] are not.
  """
  token_ids, parents, sizes, mask = nodes
  num_slots, num_nodes = parents.shape
  # A step may have more tokens than a tree can have nodes.
  scores = scores.reshape(num_slots, -1, scores.shape[1])[:, :num_nodes]
  width = scores.shape[1]
  found, num_accepted, path, choices = api.verify_tree(
    scores,
    token_ids[:, :width],
    parents[:, :width],
    sizes,
    mask[:, :width, :width],
    implementation=devices['kernels'],
    sharding=devices['sharding'],
  )
  found, path = (_padded(x, num_nodes) for x in (found, path))
  return found, num_accepted, path, choices


def _padded(x, size):
  """Returns [B, size] of [B, fewer], with zeros after them."""
  return jnp.pad(x, ((0, 0), (0, size - x.shape[1])))


def _texts_behind(texts, queries, drafted, trees):
  """Returns i32[M, S]: known tokens, and the nodes that lead to each query."""
  num_queries, text_size = len(queries.slots), texts.shape[1]
  slots, own = queries.slots, queries.nodes
  roots = queries.positions[:, 0] - 1 - trees.depths[slots, own]
  positions = jnp.where(
    trees.ancestor_mask[slots, own],
    roots[:, None] + trees.depths[slots],
    text_size,
  )
  rows = jnp.arange(num_queries)[:, None]
  return (
    texts[slots].at[rows, positions[:, 1:]].set(drafted[slots], mode='drop')
  )


def draft_scores(
  logits: jax.Array,
  noise: jax.Array | None,
  slots: jax.Array,
  sampling: sampling_lib.SamplingState,
) -> jax.Array:
  """Returns f32[R, W, V] whose highest is what a draft chooses.

  The next ones are its next guesses: scores are logits in greedy slots, and
  those of the distribution with the noise of the target in others. The same
  noise makes it choose the same token wherever the two distributions agree.
  What the output is does not depend on it.

  Args:
    logits: f32[R, W, V] of the draft.
    noise: f32[R, W, V], None where all slots are greedy.
    slots: i32[R].
    sampling: sampling parameters of the slots, of the two lower levels.
  """
  if noise is None:
    return logits
  temperatures = sampling.temperatures[slots][:, None, None]
  is_greedy = temperatures == 0
  drawn = logits / jnp.where(is_greedy, 1, temperatures) + noise
  return jnp.where(is_greedy, logits, drawn)
