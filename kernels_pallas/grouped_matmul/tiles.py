"""What the kernels share: their limits, and in what pieces rows are multiplied.

Legend: R rows, M pieces.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.tiles import LANES

MOST_ROWS = 512  # such as 64 tokens with 8 experts each


def is_reordered(shape: tuple[int, int, int]) -> bool:
  """Whether XLA for TPUs keeps weights [X, K, N] with experts on the lanes.

  It does where these alone are whole lanes (seen in what jax 0.10.2 compiles
  for v5e and v5p), and would copy all of them for a kernel.
  """
  num_experts, *others = (size % LANES for size in shape)
  return not num_experts and all(others)


def pieces(
  chosen: jax.Array, num_experts: int, block_rows: int
) -> tuple[jax.Array, jax.Array]:
  """Returns rows in pieces of one expert and one block of rows.

  With blocks of 4 rows, experts 0 0 0 2 2 2 of rows 0 to 5 are in the pieces
  that start at rows 0, 3 and 4.

  Args:
    chosen: i32[R] expert of each row, in ascending order.
    num_experts: number of experts.
    block_rows: number of rows of a block.

  Returns:
    First row of each piece, with R after the last one, i32[M + 1], and its
    expert, i32[M]. M is as many as there can be. Pieces that are not needed are
    empty: they start at R, and have the last row's expert.
  """
  num_rows = len(chosen)
  num_blocks = -(-num_rows // block_rows)
  most = min(num_rows, num_experts) + num_blocks - 1
  row = jnp.arange(num_rows, dtype=jnp.int32)
  is_other = jnp.append(True, chosen[1:] != chosen[:-1])
  is_first = is_other | (row % block_rows == 0)
  firsts = jnp.flatnonzero(is_first, size=most + 1, fill_value=num_rows)
  firsts = firsts.astype(jnp.int32)
  return firsts, chosen[jnp.minimum(firsts[:-1], num_rows - 1)]
