"""Shapes of drawn chains of real models, for compilers and measurements."""

import jax
import jax.numpy as jnp

from kernels_pallas.vocabulary import vocabulary_spec


class ArgSpec(vocabulary_spec.VocabularySpec):
  """The arguments of one call."""

  def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the abstract arguments of `accept_chain`."""
    return (
      self.logits(),
      self.for_tokens(jnp.int32),
      self.for_tokens(jnp.float32),
    )

  def with_meaning(self, law, token_ids, bars):
    """Some tokens stand; the last place has none."""
    bars = (jnp.abs(bars) / self.vocab_size).at[:, -1].set(jnp.inf)
    return law, token_ids, bars


def arg_specs() -> list[ArgSpec]:
  """Returns all shapes, each once, with the models that have it."""
  return vocabulary_spec.of_all_models(ArgSpec)
