"""The page with the list of figures: each is in all places that it names."""

import dataclasses
import pathlib
import re

import numpy as np
import server_cases

from experiments.load import load_replay
from experiments.output import benchmark_output
from swiftspec_jax.engine.steps import StepRecord
from swiftspec_jax.requests import results
from swiftspec_jax.simulator.arrivals import Arrivals
from swiftspec_jax.simulator.load_metrics import LatencyTarget, LoadRecorder

PAGE = pathlib.Path(__file__).parents[1] / 'docs' / 'how_to' / 'modes.md'
# Names in Python, in /metrics and in rows.jsonl; '' where there is none.
FIGURES = re.findall(
  r'^\| `(\w+)` \| (?:`(\S+)`)? ?\| (?:`(\S+)`)? ?\|$',
  PAGE.read_text().partition('| figure |')[2],
  re.MULTILINE,
)
NAMES, METRICS, COLUMNS = (set(x) - {''} for x in zip(*FIGURES, strict=True))


RECORD = StepRecord(
  lengths=np.full(2, 3),
  num_levels=np.full(2, 3),
  num_accepted=np.array([2, 0]),
  time=0.0,
  seconds=1.0,
  host_seconds=0.1,
  draft_plan=None,
  prefills_draft=False,
  step=None,
  ended=np.zeros(0, int),
  outcomes=np.array([1, 0, 1]),
  num_forwards=3,
)


def names_of(kind):
  return {field.name for field in dataclasses.fields(kind)}


def test_results_have_all_figures():
  own = NAMES - {'host_seconds'}
  stats = results.GenerationStats
  assert names_of(stats) <= own <= {*names_of(stats), *vars(stats)}
  assert names_of(benchmark_output.Record) >= NAMES


def test_a_server_has_those_that_name_a_metric():
  registry = server_cases.make_service().metrics.registry
  known = {family.name for family in registry.collect()}
  assert known >= METRICS
  # Of others it counts alone what no request has.
  of_drafts = {name for name in known if 'spec_decode' in name}
  assert of_drafts - METRICS == {'vllm:spec_decode_num_drafts'}


def test_a_load_has_those_that_name_a_column():
  ones = np.ones(1, np.int64)
  arrivals = Arrivals(times=ones, prompt_tokens=ones, output_tokens=ones)
  recorder = LoadRecorder(arrivals, 3)
  columns = recorder.summarize(LatencyTarget(ttft=1.0, tpot=1.0))
  columns |= load_replay.of_steps([RECORD])
  assert columns.keys() >= COLUMNS
