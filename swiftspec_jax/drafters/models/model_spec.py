"""What all specs of draft models have in common."""

from swiftspec_jax import errors
from swiftspec_jax.drafters.models import feature_draft, shared_vocabulary
from swiftspec_jax.drafters.spec import DraftSpec
from swiftspec_jax.models.model import Model


class ModelSpec(DraftSpec):
  """Base of specs whose `model` drafts in the pages of the target."""

  needs_pages = True

  model: Model

  def model_for(self, target: Model) -> Model:
    check_fits(self.model, target)
    if self.model.mesh != target.mesh:
      raise errors.UserError(
        f'{self.model.name} lies on other devices than {target.name}; load '
        'both with the same `devices`'
      )
    return self.model


def check_fits(draft: Model, target: Model) -> None:
  """Raises UserError unless a model can draft for a target."""
  feature_draft.check_layers(draft, target)
  shared_vocabulary.check(target, draft)
