"""Products and lookups that are fast on CPUs and GPUs, too.

On TPUs the products of bfloat16 are, in effect, the plain ones.

XLA's CPU backend (seen with jax 0.10.2 on an AMD EPYC) multiplies bfloat16 fast
only if it is asked for a float32 result: 8 times faster for 8 rows. It never
multiplies a single row of bfloat16 fast. It looks up bfloat16 in float32, and
in a loop it first converts the whole table.

XLA for GPUs (seen in what jax 0.10.2 compiles for the H200) writes the weight
times a single row to memory, and then adds the columns of that. Two rows become
a product that reads the weight once.

Legend: N rows, K inputs, V table rows.
"""

import contextlib
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

# By dtype, of the largest number of a result: implementations add up in
# different orders. Other dtypes must be equal.
TOLERANCES = {'float32': 2**-16, 'bfloat16': 2**-6}

# Rows up to which it is the weight's bytes that a product takes time for.
FEW_ROWS = 64


def at_full_precision(
  dtype: jax.typing.DTypeLike,
) -> contextlib.AbstractContextManager:
  """Returns a context whose products keep all bits of float32.

  By default XLA rounds the factors: to TF32 on GPUs, to bfloat16 on TPUs. Then
  the products of one token and of eight differ enough to change a text.

  Args:
    dtype: dtype of a model. With others than float32 nothing changes: products
      of bfloat16 are exact.
  """
  if jnp.dtype(dtype) != jnp.float32:
    return contextlib.nullcontext()
  return jax.default_matmul_precision('highest')


def precision(dtype: jax.typing.DTypeLike) -> jax.lax.Precision | None:
  """Returns that of products with rows of `dtype`: few bits are exact."""
  return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def dot(x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns x times y in float32, with all bits; for use in kernels."""
  return jnp.dot(
    x, y, precision=precision(x.dtype), preferred_element_type=jnp.float32
  )


def check_dtype(
  dtype: jax.typing.DTypeLike,
  known: Collection[str] = ('bfloat16', 'float32'),
) -> None:
  """Raises NotImplementedError for a dtype that a kernel does not know."""
  name = jnp.dtype(dtype).name
  if name not in known:
    raise NotImplementedError(f'dtype {name} is not {" or ".join(known)}')


def multiply(rows: jax.Array, weight: jax.Array) -> jax.Array:
  """Returns rows [N, K] times a weight [K, ...]: [N, ...], in their dtype.

  The axes of the weight are not merged: one of them may be sharded.
  """
  outputs = 'abc'[: weight.ndim - 1]
  return einsum(f'nk,k{outputs}->n{outputs}', rows, weight)


def einsum(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns what `jnp.einsum` does of two arrays, in their dtype."""
  plain = functools.partial(jnp.einsum, subscripts)
  if x.dtype != jnp.bfloat16:
    return plain(x, y)

  def wide(x, y):
    return _of_three_rows(subscripts, x, y).astype(x.dtype)

  on_gpu = wide if len(x) == 1 else plain
  return jax.lax.platform_dependent(x, y, cpu=wide, cuda=on_gpu, default=plain)


def stored_dtype(
  dtype: jax.typing.DTypeLike, mesh: jax.sharding.Mesh
) -> jnp.dtype:
  """Returns in what to store numbers of a dtype that a loop updates.

  On CPUs float32 for bfloat16, which it holds exactly: XLA would convert the
  whole array, there and back, to write or read a part of it, and multiplies
  many small matrices of bfloat16 6 times slower.
  """
  is_on_cpu = mesh.devices.flat[0].platform == 'cpu'
  is_wide = is_on_cpu and jnp.dtype(dtype) == jnp.bfloat16
  return jnp.dtype(jnp.float32 if is_wide else dtype)


def take_rows(table: jax.Array, indices: jax.Array) -> jax.Array:
  """Returns table[indices] of a table [V, K] and indices i32[...]."""
  if indices.size == 1:
    # XLA for GPUs makes a slice of a single row, and to slice a table that is
    # sharded it first gathers all of it on each device.
    pair = jnp.broadcast_to(indices.reshape(1), 2)
    return take_rows(table, pair)[:1].reshape(*indices.shape, -1)
  # With indices of the loop's own, the conversion cannot be moved out of it.
  table, indices = jax.lax.optimization_barrier((table, indices))
  return table[indices]


def multiply_transposed(rows: jax.Array, weight: jax.Array) -> jax.Array:
  """Returns rows [N, K] times a weight [..., K]: f32[N, ...].

  The form for CPUs. With a weight of float32 on the left, XLA's CPU backend
  reads it as it lies in memory. Then 8 rows take 1.3 times the time of one.
  With bfloat16 it is faster on the right.

  Args:
    rows: rows to multiply.
    weight: transposed weight. Of its axes only the first two may be sharded.
  """
  if rows.dtype == jnp.bfloat16:
    padding = ((0, max(3 - len(rows), 0)), (0, 0))  # see `_of_three_rows`
    padded = jnp.pad(rows, padding)
    return multiply_parts(wide_einsum, padded, weight)[: len(rows)]
  if len(rows) > FEW_ROWS:
    return multiply_parts(wide_einsum, rows, weight)
  outputs = 'abc'[: weight.ndim - 1]
  product = wide_einsum(f'{outputs}k,nk->{outputs}n', weight, rows)
  # Without the barrier XLA swaps the operands.
  return jnp.moveaxis(jax.lax.optimization_barrier(product), -1, 0)


def multiply_parts(
  einsum: Callable[[str, jax.Array, jax.Array], jax.Array],
  rows: jax.Array,
  weight: jax.Array,
) -> jax.Array:
  """Returns rows [N, K] times a weight [..., K]: [N, ...].

  The form for many rows on CPUs. XLA would first copy a weight whose outputs
  have several axes. So the first axis is that of a batch, and the others are
  merged.

  Args:
    einsum: function that makes the products.
    rows: rows to multiply.
    weight: transposed weight. Of its axes only the first two may be sharded.
  """
  if weight.ndim == 2:
    return einsum('nk,bk->nb', rows, weight)
  parts = weight.reshape(len(weight), -1, weight.shape[-1])
  rows_of_parts = jnp.broadcast_to(rows, (len(parts), *rows.shape))
  product = einsum('ank,abk->anb', rows_of_parts, parts)
  return jnp.moveaxis(product, 0, 1).reshape(len(rows), *weight.shape[:-1])


def look_up_scores(
  rows: jax.Array,
  table: jax.Array,
  on_cpu: Callable[[jax.Array, jax.Array], jax.Array] = multiply_transposed,
) -> jax.Array:
  """Returns the products f32[N, V] of rows [N, K] and table rows [V, K].

  Args:
    rows: rows to multiply.
    table: rows to multiply with.
    on_cpu: function that makes them on CPUs.
  """

  def plain(rows, table):
    # Vocabulary first: the table is read row by row as it lies in memory.
    return wide_einsum('vk,nk->vn', table, rows).T

  return jax.lax.platform_dependent(rows, table, cpu=on_cpu, default=plain)


def _of_three_rows(subscripts, x, y):
  """`wide_einsum`, with copies of the last row if x has fewer.

  With two rows and the AMX instructions of a CPU, the bits are others than with
  more.
  """
  size = len(x)
  of_y = subscripts.replace('->', ',').split(',')[1]
  if size < 3 and subscripts[0] not in of_y:
    x = jnp.concatenate([x, *[x[-1:]] * (3 - size)])
  return wide_einsum(subscripts, x, y)[:size]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def wide_einsum(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns the einsum of two arrays in float32.

  Each axis must be in two of the three terms. The gradient of x is a product in
  the dtype of the arrays, too, where JAX would make it one in float32. That of
  y is in float32, which is no slower on CPUs.
  """
  return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _forward(subscripts, x, y):
  return wide_einsum(subscripts, x, y), (x, y)


def _backward(subscripts, arrays, cotangent):
  x, y = arrays
  of_x, of_y, of_result = subscripts.replace('->', ',').split(',')
  to_x = wide_einsum(
    f'{of_result},{of_y}->{of_x}', cotangent.astype(x.dtype), y
  )
  to_y = jnp.einsum(
    f'{of_x},{of_result}->{of_y}', x.astype(jnp.float32), cotangent
  )
  return to_x.astype(x.dtype), to_y.astype(y.dtype)


wide_einsum.defvjp(_forward, _backward)


def apart(arrays: Any) -> Any:
  """Returns arrays that XLA fuses nothing across.

  What is computed of them then rounds the same, wherever they come from. On
  CPUs kernels of our own see to that.
  """
  return jax.lax.platform_dependent(
    arrays, cpu=lambda x: x, default=jax.lax.optimization_barrier
  )
