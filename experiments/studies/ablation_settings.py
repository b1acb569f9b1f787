"""The configurations that the ablation compares."""

import dataclasses
from collections.abc import Sequence

import swiftspec_jax as ss
from experiments.flags import run_flags

# Where the flags leave them off.
_NUM_RESTART_STEPS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
  """One way to decode; `tree` is None for plain decoding."""

  name: str
  mode: str
  tree: ss.TreeConfig | None = None
  run_ahead: int = 1


def configurations(tree: ss.TreeConfig, run_ahead: int) -> list[Configuration]:
  """Returns all configurations.

  Args:
    tree: the sizes that all share. Its switches are on in the rows named after
      them only.
    run_ahead: rounds ahead in all but the autoregressive and the lock-step
      row.
  """
  base = dataclasses.replace(tree, num_restart_steps=0, prompt_lookup=False)

  def make(name, mode, run_ahead=run_ahead, **changes):
    return Configuration(
      name=name,
      mode=mode,
      tree=dataclasses.replace(base, **changes),
      run_ahead=run_ahead,
    )

  return [
    Configuration(name='autoregressive', mode='autoregressive'),
    make('serial', 'serial'),
    make('serial_prompt_lookup', 'serial', prompt_lookup=True),
    make('async_lockstep', 'async', run_ahead=0),
    make('async', 'async'),
    make(
      'async_restart',
      'async',
      num_restart_steps=tree.num_restart_steps or _NUM_RESTART_STEPS,
    ),
    make('async_prompt_lookup', 'async', prompt_lookup=True),
  ]


def choose(
  known: Sequence[Configuration], names: Sequence[str]
) -> list[Configuration]:
  """Returns the configurations of these names, all if there are none.

  Raises:
    UserError: a name is unknown.
  """
  by_name = {configuration.name: configuration for configuration in known}
  run_flags.check_names('configurations', names, by_name)
  return [by_name[name] for name in names or by_name]
