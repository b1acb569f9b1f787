"""Shapes of the verification of real models, for compilers and measurements."""

import jax
import jax.numpy as jnp

from kernels_pallas import vocabulary_spec


class ArgSpec(vocabulary_spec.VocabularySpec):
  """The arguments of one call; T nodes."""

  def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the abstract arguments of `verify_tree`."""
    mask = (self.batch_size, self.num_tokens, self.num_tokens)
    return (
      self.logits(),
      self.for_tokens(jnp.int32),
      self.for_tokens(jnp.int32),
      self.for_rows(jnp.int32),
      jax.ShapeDtypeStruct(mask, jnp.bool_),
    )


def arg_specs() -> list[ArgSpec]:
  """Returns all shapes, each once, with the models that have it."""
  return vocabulary_spec.of_all_models(ArgSpec)
