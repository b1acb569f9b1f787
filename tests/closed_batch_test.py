"""Drafts of serving in `Decoder` and `generate`: the same outputs as plain."""

import pytest
from decoding_cases import CONFIG, assert_same, requests_of, run

import swiftspec_jax as ss
from swiftspec_jax import testing

MODEL = testing.random_model(CONFIG)
DRAFTS = {
  'suffix_lookup': ss.SuffixLookup(),
  'datastore': ss.Datastore(),
  'phrases': ss.PhraseDraft(),
  'self': ss.SelfDraft(window=16),
}


@pytest.fixture(scope='module')
def plain():
  return run(ss.Decoder(MODEL), requests_of(5))


@pytest.mark.parametrize('name', DRAFTS)
def test_outputs_are_those_of_plain_decoding(plain, name):
  decoder = ss.Decoder(
    MODEL, DRAFTS[name], num_speculative_tokens=4, batch_size=2
  )
  got = run(decoder, requests_of(5))
  assert_same(got, plain)
  assert sum(result.stats.num_accepted for result in got) > 0


def test_rooms_grow_with_the_requests():
  decoder = ss.Decoder(MODEL, DRAFTS['suffix_lookup'])
  short = ss.Request(
    token_ids=(1, 2, 3), sampling=ss.SamplingParams(max_new_tokens=5)
  )
  (before,) = run(decoder, [short])
  events = decoder.run(requests_of(2))
  next(events)
  with pytest.raises(ss.UserError, match='busy with another iterator'):
    next(decoder.run([short]))
  events.close()  # cancels them
  (after,) = run(decoder, [short])
  assert after.token_ids == before.token_ids


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'tree': ss.TreeConfig()}, 'tree is for draft models'),
    ({'timeline': ss.Timeline()}, 'timeline is for draft models'),
    ({'batch_size': 0}, 'batch_size must be at least 1, got 0'),
  ],
)
def test_what_does_not_fit_is_refused(options, message):
  with pytest.raises(ss.UserError, match=message):
    ss.Decoder(MODEL, DRAFTS['suffix_lookup'], **options)
