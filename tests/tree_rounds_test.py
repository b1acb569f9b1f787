"""Rounds of trees one by one: caches, draft forwards, what crosses."""

import dataclasses

import jax
import numpy as np
import pytest
from decoding_cases import run
from load_cases import read, rows_of
from tree_cases import DEVICES, TREE, Pauses, pair, path_to, requests_of

import swiftspec_jax as ss
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.runtime import timeline as timeline_lib

# Narrow, so that chains are sent before they have keys and values.
HYBRID = {
  'prompt_lookup': True,
  'width': 2,
  'num_draft_steps': 1,
}


def rounds(mode, draft_seed=0, policy=None, num_rounds=12, **changes):
  """Yields the engine of one request after each of its rounds."""
  tree = dataclasses.replace(TREE, **changes)
  target, draft = pair(*DEVICES[mode], draft_seed, num_layers=2)
  request = requests_of(2, max_new_tokens=150)[1]
  tree_decoder = ss.Decoder(
    target, draft, tree=tree, run_ahead=0, policy=policy
  )
  with tree_decoder.engine_for([request]) as engine:
    engine.submit(request)
    while num_rounds and (record := engine.step()):
      if len(record.lengths):  # not the prompt's
        num_rounds -= 1
        yield engine


def check_cache(model, cache, text, path_of_row):
  """Rows of a text, and those of tree nodes, are as if read from scratch."""
  length, got = len(text), rows_of(cache)
  for row, path in [(slice(length), []), *path_of_row.items()]:
    _, _, want = read(model, [*text, *path])
    if path:
      row, want = length + row, want[..., -1, :]
    np.testing.assert_allclose(got[..., row, :], want, atol=2e-5)


def check_round(engine):
  """Both caches are right; returns what the draft had read, and its state."""
  texts, cache = jax.device_get((engine._target.rows, engine._target.cache))
  length = int(texts.lengths[0])
  text = texts.token_ids[0, :length].tolist()
  check_cache(engine.model, cache, text[:-1], {})
  rows = engine.drafter.rows
  state, num_read = jax.device_get((rows.state, rows._num_read))
  known = int(state.cache.kv_lengths[0])
  check_cache(rows._model, state.cache, text[:known], {})
  return text[: int(num_read[0])], state


@pytest.mark.parametrize(
  ('mode', 'draft_seed', 'changes'),
  [
    ('serial', 0, {}),
    ('async', 1, {}),
    ('serial', 1, HYBRID),
    ('async', 0, HYBRID),
  ],
  ids=['serial_own', 'async_bad', 'serial_hybrid_bad', 'async_hybrid_own'],
)
def test_caches_equal_a_prefill_after_every_round(mode, draft_seed, changes):
  outcomes, lengths = set(), []
  for engine in rounds(mode, draft_seed, **changes):
    text, state = check_round(engine)
    outcomes.add(int(state.outcome[0]))
    lengths.append(len(text))
    tree = state.tree
    assert path_to(tree, 0) == text[-1:]
    known = int(state.cache.kv_lengths[0])
    assert len(text) - known in (1, 2)
    if len(text) - known == 1:
      paths = {
        int(slot): path_to(tree, node)
        for node, slot in enumerate(tree.nodes.cache_slots[0])
        if slot != tree_lib.NO_SLOT
      }
      some = sorted(paths)[:: len(paths) // 3 or 1]
      some = {row: paths[row] for row in some}
      check_cache(engine.drafter.rows._model, state.cache, text[:-1], some)
  if 'prompt_lookup' in changes:
    # More than the draft forwards of a round can have seen.
    assert max(np.diff(lengths)) > 5
  elif draft_seed == 1 and not changes:
    assert tree_lib.MISS in outcomes
  elif mode == 'async':
    assert tree_lib.HIT in outcomes


@pytest.mark.parametrize(
  ('mode', 'num_rounds'), [('serial', 1), ('serial', 130), ('async', 2)]
)
def test_draft_catches_up_after_a_pause(mode, num_rounds):
  """Also where it was longer than what is read at once."""
  policy = Pauses(*range(4, 4 + num_rounds))
  before = None
  for i, engine in enumerate(
    rounds(mode, policy=policy, num_rounds=num_rounds + 6), 1
  ):
    if 4 <= i < 4 + num_rounds:  # the draft is left alone
      state = engine.drafter.rows.state
      assert before is None or state is before
      before = state
    elif i > 4 + num_rounds:
      text, state = check_round(engine)
      assert path_to(state.tree, 0) == text[-1:]


@pytest.mark.parametrize('changes', [{}, HYBRID], ids=['plain', 'hybrid'])
def test_only_small_integers_cross_the_meshes(monkeypatch, changes):
  moved = []
  put = jax.device_put

  def spy(x, *args):
    if isinstance(x, jax.Array):
      moved.append((x.dtype.name, x.nbytes))
    return put(x, *args)

  found = rounds('async', **changes)
  for _ in range(4):
    next(found)
  monkeypatch.setattr(jax, 'device_put', spy)
  next(found)
  verdict, proposal = 4 * (TREE.num_nodes + 1), 4 * (5 * TREE.num_nodes + 3)
  assert moved == [('int32', verdict), ('int32', proposal)]


def test_verify_is_enqueued_before_growth_and_nothing_is_read():
  timeline = timeline_lib.Timeline()
  target, draft = pair(*DEVICES['async'], num_layers=2)
  tree_decoder = ss.Decoder(
    target, draft, tree=TREE, run_ahead=2, timeline=timeline
  )
  run(tree_decoder, requests_of(1, max_new_tokens=12))
  spans = timeline.finish()
  last = max(s.round_index for s in spans if s.name == 'grow')
  programs = [
    span.name
    for span in spans
    if span.round_index == last and span.track != timeline_lib.HOST
  ]
  assert programs == ['verdict', 'advance', 'proposal', 'verify', 'grow']
  # After the prompt, two rounds were dispatched before one was waited for.
  host = [s.name for s in spans if s.track == timeline_lib.HOST]
  assert host[:3] == ['dispatch', 'wait', 'read']
  assert host[3:7] == ['dispatch', 'dispatch', 'dispatch', 'wait']
