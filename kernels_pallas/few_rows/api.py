"""Product of rows on a CPU, by what suits it.

The kernel is made for few. It takes any number, so that those of a prompt have
the bits that they would have alone.

Legend: N rows, K inputs, A axes of outputs.
"""

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from kernels_pallas import calls, dispatch, registry
from kernels_pallas.few_rows import arg_specs


def few_rows(
  rows: jax.Array,
  weight: jax.Array,
  scales: jax.Array | None = None,
  added: jax.Array | None = None,
  norm_scale: jax.Array | None = None,
  *,
  num_terms: int = 1,
  epsilon: float = 0.0,
  activation: str | None = None,
  implementation: str = 'auto',
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Returns rows times a weight whose outputs have their inputs side by side.

  Args:
    rows: [N, K] float32 or bfloat16.
    weight: [*A, K] of the same dtype, or int8. With a kernel, it is on one
      device.
    scales: f32[*A] of the outputs of a weight of int8, else None. Rows are
      rounded to int8 then, each with a scale of its own.
    added: [N, K] of the dtype of the rows, what is added to them. Then it is
      the norm of the sum that is multiplied; None leaves rows as they are.
    norm_scale: [K] scale of the norm, of any floating dtype.
    num_terms: integers for each number of such rows, see
      `int8_products.quantize_rows`.
    epsilon: number that is added to the mean square of the norm.
    activation: gate that joins the two parts of the outputs, of the first of
      axes A, or None; one of `swiglu.reference.ACTIVATIONS`.
    implementation: one of `dispatch.IMPLEMENTATIONS`.

  Returns:
    f32[N, *A], without the first axis of A where an activation joins it; in
    front of it the sum [N, K] where there is one. By the native kernel, the
    bits of a row are the same whatever rows are beside it.

  Raises:
    NotImplementedError: `implementation` cannot do it; never with 'auto'.
  """
  terms = f', {num_terms} terms' if num_terms > 1 else ''
  spec = arg_specs.ArgSpec(
    name=f'rows {rows.dtype}{list(rows.shape)}, '
    f'weight {weight.dtype}{list(weight.shape)}{terms}',
    num_tokens=rows.shape[0],
    num_inputs=rows.shape[1],
    out_shape=weight.shape[:-1],
    dtype=rows.dtype.name,
    weight_dtype=weight.dtype.name,
    num_terms=num_terms,
  )
  on_cpu = SingleDeviceSharding(jax.local_devices(backend='cpu')[0])
  chosen = calls.choose('few_rows', spec, implementation, on_cpu, rows.dtype)
  call = registry.function('few_rows', chosen)
  return call(
    rows,
    weight,
    scales,
    added,
    norm_scale,
    num_terms=num_terms,
    epsilon=epsilon,
    activation=activation,
  )


def usable_on(mesh: Mesh | None, implementation: str) -> str:
  """Returns the implementation for weights on a mesh.

  It is the reference where there is no kernel, which is all but a single CPU.
  None is JAX's default device.
  """
  is_one_cpu = mesh is None or (
    mesh.size == 1 and mesh.devices.flat[0].platform == 'cpu'
  )
  return usable(implementation) if is_one_cpu else dispatch.REFERENCE


def usable(implementation: str) -> str:
  """Returns the implementation, or the reference where there is none.

  CPUs beside an accelerator, which is JAX's default then, take the reference.
  """
  is_on_cpu = dispatch.platform_of(None) == 'cpu'
  has_kernel = implementation in ('auto', 'native')
  return implementation if is_on_cpu and has_kernel else dispatch.REFERENCE
