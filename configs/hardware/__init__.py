"""Chips to plan for."""

from configs.hardware import google, nvidia
from swiftspec_jax import errors
from swiftspec_jax.simulator.planning.forward import Chip

CHIPS = {chip.name: chip for chip in (*nvidia.CHIPS, *google.CHIPS)}


def get(name: str) -> Chip:
  """Returns a chip.

  Raises:
    UserError: there is none of this name.
  """
  errors.check_known('configs/hardware has no chip', name, CHIPS)
  return CHIPS[name]
