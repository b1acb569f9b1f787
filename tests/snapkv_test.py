"""A target that drafts for itself over what attention chooses."""

import dataclasses

import engine_cases
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from decoding_cases import CONFIG
from self_draft_test import LENGTH, requests_of, serve

import swiftspec_jax as ss
from swiftspec_jax import errors, testing
from swiftspec_jax.drafters.models import snapkv
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.models import decoder
from swiftspec_jax.policies.fixed_length import FixedLength

EVERYTHING = ss.SnapKVDraft(budget=160, window=8)
# Of queries 6 and 7; what a query must not see is larger than all else.
LOGITS = [[2, 0, 1, 0, 3, 0, 0, 9], [2, 1, 0, 0, 3, 0, 1, 0]]


best_places = jax.jit(
  snapkv.best_places, static_argnames=('budget', 'window', 'pooling')
)


def test_golden_votes():
  """Keys are unit vectors, so that queries are logits."""
  queries = np.array(LOGITS, np.float32)[:, None, None]
  keys = np.eye(8, dtype=np.float32)[None]
  visible = np.array([[True] * 7 + [False], [True] * 8])
  attend_and_vote = jax.jit(snapkv.attend_and_vote)
  attended, votes = map(
    np.asarray, attend_and_vote(queries, keys, keys, visible, np.float32(1))
  )
  golden = [0.4163, 0.1029, 0.1066, 0.0563, 1.1316, 0.0563]
  np.testing.assert_allclose(votes[0, :6], golden, atol=1e-4)
  # The values are unit vectors, too.
  np.testing.assert_allclose(votes[0], attended.sum((0, 1, 2)), atol=1e-6)
  for pooling, places in ((3, [3, 4, 6, 7]), (1, [0, 4, 6, 7])):
    kept = best_places(votes, np.int32(8), budget=4, window=2, pooling=pooling)
    assert kept.tolist() == [places]


def places_oracle(votes, kv_length, budget, window, pooling):
  """In plain Python; votes of one head."""
  older = max(kv_length - window, 0)
  votes = [float(vote) for vote in votes[:older]]

  def pooled(place):
    half = pooling // 2
    return sum(votes[max(place - half, 0) : place + half + 1])

  best = sorted(range(older), key=pooled, reverse=True)
  return sorted(best[: budget - window]) + list(range(older, kv_length))


@pytest.mark.parametrize('kv_length', [3, 5, 9, 11, 12, 13, 40])
def test_places_below_at_and_above_the_budget(kv_length):
  votes = np.random.default_rng(0).random((2, 40), np.float32)
  options = {'budget': 12, 'window': 4, 'pooling': 5}
  kept = best_places(votes, np.int32(kv_length), **options)
  for head, places in enumerate(kept.tolist()):
    expected = places_oracle(votes[head], kv_length, **options)
    assert places[: len(expected)] == expected
    assert places == sorted({*places})


# A layer with a window, and one without.
SLIDING = testing.random_model(
  dataclasses.replace(
    CONFIG, num_layers=2, sliding_window=12, sliding_layers=(True, False)
  )
)


def kept_oracle(model, token_ids, budget, window, pooling):
  """Keys [G, N, E] of each layer, from one forward over all of a text."""
  config, kept = model.config, []
  places = np.arange(len(token_ids))

  @jax.jit
  def read(params, token_ids):
    layers = []

    def attend(i, queries, keys, values):
      keys, values = keys[0], values[0]
      scores = jnp.einsum('tgqe,sge->gqts', queries[0], keys)
      distances = places[:, None] - places[None]
      visible = distances >= 0
      if config.is_sliding(i):
        visible &= distances < config.sliding_window
      scores = jnp.where(visible[None, None], scores, -jnp.inf)
      probs = jax.nn.softmax(scores * config.head_dim**-0.5, axis=-1)
      layers.append((keys, probs))
      return jnp.einsum('gqts,sge->tgqe', probs, values)[None]

    decoder.run_layers(params, config, token_ids, places[None], attend)
    return layers

  layers = jax.device_get(read(model.params, np.array(token_ids)[None]))
  for i, (keys, probs) in enumerate(layers):
    if config.is_sliding(i):
      best = [places[-budget:]] * len(keys[0])
    else:
      votes = probs[:, :, -window:].sum((1, 2))
      options = len(places), budget, window, pooling
      best = [np.array(places_oracle(own, *options)) for own in votes]
    found = [keys[own, head] for head, own in enumerate(best)]
    kept.append(np.stack(found))
  return kept


def test_every_head_keeps_what_the_latest_tokens_look_at():
  """Whatever chunks of the prompt were read: 60 tokens in steps of 24."""
  options = {'budget': 24, 'window': 6, 'pooling': 3}
  sizes = engine_cases.make_sizes(drafts=engine_cases.FEW)
  engine = Engine(
    SLIDING,
    ss.SnapKVDraft(**options),
    sizes=sizes,
    policy=FixedLength(1),
  )
  (request,) = requests_of([60], max_new_tokens=3)
  engine.submit(request).result()
  page_size = sizes.scheduler.page_size
  expected = kept_oracle(SLIDING, request.token_ids, **options)
  # One row takes the first slot, the pages of which are the first.
  for pages, keys in zip(engine.drafter.cache.keys, expected, strict=True):
    found = pages[: options['budget'] // page_size]
    found = found.reshape(options['budget'], len(keys), -1)
    np.testing.assert_allclose(
      found, np.moveaxis(keys, 0, 1), rtol=1e-4, atol=1e-5
    )


def make_engine(draft, policy):
  sizes = engine_cases.make_sizes(drafts=engine_cases.FEW)
  return Engine(engine_cases.TARGET, draft, sizes=sizes, policy=policy)


def test_a_budget_for_everything_is_right_about_everything():
  """Whatever a policy drafts, and when, in slots that several requests use."""
  policy = engine_cases.RandomLengths(2)
  engine = make_engine(EVERYTHING, policy)
  requests = [
    *requests_of([90, 80, 90, 70, 3], seed=1),
    *requests_of([60, 80, 40], seed=2, temperature=1.0),
  ]
  results = engine_cases.results_of(engine, requests)
  assert all(result.token_ids for result in results)
  assert engine.scheduler.num_preemptions > 0
  for outcome in policy.outcomes:
    assert outcome.num_accepted.tolist() == outcome.lengths.tolist()
  assert sum(outcome.lengths.sum() for outcome in policy.outcomes) > 50


def test_rows_beyond_the_budget_are_drafted_from_what_is_kept():
  requests = requests_of([100, 90, 20, 3])
  plain, _ = serve(None, requests, 0)
  draft = ss.SnapKVDraft(budget=24, window=8, interval=100)
  output, stats = serve(draft, requests)
  assert output == plain
  accepted = [found.num_accepted / found.num_drafted for found in stats]
  assert accepted[2] == accepted[3] == 1
  assert max(accepted[:2]) < 1


def test_a_trial_of_choices_is_forgotten():
  """In the slot of a request, which chooses again."""
  draft = ss.SnapKVDraft(budget=24, window=8, interval=100)
  engine = make_engine(draft, FixedLength(LENGTH))
  (request,) = requests_of([90])
  first = engine.submit(request).result()
  engine.drafter.trial_choice(60)
  assert engine.submit(request).result().token_ids == first.token_ids
  assert engine.drafter.num_choices(num_rows=5, length=3) == 5 * 4 / 100


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--snapkv_budget=64', '--window=9'], '--window=9 has no effect with'),
    (['--snapkv_budget=32'], 'budget must be more than the 32 tokens'),
  ],
)
def test_flags_that_do_not_fit_are_refused(tmp_path, flags, message):
  found = programs.error_of(
    'serve_load', '--mode=self', *flags, f'--output_dir={tmp_path}'
  )
  assert message in found


@pytest.mark.parametrize(
  'options', [{'budget': 32}, {'window': 0}, {'pooling': 2}, {'interval': 0}]
)
def test_bad_options_are_refused(options):
  with pytest.raises(errors.UserError, match=f'{next(iter(options))} must'):
    ss.SnapKVDraft(**options)
