r"""Sizes of an engine's programs, chosen from the steps of a load.

  python -m experiments.serve_load --rows=1,2,4,8 --query_tokens=8,16,32,64 \
    --output_dir=results
  python -m experiments.studies.choose_sizes --steps=results/steps.jsonl \
    --rows=1,2,4,8 --query_tokens=8,16,32,64

Prints the flags --rows and --query_tokens that pad least, of which the largest
stay as they are, and how much of what the target computes is padding, before
and after. Take the steps of a load like that to be served.
"""

import collections
import pathlib

from absl import flags

from swiftspec_jax import errors
from swiftspec_jax.cli import program
from swiftspec_jax.cli.flags import flag_values
from swiftspec_jax.engine import shape_classes
from swiftspec_jax.engine.shape_classes import Shape
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.runtime import input_files

_STEPS = flags.DEFINE_string(
  'steps',
  None,
  'steps.jsonl of serve_load or simulate_load; all of its runs count.',
  required=True,
)
_ROWS = flags.DEFINE_list(
  'rows', None, 'Numbers of requests in a step so far.', required=True
)
_QUERY_TOKENS = flags.DEFINE_list(
  'query_tokens',
  None,
  'Numbers of tokens that a step feeds so far.',
  required=True,
)
_NUM_PROGRAMS = flags.DEFINE_integer(
  'num_programs',
  None,
  'Most programs of the target for each of the contexts; by default as many as '
  'so far.',
)


def main() -> None:
  """Runs the program."""
  shapes = _read(pathlib.Path(_STEPS.value))
  before = StepBuckets(
    rows=flag_values.sizes(_ROWS), query_tokens=flag_values.sizes(_QUERY_TOKENS)
  )
  most = _NUM_PROGRAMS.value
  if most is None:
    most = shape_classes.num_programs(before)
  after = shape_classes.choose(shapes, before, most)
  for name, buckets in (('before', before), ('after', after)):
    print(
      f'{name}: --rows={_text(buckets.rows)} '
      f'--query_tokens={_text(buckets.query_tokens)}, at most '
      f'{shape_classes.num_programs(buckets)} programs for each context, '
      f'{shape_classes.padded_share(shapes, buckets):.1%} padding'
    )


def _read(path: pathlib.Path) -> collections.Counter[Shape]:
  """Returns the number of steps of each shape, all runs together.

  Raises:
    UserError: the file cannot be read, or is no such file.
  """
  shapes: collections.Counter[Shape] = collections.Counter()
  failed = f'{path} is no steps.jsonl of serve_load or simulate_load: '
  with errors.explained(failed, (ValueError, TypeError, KeyError)):
    for _, values in input_files.read_lines(path, 'steps'):
      for rows, tokens, count in values['shapes']:
        shapes[int(rows), int(tokens)] += int(count)
  return shapes


def _text(sizes: tuple[int, ...]) -> str:
  return ','.join(map(str, sizes))


if __name__ == '__main__':
  program.run(main)
