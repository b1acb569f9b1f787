"""A draft model that grows trees for the rows of an engine.

The nodes of a tree are sorted by how probable the draft takes them to be, so
the first ones, however many a policy wants, are the best tree of that size.
Nothing of a tree is kept: the first forward of the next draft reads the
accepted tokens again.

What the known text suggests enters the tree, too, as in the modes serial and
async; but how often it was right is not counted in each row here.

Legend: W leaves of a forward.
"""

import dataclasses
import functools

import jax
import numpy as np

from swiftspec_jax import errors, policies
from swiftspec_jax.drafters.engine_drafter import EngineDrafter
from swiftspec_jax.drafters.models import grown_trees
from swiftspec_jax.drafters.models.model_drafter import ModelDrafter
from swiftspec_jax.drafters.models.model_spec import ModelSpec
from swiftspec_jax.drafters.spec import Setup
from swiftspec_jax.models.model import Model
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.runtime import sharding as sharding_lib
from swiftspec_jax.step import target_forward
from swiftspec_jax.step.program_sizes import ProgramSizes
from swiftspec_jax.step.slot_drafts import SlotDrafts
from swiftspec_jax.step.target import Target
from swiftspec_jax.tree import types


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeDraft(ModelSpec):
  """Drafter of an engine.

  How large the trees are is up to the declared sizes: `StepBuckets.lengths`
  counts nodes without the root, `draft_steps` the forwards for them. No tree
  is deeper than its number of forwards.

  Attributes:
    model: model that drafts.
    width: leaves that one forward expands.
    branching: children of a leaf that enter the tree.
    num_draft_steps: forwards of a whole tree in `ss.Decoder`, which declares
      the sizes itself.
    prompt_lookup: same as in `TreeConfig`.
    min_leaf_mass: bound on the mass of leaves, as in `TreeConfig`.
  """

  makes_trees = True

  model: Model
  width: int = 8
  branching: int = 8
  num_draft_steps: int = 4
  min_leaf_mass: float = 0.0
  prompt_lookup: bool = True

  @property
  def looks_up(self) -> bool:
    return self.prompt_lookup

  def __post_init__(self):
    most = self.model.config.num_logits
    checks = {
      'width': (self.width >= 1, 'at least 1'),
      'num_draft_steps': (self.num_draft_steps >= 1, 'at least 1'),
      'branching': (1 <= self.branching <= most, f'1 to {most}'),
      'min_leaf_mass': (0 <= self.min_leaf_mass < 1, 'in [0, 1)'),
    }
    errors.check_fields(self, checks)

  def num_nodes(self, num_forwards: int) -> int:
    """Returns the fewest nodes, root left out, after some forwards."""
    leaves = min(self.width, self.branching)
    return self.branching * (1 + (num_forwards - 1) * leaves)

  def num_forwards(self, length: int) -> int:
    return self.num_draft_steps

  def make(self, setup: Setup) -> EngineDrafter:
    from swiftspec_jax.drafters.models import kinds  # which imports this module

    target_forward.check_kernels(self.model, setup.sizes)
    _, trees = kinds.of_model(self.model)
    return trees(self, setup.sizes, setup.target)


class TreeDrafter(ModelDrafter):
  """Trees: a forward for up to W leaves of each row."""

  def __init__(self, draft: TreeDraft, sizes: ProgramSizes, target: Target):
    """Allocates the cache.

    Raises:
      UserError: the trees are smaller than the declared lengths.
    """
    super().__init__(draft.model, sizes, target)
    buckets = sizes.scheduler.buckets
    _check(draft, buckets)
    self._draft = draft
    most = buckets.max_length
    self._tree_sizes = grown_trees.TreeSizes(
      num_forwards=self._num_forwards,
      num_nodes=most + 1,
      # No more can be chosen, nor have children that are.
      width=min(draft.width, most),
      branching=min(draft.branching, most),
      prompt_lookup=draft.prompt_lookup,
      min_leaf_mass=draft.min_leaf_mass,
    )
    axes = 'batch', 'kv_heads', None, None
    self._sharding = sharding_lib.sharding_of(draft.model.mesh, axes)

  @property
  def name(self) -> str:
    draft = self._draft
    name = f'{draft.model.name}_tree_{draft.width}_{draft.branching}'
    if draft.prompt_lookup:
      name += '_prompt_lookup'
    if draft.min_leaf_mass:
      name += f'_{draft.min_leaf_mass}'
    return name

  @property
  def _reads_texts(self) -> bool:
    return self._draft.prompt_lookup

  @property
  def _num_forwards(self) -> int:
    return self._sizes.scheduler.buckets.draft_steps[-1]

  def _num_steps(self, length: int) -> int:
    return self._sizes.scheduler.buckets.steps_of(length) - 1

  def _propose(
    self, hidden, logits, noise, rows, num_steps, sampling
  ) -> jax.Array:
    return self._call(
      grown_trees.grow,
      self._model.params,
      self.cache,
      hidden,
      logits,
      noise,
      rows,
      num_steps,
      sampling,
      config=self._model.config,
      sharding=self._sharding,
      sizes=self._tree_sizes,
    )

  def _slot_drafts(self, view, lengths, found) -> SlotDrafts:
    @functools.cache
    def confidences() -> np.ndarray:
      trees = types.TreeProposal.unpack(np.asarray(found)[view.slots])
      own = np.exp(trees.log_probs[:, 1:].astype(np.float64)).T
      return own * (np.arange(len(own))[:, None] < lengths)

    return SlotDrafts(
      drafts=policies.Drafts(lengths=lengths, node_confidences=confidences),
      trees=found,
    )


def _check(draft: TreeDraft, buckets: StepBuckets) -> None:
  """Raises UserError if the trees do not become as large as declared."""
  if not buckets.max_length:
    raise errors.UserError('trees need lengths of more than 0')
  for length, steps in zip(buckets.lengths, buckets.draft_steps, strict=True):
    if length and not (steps and draft.num_nodes(steps) >= length):
      raise errors.UserError(
        f'trees of width={draft.width} and branching={draft.branching} may '
        f'have less than {length} nodes after {steps} forwards; make them '
        'wider, or draft_steps larger'
      )
