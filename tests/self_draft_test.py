"""A target that drafts for itself over a sink and a window."""

import engine_cases
import numpy as np
import pytest
from decoding_cases import request_of
from serving_cases import Oracle, linear_costs, make_view, unpadded

from swiftspec_jax import errors
from swiftspec_jax.drafters.models.self_draft import SelfDraft, sparse_pages
from swiftspec_jax.policies.cost_model.self_draft import SelfDraftCosts
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.policies.goodput import Goodput

LENGTH = 3


@pytest.mark.parametrize(
  ('num_known', 'seen', 'place'),
  [
    (10, [0, 1, 7, 8, 9], 5),
    (11, [0, 1, 8, 9, 10], 5),
    (5, [0, 1, 2, 3, 4], 5),
    (3, [0, 1, 2], 3),
  ],
)
def test_golden_streaming(num_known, seen, place):
  """Two sinks and a window of three, in pages of one token."""
  table = np.arange(12)[None]
  pages, num_skipped = sparse_pages(table, np.array([num_known]), 1, 6, 2)
  assert num_known - num_skipped[0] == place
  assert pages[0, : place + 1].tolist() == [*seen, num_known]


def test_window_and_draft_are_seen():
  """In pages of 8 tokens, of which row after row has one more token."""
  page_size, num_sinks, window = 8, 1, 16
  num_pages = num_sinks + -(-(window + LENGTH - 1) // page_size) + 1
  num_known = np.arange(1, 80)
  last = num_known - 1 + LENGTH
  tables = np.broadcast_to(np.arange(11), (len(last), 11))
  pages, num_skipped = sparse_pages(
    tables, last, page_size, num_pages, num_sinks
  )
  places = pages[:, :, None] * page_size + np.arange(page_size)
  for row, end in enumerate(last.tolist()):
    seen = places[row].ravel()[: end + 1 - num_skipped[row]].tolist()
    latest = range(max(num_known[row] - window, 0), end + 1)
    assert {*latest, *range(min(page_size, end + 1))} <= {*seen}
    assert seen == sorted({*seen})


def requests_of(lengths, seed=0, **options):
  generator = np.random.default_rng(seed)
  options = {'max_new_tokens': 24, 'ignore_eos': True, **options}
  return [
    request_of(generator.integers(0, 256, length).tolist(), **options)
    for length in lengths
  ]


def serve(draft, requests, length=LENGTH):
  engine = engine_cases.make_engine(draft, FixedLength(length))
  results = engine_cases.results_of(engine, requests)
  engine_cases.assert_empty(engine)
  return [result.token_ids for result in results], [r.stats for r in results]


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_a_window_that_holds_everything_is_right_about_everything(temperature):
  """The pages that are skipped are the only difference to the target."""
  requests = requests_of([30, 50], temperature=temperature)
  _, stats = serve(SelfDraft(window=160), requests)
  for found in stats:
    assert found.num_accepted == found.num_drafted > 15


def test_rows_beyond_the_window_are_drafted_from_what_is_left():
  """Contexts of up to 124 tokens, 8 + 16 of them seen; some drafts fail."""
  requests = requests_of([100, 90, 20, 3])
  plain, _ = serve(None, requests, 0)
  output, stats = serve(SelfDraft(num_sink_tokens=8, window=16), requests)
  assert output == plain
  accepted = [found.num_accepted / found.num_drafted for found in stats]
  assert accepted[3] == 1
  assert max(accepted[:2]) < 1


# Of an 8B model on an H100, as in the golden examples; seconds.
COSTS = SelfDraftCosts(
  linear_costs(fixed=6.94e-3, query_tokens=1.84e-5, kv=4.86e-8), 512
)
OMEGA = 2.45  # tokens of a round with drafts of two


def speedup(num_rows, context, costs=COSTS):
  """Tokens a second over those of plain decoding."""
  kv_tokens = num_rows * context
  plain = costs.predict(num_rows, num_rows, kv_tokens, 0).total
  drafted = costs.predict(num_rows, 3 * num_rows, kv_tokens, 2).total
  return OMEGA * plain / drafted


@pytest.mark.parametrize(
  ('num_rows', 'crossover', 'speedups'),
  [
    (1, 55537, (0.815, 0.828, 0.872, 1.121)),
    (32, 3065, (0.780, 1.067, 1.581, 2.209)),
    (256, 1584, (0.695, 1.408, 2.015, 2.364)),
  ],
)
def test_golden_speedups(num_rows, crossover, speedups):
  """The larger the batch, the shorter the context from which it pays."""
  found = [speedup(num_rows, s) for s in (512, 4000, 16000, 100_000)]
  # The golden ones have a small coefficient of the rows besides.
  np.testing.assert_allclose(found, speedups, atol=0.02)
  assert speedup(num_rows, crossover) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize('num_rows', [1, 32])
@pytest.mark.parametrize('context', [512, 4000, 100_000])
def test_goodput_drafts_where_it_pays(num_rows, context):
  buckets = unpadded(num_rows, 2)
  # 1 + 0.803 + 0.803 ** 2 is about the 2.45 tokens above.
  policy = Goodput(COSTS, Oracle(0.803))
  view = make_view(num_rows, buckets, kv_lengths=context)
  lengths = policy.plan_draft(view).lengths
  assert (lengths > 0).all() == (speedup(num_rows, context) > 1)


def test_bad_options_are_refused():
  for options in ({'window': 0}, {'num_sink_tokens': -1}):
    with pytest.raises(errors.UserError, match=f'{next(iter(options))} must'):
      SelfDraft(**options)
