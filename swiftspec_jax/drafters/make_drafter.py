"""From what the user names to a drafter of the engine."""

import dataclasses

from swiftspec_jax import errors
from swiftspec_jax.config import TreeConfig
from swiftspec_jax.drafters.device_drafter import OnDevices
from swiftspec_jax.drafters.engine_drafter import (
  EngineDrafter,
  HostDrafter,
  NoDrafter,
)
from swiftspec_jax.drafters.models.kinds import ChainDraft
from swiftspec_jax.drafters.models.persistent_trees import PersistentTrees
from swiftspec_jax.drafters.spec import DraftSpec, Setup
from swiftspec_jax.drafters.texts.prompt_lookup import PromptLookup
from swiftspec_jax.models.model import Model
from swiftspec_jax.step.stateless_drafter import StatelessDrafter

Draft = Model | DraftSpec | HostDrafter | StatelessDrafter | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoDraft(DraftSpec):
  """Plain decoding."""

  own_length = 0

  def runs_ahead(self, target: Model) -> bool:
    return True

  def make(self, setup: Setup) -> EngineDrafter:
    return NoDrafter()


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnHost(DraftSpec):
  """A drafter of the user's own that leaves the devices alone."""

  drafter: HostDrafter

  def make(self, setup: Setup) -> EngineDrafter:
    return self.drafter


def spec_of(draft: Draft, tree: TreeConfig | None = None) -> DraftSpec:
  """Returns the spec that a draft stands for.

  Args:
    draft: source of drafts, as users name it.
    tree: sizes of the trees that a draft model grows, if it is to grow any.

  Raises:
    UserError: it is no source of drafts, or there is a tree and no model.
  """
  if tree is not None:
    if not isinstance(draft, Model):
      raise errors.UserError(
        f'tree is for draft models, and the draft is {draft!r}'
      )
    return PersistentTrees(model=draft, tree=tree)
  if draft is None:
    return NoDraft()
  if isinstance(draft, DraftSpec):
    return draft
  if isinstance(draft, Model):
    return ChainDraft(model=draft)
  if isinstance(draft, StatelessDrafter):
    return OnDevices(drafter=draft)
  if isinstance(draft, HostDrafter):
    return OnHost(drafter=draft)
  raise errors.UserError(
    'an engine with policies drafts with a model, SelfDraft, TreeDraft, '
    'PersistentTrees, PromptLookup, SuffixLookup, Datastore, GrammarDraft, a '
    'HostDrafter or a StatelessDrafter, got '
    f'{draft!r}'
  )


def make(spec: DraftSpec, setup: Setup) -> EngineDrafter:
  """Returns the drafter of a spec.

  Raises:
    UserError: trees are smaller than the declared lengths, the model insists on
      kernels that cannot read its pages, the draft needs the target's pages and
      there are none, or it needs the text of steps that are ahead.
  """
  run_ahead = setup.run_ahead
  if run_ahead < 0:
    raise errors.UserError(f'run_ahead must be at least 0, got {run_ahead}')
  if setup.sizes.has_rows and spec.needs_pages:
    raise errors.UserError(
      f'{spec.name} drafts in the pages of the target, whose slots '
      'have rows; declare sizes with has_rows=False'
    )
  drafter = spec.make(setup)
  if run_ahead and not drafter.runs_ahead:
    raise errors.UserError(
      f'run_ahead={run_ahead} needs PersistentTrees, PromptLookup, a '
      f'StatelessDrafter or no draft: {drafter.name} drafts after texts that '
      'the host has read; take run_ahead=0'
    )
  return drafter


def lookup_of(spec: DraftSpec, setup: Setup) -> PromptLookup | None:
  """Returns the lookup that a spec is, or may be replaced by, if any."""
  if not isinstance(spec, PromptLookup):
    if not spec.looks_up:
      return None
    spec = PromptLookup()
  longest = setup.sizes.scheduler.buckets.max_length
  return dataclasses.replace(spec, num_speculative_tokens=longest)
