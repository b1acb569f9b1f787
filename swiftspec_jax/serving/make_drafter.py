"""From what the user names to a drafter of the engine."""

from swiftspec_jax import errors
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.drafting.prompt_lookup import PromptLookup
from swiftspec_jax.model import Model
from swiftspec_jax.serving.choices import SlotSampling
from swiftspec_jax.serving.draft_chain import ChainDrafter
from swiftspec_jax.serving.drafters import EngineDrafter, NoDrafter
from swiftspec_jax.serving.lookup import LookupDrafter
from swiftspec_jax.serving.program_sizes import ProgramSizes
from swiftspec_jax.serving.suffix_lookup import SuffixDrafter, SuffixLookup


def make(
  target: Model,
  draft: Model | PromptLookup | SuffixLookup | None,
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
  if not isinstance(draft, Model):
    raise errors.UserError(
      'an engine drafts with a model, PromptLookup or SuffixLookup, got '
      f'{draft!r}'
    )
  if draft.config.reads_features:
    raise errors.UserError(
      f'{draft.name} reads features of its target, which an engine does not '
      'hand over; take a draft without them'
    )
  tokenizer_lib.check_same_vocabulary(
    target.name, target.tokenizer, draft.name, draft.tokenizer
  )
  if draft.mesh != target.mesh:
    raise errors.UserError(
      f'{draft.name} lies on other devices than {target.name}; load both with '
      'the same `devices`'
    )
  return ChainDrafter(draft, sizes, sampling)
