"""A model with everything that decoding needs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models.params import Params


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Model:
  """A loaded model: parameters on a mesh, and the tokenizer.

  Attributes:
    name: name that it was loaded by, for messages and results.
    config: static description.
    params: pytree of arrays on `mesh`.
    dtype: type of the KV cache and of the weights that are not quantized.
    mesh: the devices that hold it.
    tokenizer: tokenizer of the vocabulary.
  """

  name: str
  config: ModelConfig
  params: Params = dataclasses.field(repr=False)
  dtype: np.dtype
  mesh: Mesh = dataclasses.field(repr=False)
  tokenizer: tokenizer_lib.Tokenizer = dataclasses.field(repr=False)

  @property
  def num_bytes(self) -> int:
    """Size of the parameters on an accelerator, padding included.

    There a byte holds two numbers of four bits, which `nbytes` does not know.
    On CPUs each of them has a byte.
    """
    return sum(
      x.nbytes // 2 if x.dtype == jnp.int4 else x.nbytes
      for x in jax.tree.leaves(self.params)
    )
