"""What the kernels of quantized products share: their limits and pieces."""

import math

import jax

from kernels_pallas import products, tiles

MOST_ROWS = 64
MOST_INPUTS = 128  # of a chunk on GPUs
_NUM_PROGRAMS = 256  # on GPUs, about two for each multiprocessor
# Of a number, by dtype of the weight.
BITS = {'int8': 8, 'int4': 4, 'float8_e4m3fn': 8}


def check(x: jax.Array, values: jax.Array, most_rows: int = MOST_ROWS) -> None:
  """Raises NotImplementedError with the reason if no kernel can do it.

  Args:
    x: rows of the product.
    values: weight.
    most_rows: number of rows that kernels take.
  """
  tiles.check_most(len(x), most_rows, 'rows')
  products.check_dtype(x.dtype)
  products.check_dtype(values.dtype, BITS)


def chunk_size_of(num_inputs: int, num_groups: int) -> int:
  """Returns inputs of a chunk on GPUs: a group, or if it is one, a divisor."""
  if num_groups > 1:
    return num_inputs // num_groups
  return math.gcd(num_inputs, MOST_INPUTS)


def num_splits(num_tiles: int, num_inputs: int, most: int) -> int:
  """Returns programs on GPUs that share a tile, to occupy a device.

  Args:
    num_tiles: number of tiles of outputs.
    num_inputs: number of inputs.
    most: most programs that may share one.
  """
  most = min(most, -(-num_inputs // MOST_INPUTS))
  return max(min(_NUM_PROGRAMS // num_tiles, most), 1)
