"""The timeline: figures from spans that can be checked by hand, its picture."""

import json

import jax
import jax.numpy as jnp
import pytest

from experiments.pictures import timeline_plot
from swiftspec_jax import errors
from swiftspec_jax.runtime import timeline as timeline_lib
from swiftspec_jax.runtime.timeline import DRAFT, HOST, TARGET, TRANSFER, Span


def span(track, name, start, end):
  made = Span(track, name, 1, start)
  made.start, made.end = start, end
  return made


# Two rounds of 10 s: the target works 6 s, the draft 5 s, 4 s of it meanwhile.
ROUNDS = [
  piece
  for begin in (0.0, 10.0)
  for piece in (
    span(TARGET, 'verify', begin, begin + 6),
    span(DRAFT, 'grow', begin + 1, begin + 5),
    span(TRANSFER, 'verdict', begin + 6, begin + 7),
    span(DRAFT, 'advance', begin + 7, begin + 8),
    span(HOST, 'dispatch', begin, begin + 0.5),
    span(HOST, 'wait', begin + 1, begin + 9),
  )
] + [span(TARGET, 'verify', 20.0, 24.0)]


def test_summary():
  summary = timeline_lib.summarize(ROUNDS)
  expected = {
    'num_rounds': 2,
    'round_seconds': 10,
    'target_busy_seconds': 6,
    'draft_busy_seconds': 5,
    'target_idle_seconds': 4,
    'overlap_seconds': 4,
    'overlap_fraction': 0.8,
    'target_step_seconds': 6,
    'host_dispatch_seconds': 0.5,
    'host_wait_seconds': 8,
  }
  assert summary == pytest.approx(expected)
  assert 'round' in timeline_lib.table(summary)
  assert timeline_lib.summarize(ROUNDS[:3]) == {}


def test_chrome_trace_has_a_track_for_each_mesh_and_the_host():
  trace = json.loads(timeline_lib.to_chrome_trace(ROUNDS))['traceEvents']
  names = {e['tid']: e['args']['name'] for e in trace if e['ph'] == 'M'}
  assert sorted(names.values()) == ['draft', 'host', 'target', 'transfer']
  events = [e for e in trace if e['ph'] == 'X']
  assert len(events) == len(ROUNDS)
  grow = next(e for e in events if e['name'] == 'grow')
  assert names[grow['tid']] == 'draft'
  assert (grow['ts'], grow['dur']) == (1e6, 4e6)


def test_programs_start_behind_what_they_need():
  timeline = timeline_lib.Timeline()
  timeline.start_round()
  product = jax.jit(lambda x: x @ x @ x @ x)
  x = product(jnp.ones((700, 700)))
  timeline.program(TARGET, 'verify', 0.0, x)
  timeline.program(TRANSFER, 'verdict', 0.0, x, 'verify')
  timeline.program(DRAFT, 'advance', 0.0, product(x), 'verdict')
  verify, verdict, advance = timeline.finish()
  assert verify.end <= verdict.start <= verdict.end <= advance.start
  assert advance.start <= advance.end
  assert {s.round_index for s in (verify, verdict, advance)} == {1}


@pytest.mark.parametrize('skip', [0, 1])
def test_rounds_become_a_picture(skip):
  assert timeline_plot.draw(ROUNDS, skip=skip).startswith(b'\x89PNG')


def test_there_must_be_a_round():
  for spans in ([], ROUNDS):
    with pytest.raises(errors.UserError, match='no round to draw after the'):
      timeline_plot.draw(spans, skip=3)
