"""How tests run kernels without their devices."""

from jax.experimental.pallas import tpu as pltpu


def interpret_tpu():
  """Copies are simulated; races and reads of unwritten memory show."""
  return pltpu.InterpretParams(detect_races=True, uninitialized_memory='nan')
