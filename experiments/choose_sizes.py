r"""Sizes of an engine's programs, chosen from the steps of a load.

  python -m experiments.serve_load --rows=1,2,4,8 --query_tokens=8,16,32,64 \
    --output_dir=results
  python -m experiments.choose_sizes --steps=results/steps.jsonl \
    --max_rows=8 --max_query_tokens=64 --num_programs=12

Prints the flags --rows and --query_tokens of serve that pad least, and how much
of what the target computes would be padding, beside powers of two. Take steps
of a load like that to be served, whose engine had the largest sizes already.
"""

import pathlib

from absl import flags

from experiments import program
from experiments.load import step_shapes
from swiftspec_jax.cost_model.step_buckets import StepBuckets
from swiftspec_jax.serving.compilation import shape_classes

_STEPS = flags.DEFINE_string(
  'steps',
  None,
  'steps.jsonl of serve_load or simulate_load; all of its runs count.',
  required=True,
)
_NUM_PROGRAMS = flags.DEFINE_integer(
  'num_programs',
  20,
  'Most programs of the target for each of --contexts.',
  lower_bound=2,
)
_MAX_ROWS = flags.DEFINE_integer(
  'max_rows',
  None,
  'Most requests of a step; by default the most of --steps.',
  lower_bound=1,
)
_MAX_QUERY_TOKENS = flags.DEFINE_integer(
  'max_query_tokens',
  None,
  'Most tokens that a step feeds; by default the most of --steps.',
  lower_bound=1,
)


def main() -> None:
  """Runs the program."""
  shapes = step_shapes.read(pathlib.Path(_STEPS.value))
  most_rows = max((rows for rows, _ in shapes), default=1)
  most_tokens = max((tokens for _, tokens in shapes), default=1)
  usual = StepBuckets.powers_of_two(
    _MAX_ROWS.value or most_rows, _MAX_QUERY_TOKENS.value or most_tokens, 0
  )
  chosen = shape_classes.choose(shapes, usual, _NUM_PROGRAMS.value)
  print(f'--rows={_text(chosen.rows)}')
  print(f'--query_tokens={_text(chosen.query_tokens)}')
  for name, buckets in (('these', chosen), ('powers of two', usual)):
    print(
      f'{name}: {shape_classes.padded_share(shapes, buckets):.1%} padding in '
      f'{shape_classes.num_programs(buckets)} programs for each context'
    )


def _text(sizes: tuple[int, ...]) -> str:
  return ','.join(map(str, sizes))


if __name__ == '__main__':
  program.run(main)
