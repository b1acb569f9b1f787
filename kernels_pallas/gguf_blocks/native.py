"""Products with, and rows of, weights in the blocks of GGUF files, in C++.

A tensor u8[start + M x bytes of a row] is `start` bytes of something else, then
M rows of blocks: the outputs, with their inputs side by side.

Legend: N rows, K inputs, M outputs.
"""

import dataclasses
from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.few_rows import native
from kernels_pallas.native import library


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of blocks.

  Attributes:
    number: the number of the kind in files.
    size: number of weights in a block.
    num_bytes: bytes of a block.
  """

  number: int
  size: int
  num_bytes: int

  def row_bytes(self, num_inputs: int) -> int:
    """Returns the bytes of the weights of an output."""
    return num_inputs // self.size * self.num_bytes


KINDS = {
  'Q4_0': Kind(2, 32, 18),
  'Q4_1': Kind(3, 32, 20),
  'Q5_0': Kind(6, 32, 22),
  'Q5_1': Kind(7, 32, 24),
  'Q8_0': Kind(8, 32, 34),
  'Q4_K': Kind(12, 256, 144),
  'Q5_K': Kind(13, 256, 176),
  'Q6_K': Kind(14, 256, 210),
}


_libraries: dict[frozenset[str], str] = {}  # names of those that are there


def check(kinds: Collection[str]) -> None:
  """Loads a library for some kinds; one for all takes longer to compile.

  Raises:
    NotImplementedError: there is no native library, with the remedy.
  """
  numbers = sorted(KINDS[kind].number for kind in kinds)
  name = '-'.join(['gguf_blocks', *map(str, numbers)])
  library.check(name)
  _libraries[frozenset(kinds)] = name


def _library_for(kinds: Collection[str]) -> str | None:
  """Returns the smallest library that is there; None stands for all formats."""
  fitting = [x for x in _libraries if x.issuperset(kinds)]
  return _libraries[min(fitting, key=len)] if fitting else None


def multiply(
  rows: jax.Array,
  tensors: Sequence[jax.Array],
  kinds: Sequence[str],
  starts: Sequence[int],
  added: jax.Array | None = None,
  norm_scale: jax.Array | None = None,
  *,
  epsilon: float = 0.0,
  activation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Returns rows times weights, whose outputs are one after the other.

  Rows are rounded to int8 with a scale for each 32 numbers, integers summed
  exactly, and what the blocks give in float32. The bits of a row are the same
  whatever rows are beside it.

  Args:
    rows: [N, K] of any floating dtype.
    tensors: weights.
    kinds: key of `KINDS` for each tensor.
    starts: number of bytes before the first block of each tensor.
    added: [N, K] or None, as in `few_rows.api`.
    norm_scale: [K] or None, as there.
    epsilon: number that is added to the mean square of the norm.
    activation: gate that joins the first and the second half of M, or None.

  Returns:
    f32[N, M], M being the outputs of all tensors, or f32[N, M / 2] with an
    activation; in front of it the sum [N, K] where there is one.

  Raises:
    NotImplementedError: there is no native library, with the remedy.
  """
  dtype = rows.dtype
  if added is not None and dtype.name not in native.DTYPES:
    rows, added = rows.astype(jnp.float32), added.astype(jnp.float32)
  num_inputs = rows.shape[1]
  num_outputs = sum(
    (x.size - start) // KINDS[kind].row_bytes(num_inputs)
    for x, kind, start in zip(tensors, kinds, starts, strict=True)
  )
  found = native.call(
    'gguf_multiply',
    (2, num_outputs // 2) if activation else (num_outputs,),
    native.in_float32(rows, added),
    added,
    norm_scale,
    *tensors,
    epsilon=epsilon,
    activation=activation,
    name=_library_for(kinds),
    kinds=np.array([KINDS[kind].number for kind in kinds], np.int64),
    starts=np.array(starts, np.int64),
  )
  return found if added is None else (found[0].astype(dtype), found[1])


def take_rows(
  tensor: jax.Array, indices: jax.Array, kind: str, start: int, num_inputs: int
) -> jax.Array:
  """Returns the weights f32[..., K] of the outputs i32[...] of a tensor."""
  return library.call(
    'gguf_take',
    jax.ShapeDtypeStruct((*indices.shape, num_inputs), jnp.float32),
    tensor,
    indices,
    name=_library_for([kind]),
    kind=np.int64(KINDS[kind].number),
    start=np.int64(start),
  )
