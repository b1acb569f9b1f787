"""How a token tree is grown."""

import dataclasses

from swiftspec_jax import errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeConfig:
  """How a draft model grows its token tree, and what it sends of it.

  The letters are those of the SwiftSpec paper, section 3.1.

  Attributes:
    num_nodes: nodes that the target verifies in a round (bs). The root, which
      is the last known token, is one of them.
    width: leaves that one draft forward expands (w). None is 8, as in the
      paper, or 4 with the kernels of CPUs, for which each leaf takes time.
    num_draft_steps: draft forwards of a round (d). Where draft and target take
      turns, the first of them expands the root.
    branching: children of a leaf that enter the tree.
    num_restart_steps: forwards that a new tree gets after the first one before
      it is sent, if the last verified token was not in the old tree. The
      target waits for them. Asynchronous mode only.
    waits_for_misses: whether the target waits until every row has a tree again.
      If not, a row whose last verified token was not in its tree sends that
      token alone, and grows a new tree while the target verifies. The target
      then waits only if no row has a tree. Asynchronous mode with several rows
      only.
    capacity: most nodes of a tree.
    num_cache_rows: most nodes of a tree with keys and values.
    is_adaptive: old name of `Decoder(policy='goodput')`; goes in 0.4.
    min_leaf_mass: least probability, by the draft, of all leaves of a forward
      together. With less, a tree of `num_nodes` grows no further in this round;
      0 is off. None is 0, or 0.7 where draft and target take turns with the
      kernels of CPUs, for which each forward takes time.
    prompt_lookup: whether the tree also gets the tokens that followed the
      longest earlier match of the last tokens. Their score is how often such
      tokens were right in this request.
    forced_acceptance: probability that the best child is right, for studies
      of speed. The draft then knows the output, which the request must name.
  """

  num_nodes: int = 8
  width: int | None = None
  num_draft_steps: int = 4
  branching: int = 8
  num_restart_steps: int = 0
  waits_for_misses: bool = False
  capacity: int = 256
  num_cache_rows: int = 128
  is_adaptive: bool = False
  min_leaf_mass: float | None = None
  prompt_lookup: bool = True
  forced_acceptance: float | None = None

  @property
  def num_leaves(self) -> int:
    """Leaves that one draft forward expands at most."""
    return 8 if self.width is None else self.width

  @property
  def num_turn_steps(self) -> int:
    """Forwards that grow a tree after that which expands its root.

    Those of a round in which draft and target take turns, and enough for a new
    tree to have `num_nodes`.
    """
    size, num_candidates, num_steps = 1 + self.branching, self.branching, 0
    while size < self.num_nodes:
      num_leaves = min(self.num_leaves, num_candidates)
      size += num_leaves * self.branching
      num_candidates += num_leaves * (self.branching - 1)
      num_steps += 1
    return max(self.num_draft_steps - 1, num_steps)

  def __post_init__(self):
    forced = self.forced_acceptance
    checks = {
      'num_nodes': (
        1 <= self.num_nodes <= self.capacity,
        f'from 1 to the capacity of {self.capacity} nodes',
      ),
      'width': (
        1 <= self.num_leaves <= self.num_cache_rows,
        f'from 1 to num_cache_rows={self.num_cache_rows}',
      ),
      'num_draft_steps': (self.num_draft_steps >= 0, '>= 0'),
      'branching': (self.branching >= 1, '>= 1'),
      'num_restart_steps': (self.num_restart_steps >= 0, '>= 0'),
      'num_cache_rows': (
        1 <= self.num_cache_rows <= self.capacity,
        f'from 1 to the capacity of {self.capacity} nodes',
      ),
      'min_leaf_mass': (0 <= (self.min_leaf_mass or 0) < 1, 'in [0, 1)'),
      'forced_acceptance': (
        forced is None or 0 < forced <= 1,
        'in (0, 1], or None',
      ),
    }
    errors.check_fields(self, checks)
