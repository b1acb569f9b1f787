"""Sum, norm and product as a Pallas Triton kernel for NVIDIA GPUs.

The kernel of `quantized_matmul`, whose programs add and scale the rows as they
read them. A row's own factor, from its mean square, multiplies the few sums in
the end. So that factor is known in time, and neither the sum nor the norm is a
launch.
"""

import jax

from kernels_pallas.quantized_matmul import pallas_gpu

Config = pallas_gpu.Config
check = pallas_gpu.check


def normed_matmul(
  x: jax.Array,
  added: jax.Array,
  norm_scale: jax.Array,
  values: jax.Array,
  scales: jax.Array,
  *,
  epsilon: float,
  activation: str | None = None,
  config: Config | None = None,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """See `api.normed_matmul`; raises NotImplementedError as `check`."""
  product, total = pallas_gpu.launch(
    'normed_matmul',
    [x, added, norm_scale],
    values,
    scales,
    activation=activation,
    config=config,
    interpret=interpret,
    epsilon=epsilon,
  )
  return total, product
