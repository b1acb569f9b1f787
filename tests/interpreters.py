"""How tests run kernels without their devices."""

import functools

from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import registry

# Of Mosaic GPU; that of JAX 0.10 knows no clusters and no transposed tiles.
HAS_GPU_INTERPRETER = hasattr(plgpu, 'force_gpu_interpret_mode')


def interpret_tpu():
  """Copies are simulated; races and reads of unwritten memory show."""
  return pltpu.InterpretParams(detect_races=True, uninitialized_memory='nan')


def interpreting_gpu():
  """A context in which Mosaic GPU kernels are traced for the same."""
  params = plgpu.InterpretGPUParams(
    detect_races=True, uninitialized_memory='nan'
  )
  return plgpu.force_gpu_interpret_mode(params)


def implementations(kernel, **configs):
  """Returns functions of a kernel by name, the reference and interpreted ones.

  Args:
    kernel: name.
    **configs: tiles of each implementation; None for its own.
  """
  found = {'reference': registry.function(kernel, 'reference')}
  for name, config in configs.items():
    options = {} if config is None else {'config': config}
    if name != 'native':
      is_tpu = name == 'pallas_tpu'
      options['interpret'] = interpret_tpu() if is_tpu else True
    found[name] = functools.partial(registry.function(kernel, name), **options)
  return found
