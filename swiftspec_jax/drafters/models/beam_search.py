"""Beam search by a recurrent head (ReDrafter, arXiv 2403.09919).

It keeps the W most probable paths of the newest length (section 3.2). What the
last of them have in common becomes one node of a tree (section 3.3: dynamic
tree attention).

Legend: R rows, W beams, D forwards and tokens of a beam, T nodes of a tree, E
width of hidden states, V vocabulary, V' tokens that the head can propose.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from swiftspec_jax import errors
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.drafters.models import grown_trees
from swiftspec_jax.drafters.models.draft_forward import DraftRows
from swiftspec_jax.drafters.models.draft_tree import TreeDrafter
from swiftspec_jax.drafters.models.model_spec import ModelSpec
from swiftspec_jax.drafters.spec import Setup
from swiftspec_jax.model import Model
from swiftspec_jax.models import decoder
from swiftspec_jax.models.params import Params
from swiftspec_jax.step import sampling as sampling_lib
from swiftspec_jax.tree import arrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamDraft(ModelSpec):
  """Drafter of an engine.

  `StepBuckets.draft_steps` says how long beams are, and `StepBuckets.lengths`
  counts nodes of the tree that they are together, without the root. It may have
  fewer than are asked for.

  Attributes:
    model: recurrent head.
    width: number of beams.
    num_draft_steps: forwards of a whole tree in `ss.Decoder`, which declares
      the sizes itself.
    prompt_lookup: same as in `TreeConfig`.
    suffix_lookup: same as in `TreeConfig`.
  """

  makes_trees = True
  min_leaf_mass = 0.0

  model: Model
  width: int = 4
  num_draft_steps: int = 4
  prompt_lookup: bool = True
  suffix_lookup: bool = False

  def __post_init__(self):
    most = self.model.config.num_logits
    if not self.model.config.recurrent:
      raise errors.UserError(
        f'beams need a recurrent head, and {self.model.name} is none; take '
        'TreeDraft'
      )
    checks = {
      'width': (1 <= self.width <= most, f'1 to {most}'),
      'num_draft_steps': (self.num_draft_steps >= 1, 'at least 1'),
    }
    errors.check_fields(self, checks)

  @property
  def branching(self) -> int:
    """Children of a beam that may become one."""
    return self.width

  def num_nodes(self, num_forwards: int) -> int:
    """Returns the most nodes, root left out, after some forwards."""
    return self.width * num_forwards

  def num_forwards(self, length: int) -> int:
    return self.num_draft_steps

  def make(self, setup: Setup) -> 'BeamDrafter':
    return BeamDrafter(self, setup.sizes, setup.target)


def search(
  params: Params,
  hidden: jax.Array,
  logits: jax.Array,
  children_fn: grown_trees.ChildrenFn,
  num_steps: jax.Array,
  *,
  config: ModelConfig,
  width: int,
  length: int,
) -> tuple[jax.Array, jax.Array]:
  """Returns the most probable paths after the last known tokens.

  Args:
    params: parameters of the head.
    hidden: [R, E] of the last known tokens.
    logits: f32[R, V'] after them.
    children_fn: function that finds W children of each path.
    num_steps: i32[] tokens of a path after the first one, less than D.
    config: static configuration of the head.
    width: W, at most V'; static.
    length: D; static.

  Returns:
    Tokens i32[R, W, D], and the log-probability f32[R, W, D] of each after
    those before it, -inf for padding.
  """
  shape = len(logits), width

  def children(logits, depth):
    depths = jnp.full(logits.shape[:2], depth, jnp.int32)
    token_ids, log_probs = children_fn(logits, depths)
    # Of NaN no node may come.
    return token_ids, jnp.where(jnp.isnan(log_probs), -jnp.inf, log_probs)

  first, totals = (x[:, 0] for x in children(logits[:, None], 0))
  token_ids = jnp.zeros((*shape, length), jnp.int32).at[:, :, 0].set(first)
  log_probs = jnp.full((*shape, length), -jnp.inf).at[:, :, 0].set(totals)

  def step(i, carry):
    token_ids, log_probs, totals, hidden = carry
    hidden, _ = decoder.run_layers(
      params,
      config,
      token_ids[:, :, i - 1],
      jnp.zeros(shape, jnp.int32),  # it knows no positions
      None,
      features_before=hidden,
    )
    found = children(decoder.unembed(params, config, hidden), i)
    sums = totals[:, :, None] + found[1]
    newest, steps, sums = (x.reshape(len(x), -1) for x in (*found, sums))
    totals, best = jax.lax.top_k(sums, width)
    token_ids, log_probs, hidden = (
      arrays.take(x, (best // width)[:, :, None])
      for x in (token_ids, log_probs, hidden)
    )
    token_ids = token_ids.at[:, :, i].set(arrays.take(newest, best))
    log_probs = log_probs.at[:, :, i].set(arrays.take(steps, best))
    return token_ids, log_probs, totals, hidden

  hidden = jnp.broadcast_to(hidden[:, None], (*shape, hidden.shape[1]))
  carry = token_ids, log_probs, totals, hidden
  return jax.lax.fori_loop(1, num_steps + 1, step, carry)[:2]


@functools.partial(jax.jit, static_argnames=('config', 'sizes'))
def grow(
  params: Params,
  hidden: jax.Array,
  logits: jax.Array,
  noise: jax.Array | None,
  rows: DraftRows,
  num_steps: jax.Array,
  sampling: sampling_lib.SamplingState,
  *,
  config: ModelConfig,
  sizes: grown_trees.TreeSizes,
) -> jax.Array:
  """Returns the best nodes of the trees of beams after the last known tokens.

  Args:
    params: parameters of the head.
    hidden: [R, E] of the last known tokens.
    logits: f32[R, V'] after them.
    noise: f32[R, D, V] of the target, None where all slots are greedy.
    rows: rows to draft for.
    num_steps: i32[] forwards, at most D - 1.
    sampling: sampling parameters of the slots.
    config: configuration of the head; static.
    sizes: sizes of the tree; static.
  """
  tree = tree_lib.new_tree(
    jnp.zeros_like(rows.slots),
    capacity=1 + sizes.num_forwards * sizes.width + sizes.num_found,
    num_cache_rows=1,
    chain_length=max(1 + sizes.num_forwards, sizes.num_nodes),
  )
  children = grown_trees.children_fn(
    params, config, noise, rows, sampling, sizes.width
  )
  beams = search(
    params,
    hidden,
    logits,
    children,
    num_steps,
    config=config,
    width=sizes.width,
    length=sizes.num_forwards,
  )
  tree = tree_lib.add_chains(tree, *beams, is_looked_up=False)
  tree = grown_trees.with_lookups(tree, rows, sizes)
  num_slots = sampling.seeds.shape[0]
  return grown_trees.best_of(tree, rows, sizes.num_nodes, num_slots)


class BeamDrafter(TreeDrafter):
  """Trees of beams: a step of the head for each of their tokens."""

  @property
  def name(self) -> str:
    draft = self._draft
    name = f'{draft.model.name}_beams_{draft.width}'
    kinds = 'prompt_lookup', 'suffix_lookup'
    return '_'.join([name, *(kind for kind in kinds if getattr(draft, kind))])

  def _propose(
    self, hidden, logits, noise, rows, num_steps, sampling
  ) -> jax.Array:
    return self._call(
      grow,
      self._model.params,
      hidden,
      logits,
      noise,
      rows,
      num_steps,
      sampling,
      config=self._model.config,
      sizes=dataclasses.replace(self._tree_sizes, width=self._draft.width),
    )
