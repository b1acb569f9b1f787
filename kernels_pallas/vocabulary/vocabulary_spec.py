"""Shapes of the kernels that read the logits of the whole vocabulary."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from kernels_pallas import call_spec, model_shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class VocabularySpec(call_spec.CallSpec):
  """The sizes of one call.

  Attributes:
    batch_size: B.
    num_tokens: T.
    vocab_size: V.
  """

  batch_size: int
  num_tokens: int
  vocab_size: int

  @property
  def num_bytes(self) -> int:
    """Bytes of the logits alone."""
    return 4 * self.batch_size * self.num_tokens * self.vocab_size

  def logits(self) -> jax.ShapeDtypeStruct:
    """Returns the abstract f32[B, T, V]."""
    shape = (self.batch_size, self.num_tokens, self.vocab_size)
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  def for_tokens(self, dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns an abstract array [B, T]."""
    return jax.ShapeDtypeStruct((self.batch_size, self.num_tokens), dtype)

  def for_rows(self, dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns an abstract array [B]."""
    return jax.ShapeDtypeStruct((self.batch_size,), dtype)


_Spec = TypeVar('_Spec', bound=VocabularySpec)


@model_shapes.once_each
def of_all_models(make: Callable[..., _Spec]) -> Iterator[tuple[str, _Spec]]:
  """Yields models and their shapes; `make` is the class of these."""
  for model, batch_size, num_tokens in itertools.product(
    model_shapes.MODELS, (1, 4), model_shapes.NUM_TOKENS
  ):
    spec = make(
      name=f'B{batch_size} T{num_tokens} V{model.vocab_size}',
      batch_size=batch_size,
      num_tokens=num_tokens,
      vocab_size=model.vocab_size,
    )
    yield model.name, spec
