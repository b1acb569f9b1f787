r"""Times kernels, compares them with their references, and tunes their tiles.

  python -m experiments.kernels bench --kernel=swiglu --shape=llama-8b/tp1
  python -m experiments.kernels check
  python -m experiments.kernels tune --shape=llama-8b/tp1 --output=tiles.json
  SWIFTSPEC_TILES=tiles.json swiftspec generate ...

`bench` times kernels on the device at hand, against what else does the same.
Each shape gets the time of a call, and the bytes and products of a second as
shares of what a copy and a large product reach on this device. Beside it stand
the times of the reference and of libraries. These are
jax.nn.dot_product_attention (XLA, cuDNN) and the kernels that JAX ships. Where
there is no kernel for the device, the references alone are timed. On a CPU
few_rows and tree_attention have one.

`check` compares kernels with their references. `kernels='auto'` does this
itself where it can, before it takes a kernel for the first time. Where a second
process cannot open the device, as on TPUs, it takes the reference and notes
what it would have compared. Check does so, while no other program uses the
device: run a model once, then this, then the model again.

`tune` times tiles of kernels and keeps the best. Kernels take the tiles of that
file for this kind of device at exactly these shapes, and their defaults
elsewhere. Tiles are kept if they are faster by 3% and give what the defaults
give. Other entries of the file stay.
"""

import pathlib

from absl import flags

from experiments.flags import run_flags
from experiments.kernels import bench, check, kernel_cases, tune
from swiftspec_jax import errors
from swiftspec_jax.cli import program

_KERNELS = tuple(kernel_cases.KERNELS)
_KERNEL = flags.DEFINE_multi_enum('kernel', _KERNELS, _KERNELS, 'Kernels.')
_SHAPE = flags.DEFINE_multi_string(
  'shape', [''], 'Only shapes whose names have this in them; several add up.'
)
_EVERY = flags.DEFINE_integer(
  'every', 1, 'Take each Nth of these shapes only.', lower_bound=1
)
_REPEATS = run_flags.repeats(9)
_OUTPUT_DIR = flags.DEFINE_string(
  'output_dir',
  'experiments/results/kernels',
  'Of bench: directory of rows.jsonl and summary.json, which are replaced.',
)
_OUTPUT = flags.DEFINE_string(
  'output', 'tiles.json', 'Of tune: file of the tiles, which are added to it.'
)


def main(arguments: list[str]) -> None:
  """Runs the action that the command line names."""
  actions = {'bench': _bench, 'check': check.run, 'tune': _tune}
  if len(arguments) != 1 or arguments[0] not in actions:
    raise errors.UserError(
      f'name one of {", ".join(actions)}, got {" ".join(arguments) or "none"}'
    )
  actions[arguments[0]]()


def _bench() -> None:
  bench.run(_cases(), _REPEATS.value, pathlib.Path(_OUTPUT_DIR.value))


def _tune() -> None:
  tune.run(_cases(), _REPEATS.value, pathlib.Path(_OUTPUT.value))


def _cases() -> list[kernel_cases.Case]:
  """Returns the cases that the flags name."""
  found = [
    case
    for kernel in dict.fromkeys(_KERNEL.value)
    for case in kernel_cases.cases(kernel)
    if any(part in case.spec.name for part in _SHAPE.value)
  ]
  if not found:
    raise errors.UserError(
      f'--shape={_SHAPE.value[-1]} is in the name of no shape of '
      f'{", ".join(_KERNEL.value)}; names look like '
      f'{next(kernel_cases.cases(_KERNEL.value[0])).spec.name!r}'
    )
  return found[:: _EVERY.value]


if __name__ == '__main__':
  program.run_with_arguments(main)
