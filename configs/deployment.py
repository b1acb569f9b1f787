"""What a plan is made for."""

import dataclasses
import pathlib
import runpy

from swiftspec_jax import errors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.simulator.planning.forward import Chip, Forward


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
  """A published speed of the deployment.

  Attributes:
    source: place of the figure.
    mode: 'serial' or 'async'.
    target_chips: chips of the target.
    tokens_per_second: the figure, with fused kernels.
    target_seconds: published time of a verification, if there is one.
    draft_seconds: published time of an expansion, if there is one.
  """

  source: str
  mode: str
  target_chips: int
  tokens_per_second: float
  target_seconds: float | None = None
  draft_seconds: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
  """A model that may grow the tree.

  Attributes:
    name: name for the results.
    config: sizes of the model.
    acceptance: probability that its best child is right.
    source: origin of the acceptance: a run or a publication.
  """

  name: str
  config: ModelConfig
  acceptance: float
  source: str

  def __post_init__(self):
    errors.check_fields(
      self,
      {
        'acceptance': (0 < self.acceptance <= 1, 'in (0, 1]'),
        'source': (bool(self.source), 'the origin of the acceptance'),
      },
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
  """Models, chips, and sizes to choose from.

  Attributes:
    name: name of the models and the chips.
    target: model that defines the output.
    drafts: models to choose from; that of the published speeds is the first.
    chip: kind of chip.
    num_chips: number of chips, all of one host.
    weight_dtypes: dtypes of the matrices to choose from, for target and draft
      each; None is bfloat16.
    context: tokens in the caches.
    num_nodes: numbers of nodes to choose from.
    width: leaves that a draft forward expands.
    num_draft_steps: numbers of draft forwards to choose from.
    target_chips: splits to choose from, by the chips of the target.
    goal: tokens per second to reach.
    published: speeds to compare with.
    published_split: chips of the target in the best published split.
    measured: forwards that were timed on the chip, and for each the measured
      seconds over the predicted ones.
  """

  name: str
  target: ModelConfig
  drafts: tuple[Draft, ...]
  chip: Chip
  num_chips: int
  weight_dtypes: tuple[str | None, ...] = ('int4', 'int8', 'float8', None)
  context: int = 500
  num_nodes: tuple[int, ...] = (4, 8)
  width: int = 8
  num_draft_steps: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8)
  target_chips: tuple[int, ...] = (2, 4, 6)
  goal: float | None = None
  published: tuple[Published, ...] = ()
  published_split: int | None = None
  measured: tuple[tuple[Forward, float], ...] = ()

  def __post_init__(self):
    splits = {*self.target_chips, self.num_chips}
    has_splits = {p.target_chips for p in self.published} <= splits
    has_published = 'int4' in self.weight_dtypes and has_splits
    errors.check_fields(
      self,
      {
        'drafts': (bool(self.drafts), 'one Draft or more'),
        'target_chips': (
          all(0 < n < self.num_chips for n in self.target_chips),
          f'between 1 and the {self.num_chips - 1} chips that leave one for '
          'the draft',
        ),
        'published': (
          not self.published or has_published,
          'empty where int4 or the published splits are not to choose from',
        ),
      },
    )


def read(path: pathlib.Path) -> Deployment:
  """Returns the deployment of a config file.

  Raises:
    UserError: the file cannot be run, or sets no CONFIG.
  """
  kinds = OSError, SyntaxError, ImportError, TypeError
  with errors.explained(f'cannot read {path}: ', kinds):
    found = runpy.run_path(str(path)).get('CONFIG')
  if not isinstance(found, Deployment):
    raise errors.UserError(
      f'{path} must set CONFIG to a configs.deployment.Deployment, '
      f'got {found!r}'
    )
  return found
