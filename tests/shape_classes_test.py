"""Sizes that are chosen from a load, and layouts of a step, by hand."""

import collections
import dataclasses
import itertools

import engine_cases
import numpy as np
import programs
import pytest
from decoding_cases import requests_of, sizes_of
from serving_cases import linear_costs

import swiftspec_jax as ss
from swiftspec_jax import errors, policies, simulator
from swiftspec_jax.engine import shape_classes
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.scheduling.step_plan import StepPlan


@pytest.mark.parametrize('seed', range(20))
def test_best_classes_are_those_of_exhaustive_search(seed):
  generator = np.random.default_rng(seed)
  sizes = generator.integers(1, 30, generator.integers(1, 9))
  counts = generator.integers(0, 5, len(sizes))
  ends = sorted(set(sizes.tolist()))

  def total(classes):
    places = np.searchsorted(classes, sizes)
    return int(counts @ np.array(classes)[places])

  for number, classes in enumerate(
    shape_classes.best_classes(sizes, counts, 3), 1
  ):
    every = itertools.combinations(ends[:-1], number - 1)
    assert total(classes) == min(total((*some, ends[-1])) for some in every)
    assert len(classes) == number


@pytest.mark.parametrize('most', [2, 5, 6])
def test_sizes_of_rows_and_tokens_share_the_programs(most):
  generator = np.random.default_rng(most)
  buckets = StepBuckets(rows=(6,), query_tokens=(20,))
  shapes = collections.Counter()
  for _ in range(8):
    rows = int(generator.integers(1, 6))
    tokens = rows + int(generator.integers(0, 3) * generator.integers(0, 7))
    shapes[rows, tokens] += int(generator.integers(1, 4))

  def total(found):
    # A mixed step adds one for each of its rows.
    rows = sum(n * found.pad_rows(r) for (r, t), n in shapes.items() if t > r)
    return shape_classes.num_computed(shapes, found) + rows

  def subsets(most):
    smaller = range(1, most)
    sizes = range(most)
    yield from itertools.chain.from_iterable(
      itertools.combinations(smaller, size) for size in sizes
    )

  every = (
    dataclasses.replace(buckets, rows=(*rows, 6), query_tokens=(*tokens, 20))
    for rows in subsets(6)
    for tokens in itertools.chain.from_iterable(
      itertools.combinations(sorted({t for _, t in shapes} - {20}), size)
      for size in range(most)
    )
  )
  least = min(
    total(some) for some in every if shape_classes.num_programs(some) <= most
  )
  found = shape_classes.choose(shapes, buckets, most)
  assert total(found) == least
  assert shape_classes.num_programs(found) <= most
  assert (found.max_rows, found.max_query_tokens) == (6, 20)


# Two rows decode, one verifies 52 draft tokens, and a prompt is read.
STEP = StepPlan(
  request_ids=np.arange(4),
  slots=np.arange(4),
  starts=np.array([1656, 1985, 1983, 956]),
  num_query_tokens=np.array([1, 1, 53, 362]),
  lengths=np.array([0, 0, 52, 0]),
  is_sampled=np.ones(4, bool),
  num_ahead=np.zeros(4, int),
  num_decoding=3,
  shape=(4, 417),
  padded_rows=4,
  padded_query_tokens=512,
)
BUCKETS = StepBuckets(
  rows=(1, 2, 4), query_tokens=(64, 384, 512), lengths=(0, 52)
)


def test_rows_that_have_ended_were_computed():
  none = STEP.only(np.zeros(4, bool))
  assert none.shape == STEP.shape
  assert none.num_computed_tokens == 512


def test_padding_of_a_step():
  share = shape_classes.padded_share({(4, 417): 1}, BUCKETS)
  assert share == pytest.approx(0.186, abs=5e-4)
  # Each stage alone, in tiles: 384 + 64 + 16 + 16.
  tiles = StepBuckets(rows=(16,), query_tokens=(64, 384))
  stages = {(1, 362): 1, (1, 53): 1, (1, 1): 2}
  share = shape_classes.padded_share(stages, tiles)
  assert share == pytest.approx(0.131, abs=5e-4)
  assert shape_classes.padded_share({(4, 512): 3, (2, 2): 1}, BUCKETS) == 0


def test_seconds_of_a_step():
  """A second for the forward and each draft step, 0.01 for each token."""
  seconds = simulator.step_seconds(
    linear_costs(fixed=1, query_tokens=0.01, steps=1),
    BUCKETS,
    policies.DraftPlan(lengths=np.array([0, 0, 52])),
    STEP,
  )
  assert seconds == pytest.approx(52 + 1 + 0.01 * 512)


def test_a_step_of_a_token_a_row_has_a_program_of_its_rows():
  step = dataclasses.replace(
    STEP, num_query_tokens=np.ones(4, int), shape=(4, 4)
  )
  assert step.num_computed_tokens == 4
  assert shape_classes.num_computed({(4, 4): 2, (3, 3): 1}, BUCKETS) == 12


@pytest.mark.parametrize(
  ('shapes', 'most', 'message'),
  [
    ({}, 9, 'there are no steps to choose sizes from'),
    ({(1, 1): 1}, 1, '1 programs are too few: at least 2'),
    ({(5, 9): 1}, 9, 'a step of 5 rows does not fit into the largest size, 4'),
    ({(1, 600): 1}, 9, '600 query_tokens does not fit into the largest size'),
    ({(3, 2): 1}, 9, 'a step of 3 rows and 2 tokens is none'),
  ],
)
def test_what_cannot_be_chosen(shapes, most, message):
  with pytest.raises(errors.UserError, match=message):
    shape_classes.choose(shapes, BUCKETS, most)


def _serve(buckets):
  """Returns the tokens of some requests, and the shapes of all steps."""
  sizes = engine_cases.NUM_PAGES, engine_cases.MAX_CONTEXT, 8
  sizes = sizes_of(*sizes, **dataclasses.asdict(buckets))
  lookup, policy = ss.PromptLookup(prompt_lookup_min=1), FixedLength(3)
  engine = Engine(engine_cases.TARGET, lookup, sizes=sizes, policy=policy)
  requests = requests_of(5, max_new_tokens=20)
  handles = [engine.submit(request) for request in requests]
  shapes = collections.Counter()
  while engine.num_requests:
    step = engine.step().step
    shapes[len(step.slots), int(step.num_query_tokens.sum())] += 1
  return [handle.result().token_ids for handle in handles], shapes


def test_an_engine_takes_chosen_sizes_and_gives_the_same_tokens():
  usual = StepBuckets(rows=(1, 4), query_tokens=(24,), lengths=(0, 1, 2, 3))
  token_ids, shapes = _serve(usual)
  chosen = shape_classes.choose(
    shapes, usual, shape_classes.num_programs(usual)
  )
  assert chosen != usual
  assert shape_classes.padded_share(
    shapes, chosen
  ) < shape_classes.padded_share(shapes, usual)
  assert _serve(chosen) == (token_ids, shapes)


def test_sizes_are_chosen_from_a_file(tmp_path):
  path = tmp_path / 'steps.jsonl'
  path.write_text(
    '{"policy": "none", "shapes": [[1, 3, 5], [1, 8, 3]]}\n'
    '{"policy": "fixed_1", "shapes": [[1, 3, 1], [1, 4, 1]]}\n'
  )
  flags = (f'--steps={path}', '--rows=2', '--query_tokens=5,7,10')
  output = programs.output_of('studies.choose_sizes', *flags)
  # 46 tokens, in 7 * 5 + 3 * 10 places and in 6 * 3 + 4 * 8 of them.
  assert output.splitlines() == [
    'before: --rows=2 --query_tokens=5,7,10, at most 4 programs for each '
    'context, 29.2% padding',
    'after: --rows=2 --query_tokens=3,8,10, at most 4 programs for each '
    'context, 8.0% padding',
  ]
  error = programs.error_of('studies.choose_sizes', *flags, '--num_programs=1')
  assert '1 programs are too few' in error


@pytest.mark.parametrize('text', ['{"rows": 1}\n', '[1]\n', 'x\n', None])
def test_other_files_are_refused(text, tmp_path):
  path = tmp_path / 'steps.jsonl'
  message = 'cannot read'
  if text is not None:
    path.write_text(text)
    message = 'is no steps.jsonl of serve_load or simulate_load'
  flags = (f'--steps={path}', '--rows=2', '--query_tokens=5')
  assert message in programs.error_of('studies.choose_sizes', *flags)
