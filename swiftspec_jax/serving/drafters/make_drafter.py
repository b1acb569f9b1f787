"""From what the user names to a drafter of the engine."""

import dataclasses
from typing import Any

from swiftspec_jax import errors
from swiftspec_jax import timeline as timeline_lib
from swiftspec_jax.config import TreeConfig
from swiftspec_jax.drafting import (
  StatelessDrafter,
  feature_draft,
  shared_vocabulary,
)
from swiftspec_jax.drafting.texts.prompt_lookup import PromptLookup
from swiftspec_jax.drafting.trees import tree_checks
from swiftspec_jax.model import Model
from swiftspec_jax.serving.drafters import text_only
from swiftspec_jax.serving.drafters.device_drafter import DeviceDrafter
from swiftspec_jax.serving.drafters.engine_drafter import (
  EngineDrafter,
  HostDrafter,
  NoDrafter,
)
from swiftspec_jax.serving.drafters.forced_draft import (
  ForcedDraft,
  ForcedDrafter,
)
from swiftspec_jax.serving.drafters.grammar_draft import (
  GrammarDraft,
  GrammarDrafter,
)
from swiftspec_jax.serving.drafters.models.beam_search import (
  BeamDraft,
  BeamDrafter,
)
from swiftspec_jax.serving.drafters.models.draft_block import (
  BlockChainDrafter,
  BlockTreeDrafter,
)
from swiftspec_jax.serving.drafters.models.draft_chain import ChainDrafter
from swiftspec_jax.serving.drafters.models.draft_masks import (
  MaskChainDrafter,
  MaskTreeDrafter,
)
from swiftspec_jax.serving.drafters.models.draft_tree import (
  TreeDraft,
  TreeDrafter,
)
from swiftspec_jax.serving.drafters.models.persistent_trees import (
  PersistentTreeDrafter,
  PersistentTrees,
)
from swiftspec_jax.serving.drafters.models.self_draft import (
  SelfDraft,
  SelfDrafter,
)
from swiftspec_jax.serving.drafters.models.snapkv_draft import (
  SnapKVDraft,
  SnapKVDrafter,
)
from swiftspec_jax.serving.drafters.texts.datastore import (
  Datastore,
  DatastoreDrafter,
)
from swiftspec_jax.serving.drafters.texts.lookup import LookupDrafter
from swiftspec_jax.serving.drafters.texts.phrase_draft import (
  PhraseDraft,
  PhraseDrafter,
)
from swiftspec_jax.serving.drafters.texts.suffix_lookup import (
  SuffixDrafter,
  SuffixLookup,
)
from swiftspec_jax.step import target_forward
from swiftspec_jax.step.program_sizes import ProgramSizes
from swiftspec_jax.step.target import Target

# Draft tokens of a row, where neither the user nor the draft says how many;
# those of a chain take a forward each.
_LENGTH, _CHAIN_LENGTH = 7, 4

# That know the text alone.
Lookup = PromptLookup | SuffixLookup | ForcedDraft | HostDrafter
_TextTrees = Datastore | PhraseDraft | GrammarDraft
_Trees = TreeDraft | BeamDraft | PersistentTrees
# Of the target itself.
_Own = SelfDraft | SnapKVDraft
Draft = Model | _Own | _Trees | _TextTrees | Lookup | StatelessDrafter | None
# That draft in the pages of the target.
InPages = Model | _Own | TreeDraft | BeamDraft


def with_tree(draft: Any, tree: TreeConfig | None) -> Any:
  """Returns the draft that a model makes of a tree's sizes, if there are any.

  Raises:
    UserError: there are some, and no model.
  """
  if tree is None:
    return draft
  if not isinstance(draft, Model):
    raise errors.UserError(
      f'tree is for draft models, and the draft is {draft!r}'
    )
  return PersistentTrees(model=draft, tree=tree)


def makes_trees(draft: Draft) -> bool:
  """Returns whether drafts are trees, not chains."""
  return isinstance(draft, _Trees | _TextTrees)


def model_of(draft: Draft, target: Model) -> Model | None:
  """Returns the model that drafts for a target, None if none does.

  Raises:
    UserError: it is no draft, has another vocabulary, lies on other devices,
      or reads features that the target does not have.
  """
  if draft is None or isinstance(draft, Lookup | _TextTrees | StatelessDrafter):
    return None
  if isinstance(draft, _Own):
    return target
  model = draft.model if isinstance(draft, _Trees) else draft
  if not isinstance(model, Model):
    raise errors.UserError(
      'an engine with policies drafts with a model, SelfDraft, SnapKVDraft, '
      'TreeDraft, BeamDraft, PersistentTrees, PromptLookup, SuffixLookup, '
      'Datastore, PhraseDraft, GrammarDraft, a HostDrafter or a '
      f'StatelessDrafter, got {draft!r}'
    )
  if isinstance(draft, PersistentTrees):
    tree_checks.are_disjoint(target, model)
    feature_draft.check_lives(model)
  feature_draft.check_layers(model, target)
  shared_vocabulary.check(target, model)
  if model.mesh != target.mesh and not isinstance(draft, PersistentTrees):
    raise errors.UserError(
      f'{model.name} lies on other devices than {target.name}; load both with '
      'the same `devices`'
    )
  return model


def runs_ahead(draft: Draft, target: Model) -> bool:
  """Returns whether steps are enqueued ahead, where nobody says how many.

  Other drafts need the text on the host, as lookups do to leave images out.
  """
  if isinstance(draft, PromptLookup) and target.config.vision is not None:
    return False
  return draft is None or isinstance(draft, PersistentTrees | StatelessDrafter)


def longest(draft: Draft, given: int | None) -> int:
  """Returns the most draft tokens of a row, where nobody declares sizes.

  Args:
    draft: source of drafts.
    given: number that the user has given, None for none.

  Raises:
    UserError: there is a number, and the draft has its own.
  """
  own = None
  if isinstance(draft, PersistentTrees):
    own = draft.tree.num_nodes - 1
  elif isinstance(draft, StatelessDrafter):
    own = draft.num_speculative_tokens
  elif draft is None:
    own = 0
  if given is not None and given < 1:
    raise errors.UserError(
      f'num_speculative_tokens must be at least 1, got {given}'
    )
  if own is None:
    return given or _default_length(draft)
  if given is not None:
    raise errors.UserError(
      f'num_speculative_tokens={given} is for drafts without a length of their '
      f'own, and the draft is {draft!r}'
    )
  return own


def _default_length(draft: Draft) -> int:
  if not isinstance(draft, Model):
    return _LENGTH
  block = draft.config.block
  return _CHAIN_LENGTH if block is None else min(_LENGTH, block.num_drafts)


def num_draft_steps(draft: Draft, length: int) -> int:
  """Returns the forwards of a draft of `length` tokens, or nodes.

  A lookup takes the same time whatever it finds, and persistent trees grow as
  they are told.
  """
  if isinstance(draft, TreeDraft | BeamDraft):
    return draft.num_draft_steps
  if isinstance(draft, Model) and draft.config.block is not None:
    return 1  # for all places of a block
  return length if isinstance(draft, Model | _Own) else 1


def make(
  target: Target,
  draft: Draft,
  sizes: ProgramSizes,
  *,
  run_ahead: int = 0,
  timeline: timeline_lib.Timeline | None = None,
) -> EngineDrafter:
  """Returns the drafter that `draft` stands for.

  One that reads no features of a target that reads images is told of the text
  alone.

  Args:
    target: target of the engine.
    draft: source of drafts.
    sizes: declared.
    run_ahead: steps that are enqueued before one is read.
    timeline: timeline that notes when the programs of persistent trees ran.

  Raises:
    UserError: trees are smaller than the declared lengths, the model insists on
      kernels that cannot read its pages, images cannot be left out, the draft
      needs the target's pages and there are none, or it needs the text of steps
      that are ahead.
  """
  drafter = _make_for(target, draft, sizes, run_ahead, timeline)
  if run_ahead < 0:
    raise errors.UserError(f'run_ahead must be at least 0, got {run_ahead}')
  if run_ahead and not drafter.runs_ahead:
    raise errors.UserError(
      f'run_ahead={run_ahead} needs PersistentTrees, PromptLookup, a '
      f'StatelessDrafter or no draft: {drafter.name} drafts after texts that '
      'the host has read; take run_ahead=0'
    )
  return drafter


def _make_for(
  target: Target,
  draft: Draft,
  sizes: ProgramSizes,
  run_ahead: int,
  timeline: timeline_lib.Timeline | None,
) -> EngineDrafter:
  """Does what `make` says, whether or not it can run ahead."""
  if draft is None:
    return NoDrafter()
  if sizes.has_rows and isinstance(draft, InPages):
    raise errors.UserError(
      f'{type(draft).__name__} drafts in the pages of the target, whose slots '
      'have rows; declare sizes with has_rows=False'
    )
  if _is_on_devices(draft, run_ahead):
    return on_devices(target, draft, sizes)
  if isinstance(draft, PersistentTrees):
    if target.images is not None:
      raise errors.UserError(
        f'PersistentTrees cannot leave out the images of {target.model.name}; '
        'take TreeDraft, or the draft model alone (--mode=tree or chain)'
      )
    return PersistentTreeDrafter(draft, sizes, target, timeline)
  if target.images is None or isinstance(draft, _Own):
    return _make(target, draft, sizes)
  model = model_of(draft, target.model)
  if model is not None and model.config.reads_features:
    return _make(target, draft, sizes)
  drafter = _make(target, draft, text_only.sizes_of_draft(sizes))
  kind = text_only.TextOnly
  if isinstance(drafter, HostDrafter):
    kind = text_only.TextOnlyHost
  return kind(drafter, sizes.scheduler, target.is_image)


def _is_on_devices(draft: Draft, run_ahead: int) -> bool:
  """Returns whether a draft of texts is made on the devices, not the host."""
  if isinstance(draft, PromptLookup):
    return run_ahead > 0
  return isinstance(draft, StatelessDrafter)


def on_devices(
  target: Target, drafter: StatelessDrafter, sizes: ProgramSizes
) -> DeviceDrafter:
  """Returns what drafts with it on the devices.

  Raises:
    UserError: the target reads images, which it cannot leave out.
  """
  if target.images is not None:
    raise errors.UserError(
      f'{drafter!r} on the devices cannot leave out the images of '
      f'{target.model.name}; take PromptLookup with run_ahead=0, or a '
      'HostDrafter'
    )
  max_length = sizes.scheduler.buckets.max_length
  if isinstance(drafter, PromptLookup):  # as long as on the host
    drafter = dataclasses.replace(drafter, num_speculative_tokens=max_length)
  return DeviceDrafter(drafter, target)


def _make(target: Target, draft: Draft, sizes: ProgramSizes) -> EngineDrafter:
  if isinstance(draft, Datastore):
    if draft.store is not None:
      draft.store.check(target.model.name, target.model.tokenizer)
    return DatastoreDrafter(draft)
  if isinstance(draft, GrammarDraft):
    return GrammarDrafter()
  if isinstance(draft, PhraseDraft):
    return PhraseDrafter(draft, make_lookup(draft.lookup))
  if isinstance(draft, Lookup):
    return make_lookup(draft)
  if isinstance(draft, TreeDraft):
    target_forward.check_kernels(draft.model, sizes)
    return _kind_of(draft.model)[1](draft, sizes, target)
  if isinstance(draft, BeamDraft):
    return BeamDrafter(draft, sizes, target)
  if isinstance(draft, SelfDraft):
    return SelfDrafter(draft, sizes, target)
  if isinstance(draft, SnapKVDraft):
    return SnapKVDrafter(draft, sizes, target)
  target_forward.check_kernels(draft, sizes)
  return _kind_of(draft)[0](draft, sizes, target)


def _kind_of(model: Model) -> tuple[Any, Any]:
  """Returns the drafters that make chains and trees of a model."""
  if model.config.block is None:
    return ChainDrafter, TreeDrafter
  if model.config.eagle3 is None:
    return BlockChainDrafter, BlockTreeDrafter
  return MaskChainDrafter, MaskTreeDrafter


def make_lookup(lookup: Lookup) -> HostDrafter:
  """Returns the drafter that `lookup` stands for."""
  if isinstance(lookup, PromptLookup):
    return LookupDrafter(lookup)
  if isinstance(lookup, SuffixLookup):
    return SuffixDrafter(lookup)
  if isinstance(lookup, ForcedDraft):
    return ForcedDrafter(lookup)
  return lookup
