"""Shapes of fused attention in real models, for compilers and measurements."""

import dataclasses

import jax
import jax.numpy as jnp

from kernels_pallas.tree_attention import arg_specs as tree_specs

_CONTEXT = 1_000  # the code does not depend on it


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgSpec(tree_specs.ArgSpec):
  """The arguments of one call, on one device, as of tree attention."""

  DONATED = (3, 4)  # keys and values

  def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    queries, keys, values, lengths, *others = super().arrays()
    batch, tokens, num_kv_heads, num_groups, head_dim = queries.shape
    heads = (batch, tokens, num_kv_heads, num_groups + 2, head_dim)
    angles = jax.ShapeDtypeStruct((batch, tokens, head_dim // 2), jnp.float32)
    return (
      jax.ShapeDtypeStruct(heads, self.dtype),
      angles,
      angles,
      keys,
      values,
      lengths,
      lengths,
      *others,
    )

  def with_meaning(
    self, heads, cos, sin, keys, values, _, lengths, mask, *others, **meaning
  ):
    """The new tokens are the last rows of the tree."""
    _, keys, values, lengths, mask, *others = super().with_meaning(
      heads, keys, values, lengths, mask, *others, **meaning
    )
    starts = lengths + self.tree_size - self.num_tokens
    return (heads, cos, sin, keys, values, starts, lengths, mask, *others)


def arg_specs() -> list[ArgSpec]:
  """Returns the shapes of tree attention with one context."""
  return [
    ArgSpec(**dataclasses.asdict(spec))
    for spec in tree_specs.arg_specs()
    if spec.context == _CONTEXT
  ]
