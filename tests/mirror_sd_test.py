"""Mirror-SD: the target's first layers tell the draft what they expect."""

import collections
import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from decoding_cases import assert_same, run
from tree_cases import CONFIG, DEVICES, MIXED, STEP_TIMES, TREE, pair

import swiftspec_jax as ss
from experiments.pictures import timeline_plot
from swiftspec_jax import errors, profiling, testing, tree_step, types
from swiftspec_jax import timeline as timeline_lib
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.drafting.no_draft import NoDraft
from swiftspec_jax.pipelines.target_rows import TargetRows
from swiftspec_jax.serving.drafters.models.living_trees import LivingTrees

LOOKUPS = {'prompt_lookup': True, 'suffix_lookup': True, 'width': 2}


@functools.cache
def plain():
  """What plain decoding makes of the mixed requests."""
  target, _ = pair((0, 1), (0, 1), num_layers=2)
  return run(ss.Decoder(target, batch_size=3), MIXED)


def test_warmup_compiles_both_programs_of_a_step():
  """It is first, as the others find its programs."""
  target, draft = pair(*DEVICES['async'], 1, num_layers=2)
  tree = dataclasses.replace(TREE, is_adaptive=True, exit_layer=1)
  tree_decoder = ss.Decoder(target, draft, tree=tree, batch_size=3)
  jax.clear_caches()
  tree_decoder.warmup(200, MIXED[-1].sampling)
  with profiling.count_compilations() as compilations:
    found = run(tree_decoder, MIXED)
    tree_decoder.pipeline.assume(STEP_TIMES)
    pausing = run(tree_decoder, MIXED)
  assert compilations.count == 0
  assert_same(found, plain())
  assert_same(pausing, plain())


@pytest.mark.parametrize(
  ('draft_seed', 'run_ahead', 'changes'),
  [
    (0, 0, {}),
    (1, 2, {}),
    (0, 1, LOOKUPS),
    (1, 1, {'is_adaptive': True, 'num_nodes': 1, 'exit_layer': -1}),
  ],
)
def test_output_is_that_of_plain_decoding(draft_seed, run_ahead, changes):
  """Greedy and sampled; rows of different lengths come and go."""
  target, draft = pair(*DEVICES['async'], draft_seed, num_layers=2)
  tree_decoder = ss.Decoder(
    target,
    draft,
    tree=dataclasses.replace(TREE, **({'exit_layer': 1} | changes)),
    batch_size=3,
    run_ahead=run_ahead,
  )
  assert_same(run(tree_decoder, MIXED), plain())


def test_layers_that_say_it_all():
  """The last layer adds nothing, so the one before it knows each verdict."""
  target, draft = pair(*DEVICES['async'], 1, num_layers=2)
  first, last = target.params['layers']
  silent = {name: last[name] for name in ('attention_out', 'down')}
  layers = [first, {**last, **jax.tree.map(lambda x: 0 * x, silent)}]
  silent_target = dataclasses.replace(
    target, params={**target.params, 'layers': layers}
  )
  tree = dataclasses.replace(TREE, exit_layer=1)
  misses = [
    sum(
      result.stats.num_misses
      for result in run(
        ss.Decoder(model, draft, tree=tree, batch_size=3), MIXED[2:]
      )
    )
    for model in (target, silent_target)
  ]
  assert misses[0] > 20
  assert misses[1] == 0


@pytest.mark.parametrize(('num_nodes', 'num_layers'), [(1, 1), (4, 2)])
def test_a_step_in_two_programs_is_that_of_one(num_nodes, num_layers):
  """Output, keys and values, and the features of layers before the exit."""
  config = dataclasses.replace(
    CONFIG, num_layers=3, sliding_window=16, sliding_layers=(False, True, False)
  )
  target = testing.random_model(config, devices=jax.devices()[:1])
  proposal = types.TreeProposal(
    token_ids=jnp.asarray([[7, 8, 9, 5]], jnp.int32),
    parents=jnp.asarray([[-1, 0, 0, 1]], jnp.int32),
    depths=jnp.asarray([[0, 1, 1, 2]], jnp.int32),
    size=jnp.asarray([num_nodes], jnp.int32),
    is_looked_up=jnp.zeros((1, 4), bool),
    log_probs=jnp.zeros((1, 4)),
    outcome=jnp.zeros(1, jnp.int32),
    num_forwards=jnp.zeros(1, jnp.int32),
  ).pack()
  request = ss.Request(token_ids=tuple(range(20)))
  found = []
  for num_begun in (0, num_layers):
    rows = TargetRows(
      target,
      NoDraft(),
      None,
      batch_size=1,
      num_query_tokens=4,
      feature_layers=(0, 2),
    )
    rows.prepare(40, [request.sampling])
    rows.admit(0, request, 40, [(0, 32, 19)])
    state, begun = rows.state, None
    if num_begun:
      state, begun, _ = tree_step.begin_step(
        target.params,
        state,
        proposal,
        config=config,
        num_nodes=num_nodes,
        num_layers=num_begun,
        num_tokens=2,
      )
      assert list(begun) == [0, 1][:num_begun]
    state, output = tree_step.verify_step(
      target.params, state, proposal, begun, config=config, num_nodes=num_nodes
    )
    found.append((output.packed, state.lengths, state.target_cache))
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), *found)


def weights(tree):
  """Returns the nodes of a small tree: path, weight."""
  tree = jax.device_get(tree)
  found = {}
  paths = []
  for i in range(int(tree.size[0])):
    parent = int(tree.parents[0, i])
    path = paths[parent] if parent >= 0 else ()
    paths.append((*path, int(tree.token_ids[0, i])))
    found[paths[-1]] = round(float(tree.log_probs[0, i]), 2)
  return found


@jax.jit
def expected_by_hand():
  """A small tree, what of it was sent, and the tree with what is expected."""
  tree = tree_lib.new_tree(
    np.array([1]), capacity=16, num_cache_rows=8, chain_length=3
  )
  tree = tree_lib.expand(
    tree,
    tree_lib.best_candidates(tree, 1),
    jnp.asarray([[[2, 3, 4]]]),
    jnp.asarray([[[-0.5, -1.0, -2.0]]]),
  )
  chain = jnp.asarray([[[2, 5]]]), jnp.asarray([[[-0.5, -0.25]]])
  tree = tree_lib.add_chains(tree, *chain)
  chosen = tree_lib.select(tree, 4)
  tree = tree_lib.mark_sent(tree, chosen)
  expected = tree_lib.expect(
    tree,
    jnp.asarray([[[3, 9], [5, 6], [7, 8], [6, 2]]]),
    jnp.asarray([[[-0.25, -3], [-0.75, -1], [-1, -1], [-0.5, -jnp.inf]]]),
  )
  return chosen, tree, expected


def test_expected_tokens_by_hand():
  """t1 is expanded; t2, t3 and t4 are candidates, and t5 below one of them."""
  chosen, sent, tree = expected_by_hand()
  assert chosen.token_ids.tolist() == [[1, 2, 5, 3]]
  assert np.asarray(sent.sent_as)[0, :5].tolist() == [0, 1, 3, -1, 2]
  assert weights(tree) == {
    (1,): 0,
    (1, 2): -0.5,
    (1, 3): -0.25,  # was less probable for the draft
    (1, 4): -2,  # not expected
    (1, 2, 5): -0.75,  # was more probable for the draft
    (1, 9): -3,
    (1, 2, 6): -1.5,
    (1, 3, 6): -0.75,
    # Nothing below t5, as t2 is not expanded.
  }


def test_a_timeline_sees_both_programs_of_a_step():
  target, draft = pair(*DEVICES['async'], num_layers=2)
  timeline = ss.Timeline()
  tree = dataclasses.replace(TREE, exit_layer=1)
  tree_decoder = ss.Decoder(
    target, draft, tree=tree, batch_size=3, timeline=timeline
  )
  run(tree_decoder, MIXED[3:])
  spans = timeline.finish()
  counts = collections.Counter(span.name for span in spans)
  assert counts['begin'] == counts['verify'] == counts['expect'] > 0
  steps = [
    begin.end - begin.start + verify.end - verify.start
    for begin, verify in zip(
      *([s for s in spans if s.name == name] for name in ('begin', 'verify')),
      strict=True,
    )
  ]
  figures = timeline_lib.summarize(spans)
  assert figures['target_step_seconds'] == np.median(steps)
  assert timeline_plot.draw(spans)


def test_refusals():
  with pytest.raises(
    errors.UserError, match='exit_layer must be 0 with forced'
  ):
    dataclasses.replace(TREE, exit_layer=1, forced_acceptance=0.5)
  target, draft = pair(*DEVICES['serial'], num_layers=2)
  tree = dataclasses.replace(TREE, exit_layer=1)
  with pytest.raises(errors.UserError, match='exit_layer=1 has no effect'):
    ss.Decoder(target, draft, tree=tree)
  with pytest.raises(errors.UserError, match='has no effect in an engine'):
    LivingTrees(model=draft, tree=tree)
  target, draft = pair(*DEVICES['async'], num_layers=2)
  for exit_layer in (2, -2):
    tree = dataclasses.replace(TREE, exit_layer=exit_layer)
    with pytest.raises(errors.UserError, match='must be between -1 and 1'):
      ss.Decoder(target, draft, tree=tree)


@pytest.mark.ci
def test_program_of_exit_layers(model, tmp_path):
  """The last layer expects what the target chose."""
  status, output, complaints = programs.run(
    'exit_layers',
    f'--target={model}',
    '--limit=2',
    '--max_new_tokens=8',
    f'--output_dir={tmp_path}',
  )
  assert status == 0, complaints
  lines = (tmp_path / 'rows.jsonl').read_text().splitlines()
  *_, last = map(json.loads, lines)
  assert last['among_1'] == last['among_8'] == 1
  assert last['num_tokens'] <= 16
  assert f'{last["layer"]:5}  1.00  1.00  1.00' in output
  flags = f'--target={model}', '--layers=1,99', f'--output_dir={tmp_path / "x"}'
  assert '--layers=1,99 must be at most' in programs.error_of(
    'exit_layers', *flags
  )
