"""The picture of a timeline."""

import pytest

from experiments.pictures import timeline_plot
from swiftspec_jax import errors
from swiftspec_jax import timeline as timeline_lib


def span(track, name, start, end):
  made = timeline_lib.Span(track, name, 1, start)
  made.start, made.end = start, end
  return made


SPANS = [
  span(timeline_lib.TARGET, 'verify', 1.0, 1.2),
  span(timeline_lib.DRAFT, 'grow', 1.0, 1.1),
  span(timeline_lib.TRANSFER, 'verdict', 1.2, 1.201),
  span(timeline_lib.HOST, 'wait', 1.0, 1.21),
  span(timeline_lib.TARGET, 'verify', 1.3, 1.5),
]


@pytest.mark.parametrize('skip', [0, 1])
def test_rounds_become_a_picture(skip):
  picture = timeline_plot.draw(SPANS, skip=skip)
  assert picture.startswith(b'\x89PNG')


@pytest.mark.parametrize('spans', [[], SPANS])
def test_there_must_be_a_round(spans):
  with pytest.raises(errors.UserError, match='no round to draw after the fir'):
    timeline_plot.draw(spans, skip=2)
