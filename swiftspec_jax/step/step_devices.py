"""How many of the target's devices run a step.

LoongServe (Wu et al., arXiv 2404.09526): reading a prompt takes more devices
than decoding after it. The first devices are in every step and keep all keys
and values, so that none move when the number changes.
"""

import dataclasses

from swiftspec_jax import errors, sharding
from swiftspec_jax.model import Model
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.planning.elastic import PrefillCosts
from swiftspec_jax.scheduling.step_plan import StepPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepDevices:
  """The numbers of devices that a step can have.

  Attributes:
    numbers: numbers of devices, ascending. The least is that of the devices
      that keep all keys and values, the last that of all devices of the target.
    costs: seconds of a step for each of `numbers`; a step gets the fastest one.
      None: a step gets all devices if it reads a prompt, and else the fewest.
  """

  numbers: tuple[int, ...]
  costs: PrefillCosts | None = None

  def __post_init__(self):
    numbers = self.numbers
    is_ascending = bool(numbers) and list(numbers) == sorted({*numbers})
    checks = {'numbers': (is_ascending and numbers[0] >= 1, 'ascending, >= 1')}
    if self.costs is not None:
      measured = self.costs.coefficients.keys()
      checks['costs'] = (measured == {*numbers}, f'those of {numbers}')
    errors.check_fields(self, checks)

  @property
  def num_keeping(self) -> int:
    """Devices that keep all keys and values."""
    return self.numbers[0]

  def choose(self, step: StepPlan) -> int:
    """Returns the number of devices for a step."""
    if self.costs is not None:
      return self.costs.fastest(step.num_query_tokens, step.starts)
    reads_prompts = len(step.slots) > step.num_decoding
    return self.numbers[-1 if reads_prompts else 0]

  def models_of(self, target: Model) -> dict[int, Model]:
    """Returns the target on each number of devices.

    Args:
      target: target on all of them, with padding for as many.

    Raises:
      UserError: the numbers do not fit the target's devices.
    """
    num_devices = target.mesh.size
    num_sharing = sharding.sequence_devices(target.mesh)
    unit = num_devices // num_sharing
    if self.numbers[-1] != num_devices or any(
      number % unit or num_devices % number for number in self.numbers
    ):
      raise errors.UserError(
        f'numbers={self.numbers} do not fit {target.name}: {num_sharing} of '
        f'its {num_devices} devices share tokens. Each number must divide '
        f'{num_devices}, the last one, and be a multiple of {unit}'
      )
    return {x: _on_part(target, x // unit) for x in self.numbers}


def _on_part(target: Model, num_sharing: int) -> Model:
  """Returns the target on the devices of the first that share tokens."""
  mesh = sharding.part_of(target.mesh, num_sharing)
  if mesh == target.mesh:
    return target
  params = params_lib.on_part(target.params, mesh)
  return dataclasses.replace(target, params=params, mesh=mesh)
