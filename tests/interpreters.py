"""How tests run kernels without their devices."""

from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

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
