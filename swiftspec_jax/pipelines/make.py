"""The pipeline of a target and what drafts for it."""

from swiftspec_jax import errors
from swiftspec_jax import timeline as timeline_lib
from swiftspec_jax.config import TreeConfig
from swiftspec_jax.drafting import Drafter, shared_vocabulary
from swiftspec_jax.drafting.draft_model import DraftModel
from swiftspec_jax.drafting.no_draft import NoDraft
from swiftspec_jax.model import Model
from swiftspec_jax.pipelines import Pipeline
from swiftspec_jax.pipelines.chain import ChainPipeline
from swiftspec_jax.pipelines.tree import TreePipeline


def make_pipeline(
  target: Model,
  draft: Model | Drafter | None,
  *,
  num_speculative_tokens: int | None,
  tree: TreeConfig | None,
  batch_size: int,
  timeline: timeline_lib.Timeline | None,
) -> Pipeline:
  """Checks that the parts fit; the arguments are those of `RowEngine`."""
  if tree is None:
    drafter = _drafter(target, draft, num_speculative_tokens)
    params = draft.params if isinstance(draft, Model) else None
    pipeline = ChainPipeline(target, drafter, params, batch_size)
  else:
    _check_tree_draft(target, draft, num_speculative_tokens)
    pipeline = TreePipeline(
      target, draft, tree, batch_size=batch_size, timeline=timeline
    )
  window = target.config.sliding_window
  if window is not None and window <= pipeline.num_speculative_tokens:
    raise errors.UserError(
      f'{pipeline.num_speculative_tokens} speculative tokens a round must be '
      f"less than the target's sliding window of {window}"
    )
  return pipeline


def _drafter(
  target: Model,
  draft: Model | Drafter | None,
  num_speculative_tokens: int | None,
) -> Drafter:
  """Returns the drafter that `draft` stands for."""
  if not isinstance(draft, Model):
    if num_speculative_tokens is not None:
      raise errors.UserError(
        f'num_speculative_tokens={num_speculative_tokens} is for a draft '
        'model; other drafters have it as a field of their own'
      )
    return NoDraft() if draft is None else draft
  shared_vocabulary.check(target, draft)
  if draft.mesh != target.mesh:
    raise errors.UserError(
      f'{draft.name} lies on other devices than {target.name}; load both with '
      'the same `devices`, or give `tree` for asynchronous drafting'
    )
  return DraftModel(
    config=draft.config,
    dtype_name=draft.dtype.name,
    num_speculative_tokens=(
      4 if num_speculative_tokens is None else num_speculative_tokens
    ),
  )


def _check_tree_draft(
  target: Model,
  draft: Model | Drafter | None,
  num_speculative_tokens: int | None,
) -> None:
  if not isinstance(draft, Model):
    raise errors.UserError(
      f'a tree needs a draft model, got {"none" if draft is None else draft}'
    )
  if num_speculative_tokens is not None:
    raise errors.UserError(
      f'num_speculative_tokens={num_speculative_tokens} is for chains; a tree '
      'has the sizes of its TreeConfig'
    )
  shared_vocabulary.check(target, draft)
