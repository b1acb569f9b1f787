"""Adaptive sizes: what would have been accepted, and what pays."""

import dataclasses
import itertools

import numpy as np
import pytest

from swiftspec_jax import types
from swiftspec_jax.config import TreeConfig
from swiftspec_jax.pipelines import tree_sizes
from swiftspec_jax.pipelines.tree_sizes import PAUSE, Sizes

ADAPTIVE = TreeConfig(
  num_nodes=16, num_draft_steps=8, is_adaptive=True, prompt_lookup=False
)
# Four nodes take as long as plain decoding, so small trees pay early.
CHEAP = tree_sizes.StepTimes(
  target_seconds={4: 1.0, 8: 1.2, 16: 1.5},
  pause_seconds={0: 1.0},
  draft_seconds=0.2,
  advance_seconds=0.2,
  catch_up_seconds=0.1,
)
DEEP = [0, 1, 2, 3, 6, 9, 12, 13, 15]  # accepted nodes of a good draft


def report(path, num_drafted):
  return types.StepReport(
    token_ids=[0] * len(path),
    num_drafted=num_drafted,
    num_levels=8,
    num_accepted=len(path) - 1,
    is_tree=True,
    outcome=0,
    num_forwards=len(path) < 2,  # a miss
    path=path,
    is_looked_up=[False] * (len(path) - 1),
  )


def play(sizes, path, num_rounds, is_async=False, seconds=lambda sent: None):
  """Returns what was sent in rounds that would accept `path`.

  `seconds` says how long a round of some sizes really takes.
  """
  sent = []
  for _ in range(num_rounds):
    now = sizes.next()
    sent.append(now)
    num_accepted = len(path) if is_async else now.num_steps + 1
    found = [node for node in path[:num_accepted] if node < now.num_nodes]
    sizes.observe(now, [report(found, now.num_nodes - 1)], seconds(now))
  return sent


def new_sizes(is_async=False, tree_config=ADAPTIVE, times=CHEAP):
  sizes = tree_sizes.TreeSizes(tree_config, is_async=is_async)
  sizes.start(times)
  return sizes


@pytest.mark.parametrize(
  ('num_nodes', 'buckets'),
  [
    (1, (1,)),
    (4, (1, 4)),
    (6, (1, 4, 6)),
    (16, (1, 4, 8, 16)),
    (20, (1, 4, 8, 16, 20)),
  ],
)
def test_buckets_are_doublings(num_nodes, buckets):
  config = TreeConfig(num_nodes=num_nodes, is_adaptive=True)
  assert tree_sizes.node_buckets(config) == buckets
  config = TreeConfig(num_nodes=num_nodes)
  assert tree_sizes.node_buckets(config) == (num_nodes,)


@pytest.mark.parametrize('is_async', [False, True])
def test_wrong_drafts_end_speculation(is_async):
  sizes = new_sizes(is_async)
  play(sizes, [0], 30)
  assert sizes.current == PAUSE


@pytest.mark.parametrize('is_async', [False, True])
def test_probes_cost_little_and_bring_it_back(is_async):
  sizes = new_sizes(is_async)
  play(sizes, [0], 400)
  sent = play(sizes, [0], 1000)
  probes = [now for now in sent if now != PAUSE]
  seconds = sum(
    CHEAP.target_seconds[now.num_nodes]
    + CHEAP.catch_up_seconds
    + (0 if is_async else 0.2 * now.num_steps)
    for now in probes
  )
  assert probes
  assert seconds - len(probes) <= 0.016 * 1000
  sent = play(sizes, DEEP, 300, is_async)
  num_plain = len(list(itertools.takewhile(lambda x: x == PAUSE, sent)))
  assert num_plain < 100  # the next probe was right at once
  assert PAUSE not in sent[num_plain + 1 :]
  assert sizes.current.num_nodes == 16


def test_what_can_never_pay_is_not_tried():
  """Even if all are accepted: 1 + d tokens in 1 + 2 d seconds or more."""
  times = tree_sizes.StepTimes(
    target_seconds={4: 1.0, 8: 1.0, 16: 1.0},
    pause_seconds={0: 1.0},
    draft_seconds=2.0,
    advance_seconds=2.0,
    catch_up_seconds=0.0,
  )
  sizes = new_sizes(times=times)
  play(sizes, DEEP, 2)
  assert set(play(sizes, DEEP, 500)) == {PAUSE}


def test_late_nodes_make_the_tree_large():
  """Nine tokens of 16 nodes in 1.5 s, two of 4 nodes in 1 s."""
  sizes = new_sizes(is_async=True)
  play(sizes, [0, 1, 4, 6, 9, 11, 12, 13, 15], 10, is_async=True)
  # 1.5 / 0.2, and 8 forwards would take longer.
  assert sizes.current == Sizes(num_nodes=16, num_steps=7)


def test_draft_forwards_are_as_many_as_pay():
  """The first two levels are always right, the third one never.

  Two forwards: 3 tokens in 1.4 s; three: 3 in 1.6 s; one: 2 in 1.2 s.
  """
  sizes = new_sizes()
  play(sizes, [0, 1, 2], 40)
  assert sizes.current == Sizes(num_nodes=4, num_steps=2)


def test_fewer_forwards_hide_no_depth():
  """What one forward cannot reach is not taken for wrong."""
  sizes = new_sizes()
  play(sizes, [0], 100)
  assert sizes.current == PAUSE
  sent = play(sizes, DEEP, 200)
  assert sent[-1].num_steps == 8


def test_starts_paused_and_probes_soon():
  """The first probe costs a tenth of the time before it."""
  sent = play(new_sizes(), DEEP, 32)
  # 16 nodes and 8 forwards take 2.1 s more than a paused round of 1 s, and the
  # draft catches up in 0.1 s.
  assert sent[:21] == 21 * [PAUSE]
  assert sent[21] != PAUSE
  assert sent[-1] != PAUSE


def test_first_failures_cost_few_rounds():
  sent = play(new_sizes(), [0], 32)
  assert sent.count(PAUSE) >= 28


def test_good_drafts_never_pause():
  """Nine of ten guesses are right; times of a small model on a CPU."""
  times = tree_sizes.StepTimes(
    target_seconds={4: 0.06, 8: 0.07, 16: 0.094},
    pause_seconds={0: 0.035},
    draft_seconds=0.005,
    advance_seconds=0.007,
    catch_up_seconds=0.01,
  )
  sizes = new_sizes(times=times)
  play(sizes, DEEP, 40)
  rng = np.random.default_rng(0)
  for _ in range(500):
    (sent,) = play(sizes, list(range(rng.geometric(0.1))), 1)
    assert sent.num_nodes >= 8


def test_lookup_alone_is_kept_where_it_is_better():
  """Trees give two tokens in 1.2 s, lookup of three 4 in 1.1 s."""
  times = dataclasses.replace(CHEAP, pause_seconds={0: 1.0, 3: 1.1})
  sizes = new_sizes(times=times)
  sent = []
  for _ in range(300):
    now = sizes.next()
    sent.append(now)
    path, num_drafted = ([0] * 4, 3) if now == PAUSE else ([0, 1], 15)
    sizes.observe(now, [report(path, num_drafted)])
  assert set(sent) == {PAUSE}


def test_lookup_alone_is_left_where_trees_are_better():
  times = dataclasses.replace(CHEAP, pause_seconds={0: 1.0, 3: 1.1})
  sent = play(new_sizes(times=times), DEEP, 500)
  assert 1 <= sent[30:].count(PAUSE) < 10
  assert sent[-1].num_nodes == 16


def test_rounds_that_are_slower_than_measured():
  """Steps were timed without what else a round does, or other work."""

  def seconds(factor, of_trees):
    def of(sent):
      if sent == PAUSE:
        return factor * CHEAP.pause_seconds[0]
      times = CHEAP.target_seconds[sent.num_nodes] + CHEAP.advance_seconds
      steps = (sent.num_steps - 1) * CHEAP.draft_seconds
      return factor * of_trees * (times + steps)

    return of

  busy = play(new_sizes(), DEEP, 300, seconds=seconds(4.0, 1.0))
  assert busy[-1].num_nodes == play(new_sizes(), DEEP, 300)[-1].num_nodes == 16
  slow = play(new_sizes(), DEEP, 300, seconds=seconds(1.0, 8.0))
  assert slow.count(PAUSE) > 200


def test_copying_does_not_end_probes():
  """Lookups that are right to the last token beat what any tree can give."""
  times = tree_sizes.StepTimes(
    target_seconds={4: 1.3, 8: 1.6},
    pause_seconds={0: 1.0, 1: 1.1, 3: 1.3, 7: 1.6},
    draft_seconds=0.1,
    advance_seconds=0.2,
    catch_up_seconds=0.3,
  )
  sizes = new_sizes(tree_config=TreeConfig(is_adaptive=True), times=times)

  def play_texts(num_copied, path, num_rounds):
    for _ in range(num_rounds):
      now = sizes.next()
      found = [node for node in path if node < now.num_nodes]
      if now == PAUSE:
        found = [0] * num_copied
      num_drafted = max(num_copied, now.num_nodes) - 1
      sizes.observe(now, [report(found, num_drafted)])

  play_texts(8, list(range(8)), 400)
  assert sizes.current == PAUSE
  play_texts(1, [0, 1, 2, 3, 4], 500)  # another text, and a good draft
  assert sizes.current == Sizes(num_nodes=8, num_steps=4)


def test_probes_are_not_put_off_for_ever():
  """Catching up takes long, but 1,024 rounds more."""
  times = dataclasses.replace(CHEAP, catch_up_seconds=1e6)
  sizes = new_sizes(times=times)
  play(sizes, [0], 100)
  assert sizes.current == PAUSE
  play(sizes, DEEP, 1100)
  assert sizes.current != PAUSE


def test_fixed_sizes_stay():
  config = TreeConfig(num_nodes=16, num_draft_steps=8)
  sizes = tree_sizes.TreeSizes(config, is_async=False)
  sent = play(sizes, [0], 100)
  assert set(sent) == {Sizes(num_nodes=16, num_steps=8)}
