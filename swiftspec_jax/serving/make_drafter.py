"""From what the user names to a drafter of the engine."""

from swiftspec_jax import errors
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.drafting.prompt_lookup import PromptLookup
from swiftspec_jax.model import Model
from swiftspec_jax.serving.choices import SlotSampling
from swiftspec_jax.serving.draft_chain import ChainDrafter
from swiftspec_jax.serving.draft_tree import TreeDraft, TreeDrafter
from swiftspec_jax.serving.drafters import EngineDrafter, NoDrafter
from swiftspec_jax.serving.lookup import LookupDrafter
from swiftspec_jax.serving.program_sizes import ProgramSizes
from swiftspec_jax.serving.suffix_lookup import SuffixDrafter, SuffixLookup


def make(
  target: Model,
  draft: Model | TreeDraft | PromptLookup | SuffixLookup | None,
  sizes: ProgramSizes,
  sampling: SlotSampling,
) -> EngineDrafter:
  """Returns the drafter that `draft` stands for.

  Raises:
    UserError: the draft has another vocabulary, or lies on other devices.
  """
  if draft is None:
    return NoDrafter()
  if isinstance(draft, PromptLookup):
    return LookupDrafter(draft)
  if isinstance(draft, SuffixLookup):
    return SuffixDrafter(draft)
  model = draft.model if isinstance(draft, TreeDraft) else draft
  if not isinstance(model, Model):
    raise errors.UserError(
      'an engine drafts with a model, TreeDraft, PromptLookup or SuffixLookup, '
      f'got {draft!r}'
    )
  if model.config.reads_features:
    raise errors.UserError(
      f'{model.name} reads features of its target, which an engine does not '
      'hand over; take a draft without them'
    )
  tokenizer_lib.check_same_vocabulary(
    target.name, target.tokenizer, model.name, model.tokenizer
  )
  if model.mesh != target.mesh:
    raise errors.UserError(
      f'{model.name} lies on other devices than {target.name}; load both with '
      'the same `devices`'
    )
  if isinstance(draft, TreeDraft):
    return TreeDrafter(draft, sizes, sampling)
  return ChainDrafter(model, sizes, sampling)
