"""Shapes of the verification of real models, for compilers and measurements."""

import jax
import jax.numpy as jnp

from kernels_pallas.vocabulary import vocabulary_spec


class ArgSpec(vocabulary_spec.VocabularySpec):
  """The arguments of one call; T nodes."""

  def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    mask = (self.batch_size, self.num_tokens, self.num_tokens)
    return (
      self.logits(),
      self.for_tokens(jnp.int32),
      self.for_tokens(jnp.int32),
      self.for_rows(jnp.int32),
      jax.ShapeDtypeStruct(mask, jnp.bool_),
    )

  def with_meaning(self, scores, token_ids, parents, sizes, mask):
    """A chain, of which the first half is what the target chooses."""
    node = jnp.arange(self.num_tokens, dtype=jnp.int32)[None]
    choices = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    is_chosen = node < (self.num_tokens + 1) // 2
    chain = jnp.tri(self.num_tokens, dtype=bool)[None]
    return (
      scores,
      jnp.where(is_chosen, jnp.roll(choices, 1, axis=1), token_ids),
      jnp.broadcast_to(node - 1, parents.shape),
      jnp.full_like(sizes, self.num_tokens),
      jnp.broadcast_to(chain, mask.shape),
    )


def arg_specs() -> list[ArgSpec]:
  """Returns all shapes, each once, with the models that have it."""
  return vocabulary_spec.of_all_models(ArgSpec)
