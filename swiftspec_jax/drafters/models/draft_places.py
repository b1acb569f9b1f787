"""Drafts whose tokens are all of one forward of a draft model.

The tokens do not know of each other, so that a tree takes no more forwards than
a chain: below each node are the best tokens of the next place.

Legend:
- B rows of a view, R rows, U slots
- K longest draft, T = K + 1 nodes, D places that are drafted for
- V vocabulary, V' of it what the draft can propose
"""

import functools

import jax
import jax.numpy as jnp

from kernels_pallas.vocabulary import largest
from swiftspec_jax import errors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.drafters.models import grown_trees
from swiftspec_jax.drafters.models.draft_forward import (
  DraftRows,
  noise_of_outputs,
)
from swiftspec_jax.drafters.models.draft_tree import TreeDrafter
from swiftspec_jax.drafters.models.model_drafter import ModelDrafter
from swiftspec_jax.models import decoder
from swiftspec_jax.models.model import Model
from swiftspec_jax.models.params import Params
from swiftspec_jax.step import sampling as sampling_lib
from swiftspec_jax.step import verify
from swiftspec_jax.step.program_sizes import ProgramSizes
from swiftspec_jax.step.target import Target


@functools.partial(jax.jit, static_argnames=('config', 'length'))
def chains(
  params: Params,
  logits: jax.Array,
  noise: jax.Array | None,
  rows: DraftRows,
  sampling: sampling_lib.SamplingState,
  *,
  config: ModelConfig,
  length: int,
) -> jax.Array:
  """Returns the best token of each place, as chains i32[U, K].

  Args:
    params: parameters of the draft.
    logits: f32[R, D, V'].
    noise: f32[R, D, V] of the target, None where all slots are greedy.
    rows: rows to draft for.
    sampling: sampling parameters of the U slots.
    config: configuration of the draft; static.
    length: K; static.
  """
  noise = noise_of_outputs(params, config, noise)
  scores = verify.draft_scores(logits, noise, rows.slots, sampling)
  index = largest.argmax(scores).astype(jnp.int32)
  num_slots = sampling.seeds.shape[0]
  # Padding belongs to no slot.
  slots = jnp.where(rows.lengths > 0, rows.slots, num_slots)
  drafted = jnp.zeros((num_slots, length), jnp.int32)
  return drafted.at[slots].set(
    decoder.token_ids_of(params, config, index), mode='drop'
  )


@functools.partial(jax.jit, static_argnames=('config', 'sizes'))
def grow(
  params: Params,
  logits: jax.Array,
  noise: jax.Array | None,
  rows: DraftRows,
  num_steps: jax.Array,
  sampling: sampling_lib.SamplingState,
  *,
  config: ModelConfig,
  sizes: grown_trees.TreeSizes,
) -> jax.Array:
  """Grows trees, in which each place has the same tokens below all nodes.

  Args:
    params: parameters of the draft.
    logits: f32[R, D, V'].
    noise: f32[R, D, V] of the target, None where all slots are greedy.
    rows: rows to draft for.
    num_steps: i32[] levels of a tree below the first, at most D - 1.
    sampling: sampling parameters of the U slots.
    config: configuration of the draft; static.
    sizes: sizes of the tree; static; leaves get children W at once.
  """
  noise = noise_of_outputs(params, config, noise)
  scores = verify.draft_scores(logits, noise, rows.slots, sampling)
  log_probs, index = largest.top_log_probs(scores, sizes.branching)
  token_ids = decoder.token_ids_of(params, config, index)

  def draft_fn(carry, leaves):
    def below(values, fill):
      # Leaves that were looked up may be deeper than what was drafted for.
      return jnp.take_along_axis(
        values,
        leaves.depths[:, :, None],
        axis=1,
        mode='fill',
        fill_value=fill,
      )

    return below(token_ids, 0), below(log_probs, -jnp.inf), carry

  return grown_trees.grown(
    (token_ids[:, :1], log_probs[:, :1]),
    None,
    draft_fn,
    rows,
    num_steps,
    sizes,
    num_slots=sampling.seeds.shape[0],
  )


class _Places(ModelDrafter):
  """What chains and trees of places have in common."""

  @property
  def _num_forwards(self) -> int:
    """D, all of which one forward drafts."""
    longest = self._sizes.scheduler.buckets.max_length
    return min(longest, self._model.config.block.num_drafts)

  def _num_steps(self, length: int) -> int:
    return min(length, self._num_forwards) - 1


class ChainOfPlaces(_Places):
  """Chains of the best token of each place."""

  def __init__(self, model: Model, sizes: ProgramSizes, target: Target):
    """Allocates the cache.

    Raises:
      UserError: longer drafts are declared than a block has.
    """
    super().__init__(model, sizes, target)
    longest = sizes.scheduler.buckets.max_length
    most = model.config.block.num_drafts
    if longest > most:
      raise errors.UserError(
        f'drafts of up to {longest} tokens are declared, but a forward of '
        f'{model.name} drafts {most}; declare lengths of at most {most}'
      )

  def _propose(self, hidden, logits, noise, rows, num_steps, sampling):
    return self._call(
      chains,
      self._model.params,
      logits,
      noise,
      rows,
      sampling,
      config=self._model.config,
      length=self._sizes.scheduler.buckets.max_length,
    )


class TreeOfPlaces(_Places, TreeDrafter):
  """Trees of the best tokens of each place."""

  def _propose(
    self, hidden, logits, noise, rows, num_steps, sampling
  ) -> jax.Array:
    return self._call(
      grow,
      self._model.params,
      logits,
      noise,
      rows,
      num_steps,
      sampling,
      config=self._model.config,
      sizes=self._tree_sizes,
    )
