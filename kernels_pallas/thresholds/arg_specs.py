"""Shapes of the thresholds of real models, for compilers and measurements."""

import jax
import jax.numpy as jnp

from kernels_pallas import vocabulary_spec


class ArgSpec(vocabulary_spec.VocabularySpec):
  """The arguments of one call: with top-k and top-p."""

  def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the abstract arguments of `find_thresholds`."""
    return (
      self.logits(),
      self.for_rows(jnp.int32),
      self.for_rows(jnp.float32),
    )


def arg_specs() -> list[ArgSpec]:
  """Returns all shapes, each once, with the models that have it."""
  return vocabulary_spec.of_all_models(ArgSpec)
