"""Devices by the step: equal tokens, and nothing is compiled or allocated."""

import itertools
import re

import jax
import pytest
from decoding_cases import requests_of
from engine_cases import (
  FEW,
  TREES,
  RandomLengths,
  assert_empty,
  make_sizes,
  random_requests,
)
from engine_test import alone, serve_at_random
from flags_test import given
from sequence_test import expected, shared

import swiftspec_jax as ss
from experiments.flags import engine_flags
from swiftspec_jax import errors, profiling
from swiftspec_jax.engine import device_costs
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.planning.elastic import PrefillCosts
from swiftspec_jax.serving.drafters.models.draft_tree import TreeDraft
from swiftspec_jax.step.step_devices import StepDevices

pytestmark = pytest.mark.usefixtures('no_programs')

LOOKUP = ss.PromptLookup(prompt_lookup_min=1)
# A program is compiled for each number of devices.
NUM_PAGES = 24
FEW_SIZES = make_sizes(num_pages=NUM_PAGES, drafts=FEW)
# Up to 8 tokens take 2 devices.
COSTS = PrefillCosts(coefficients={p: (0.2 * p, 0.4 / p, 0.0) for p in (2, 8)})


class Watched(Engine):
  """Remembers its steps."""

  def __init__(self, *args, **options):
    super().__init__(*args, **options)
    self.records = []

  def step(self):
    record = super().step()
    if record is not None:
      self.records.append(record)
    return record

  def serve(self, requests):
    handles = [self.submit(request) for request in requests]
    return [handle.result().token_ids for handle in handles]


def test_prompts_are_read_on_more_devices():
  """Steps with tokens of prompts run on 8 devices, the others on 2."""
  engine = Watched(
    shared(8, 8),
    sizes=FEW_SIZES,
    run_ahead=1,
    step_devices=StepDevices(numbers=(2, 8)),
  )
  engine.warm_up()
  requests, plain = requests_of(6, max_new_tokens=24), expected(6)
  with profiling.count_compilations() as compilations:
    found = engine.serve(requests[:3]) + engine.serve(requests[3:])
    assert found == plain
    used = [record.num_devices for record in engine.records]
    changes = [size for size, _ in itertools.groupby(used)]
    assert changes[:2] == changes[-2:] == [8, 2]
    assert len(changes) > 2
    kept = engine._target.cache.sharding.device_set
    assert kept == {*jax.devices()[:2]}
  assert compilations.count == 0
  with pytest.raises(errors.UserError, match=r'made for \(2, 8\); take these'):
    engine.step_devices = StepDevices(numbers=(2, 4, 8))


def test_output_under_load_is_that_of_plain_decoding():
  """Greedy and drawn requests; memory is short, and some are cancelled.

  Lookups are on the devices of the step before.
  """
  engine = Watched(
    shared(8, 8),
    LOOKUP,
    sizes=FEW_SIZES,
    policy=RandomLengths(),
    run_ahead=1,
    step_devices=StepDevices(numbers=(2, 8), costs=COSTS),
  )
  engine.warm_up()
  requests = random_requests(16)
  with profiling.count_compilations() as compilations:
    handles, cancelled = serve_at_random(engine, requests)
  assert compilations.count == 0
  assert engine.scheduler.num_preemptions > 0
  assert cancelled
  assert_empty(engine, NUM_PAGES)
  for handle, plain in zip(handles, alone(requests), strict=True):
    result, count = handle.result(), None
    if handle.request_id in cancelled:
      count = len(result.token_ids)
    assert result.token_ids == plain.token_ids[:count]
  assert {record.num_devices for record in engine.records} == {2, 8}
  for record in engine.records:
    _, num_tokens = record.step.shape
    assert record.num_devices == (2 if num_tokens <= 8 else 8)


def test_models_that_draft_stay_on_their_devices():
  with pytest.raises(errors.UserError, match='step_devices is for pages'):
    Engine(
      shared(8, 8),
      TreeDraft(model=shared(8, 8), width=3, branching=3),
      sizes=make_sizes(drafts=TREES),
      step_devices=StepDevices(numbers=(2, 8)),
    )


@pytest.mark.parametrize(
  ('numbers', 'message'),
  [
    ((2, 4), 'do not fit random: 4 of its 8 devices share tokens'),
    ((1, 8), 'be a multiple of 2'),
    ((2, 6, 8), 'must divide 8'),
    ((8, 2), r'numbers must be ascending, >= 1, got \(8, 2\)'),
    ((), 'numbers must be ascending'),
  ],
)
def test_numbers_that_do_not_fit(numbers, message):
  with pytest.raises(errors.UserError, match=message):
    StepDevices(numbers=numbers).models_of(shared(8, 4))


def test_costs_are_those_of_the_numbers():
  with pytest.raises(errors.UserError, match=r'costs must be those of \(2, 4'):
    StepDevices(numbers=(2, 4, 8), costs=COSTS)
  engine = Engine(
    shared(8, 8),
    sizes=make_sizes(drafts=TREES),
    step_devices=StepDevices(numbers=(2, 8)),
  )
  with pytest.raises(errors.UserError, match='steps of 4 rows have 2 sizes'):
    device_costs.measure(engine, make_sizes(drafts=TREES))


FLAGS = {
  'mode': 'prompt_lookup',
  'rows': ['2'],
  'query_tokens': ['4', '8'],
  'contexts': ['64'],
  'max_length': 2,
}


def test_the_engine_of_the_server(model):
  prompts = [tuple(range(1, 21)), (4, 5, 6, 4, 5)]
  plain = ss.generate(ss.load(model), prompts, max_new_tokens=12)
  with given(
    target=str(model),
    target_devices=2,
    sequence_devices=2,
    prompt_devices=['8'],
    **FLAGS,
  ):
    declared = engine_flags.sizes()
    engine, target = engine_flags.make_engine(declared)
    assert target.mesh.shape == {'data': 1, 'sequence': 8, 'model': 1}
    assert engine.step_devices == StepDevices(numbers=(2, 8))
    sampling = ss.SamplingParams(max_new_tokens=12)

    def submit():
      return [
        engine.submit(ss.Request(token_ids=ids, sampling=sampling))
        for ids in prompts
      ]

    def check(handles):
      found = [handle.result().token_ids for handle in handles]
      assert found == [result.token_ids for result in plain]

    handles = submit()
    assert engine.step().num_devices == 8
    check(handles)
    engine_flags.check_unmeasured()  # there is nothing to choose
    engine_flags.measure_devices(engine, declared)
    assert engine.step_devices.costs.coefficients.keys() == {2, 8}
    check(submit())
    with pytest.raises(errors.UserError, match='files of costs hold for one'):
      engine_flags.check_for_costs()


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (
      {'mode': 'chain', 'draft': 'x', 'prompt_devices': ['8']},
      '--prompt_devices=8 has no effect on draft models, and the mode is chain',
    ),
    (
      {'target_devices': 4, 'prompt_devices': ['2', '8']},
      '--prompt_devices=2,8 must be numbers above --target_devices=4',
    ),
    (
      {'target_devices': 2, 'prompt_devices': ['4', '6']},
      '--prompt_devices=4,6 must be numbers above --target_devices=2, each',
    ),
    ({'prompt_devices': ['many']}, '--prompt_devices=many must be numbers'),
  ],
)
def test_flags_that_do_not_fit(flags, message):
  with (
    given(**{'target': 'x', **FLAGS, **flags}),
    pytest.raises(errors.UserError, match=re.escape(message)),
  ):
    engine_flags.sizes()


def test_numbers_are_chosen_by_measured_times():
  with (
    given(prompt_devices=['4', '8']),
    pytest.raises(errors.UserError, match='give that, or one number'),
  ):
    engine_flags.check_unmeasured()
