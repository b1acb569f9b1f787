"""Shapes of the thresholds of real models, for compilers and measurements."""

import dataclasses

import jax
import jax.numpy as jnp

from kernels_pallas.vocabulary import vocabulary_spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgSpec(vocabulary_spec.VocabularySpec):
  """The arguments of one call.

  Attributes:
    has_top_k: whether there are such limits.
    has_top_p: the same.
  """

  has_top_k: bool = True
  has_top_p: bool = True

  def arrays(self) -> tuple[jax.ShapeDtypeStruct | None, ...]:
    return (
      self.logits(),
      self.for_rows(jnp.int32) if self.has_top_k else None,
      self.for_rows(jnp.float32) if self.has_top_p else None,
    )

  def with_meaning(self, logits, top_ks, top_ps):
    """Usual settings, and logits as wide as those of language models."""
    return (
      3 * logits,
      jnp.full_like(top_ks, 50) if self.has_top_k else None,
      jnp.full_like(top_ps, 0.9) if self.has_top_p else None,
    )

  def shape_class(self):
    """With whether the rows fill the sublanes of a TPU."""
    rows = self.batch_size * self.num_tokens
    return {**super().shape_class(), 'is_whole': rows % 8 == 0}


def arg_specs() -> list[ArgSpec]:
  """Returns all shapes, each once, with the models that have it."""
  return vocabulary_spec.of_all_models(ArgSpec)
