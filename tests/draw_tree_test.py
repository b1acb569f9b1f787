"""Drawn trees: they show the rounds as they were, on a sound page."""

import collections
import dataclasses
import functools
import itertools
import json
import random
import re
import shutil
import subprocess
from xml.etree import ElementTree

import jax
import programs
import pytest
import tree_cases
from decoding_cases import request_of

import swiftspec_jax as ss
from experiments.pictures import tree_page, tree_rounds
from swiftspec_jax import errors
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.tokenizer import token_names

TREE = dataclasses.replace(
  tree_cases.TREE, num_nodes=6, width=3, num_draft_steps=2, num_restart_steps=0
)
NODE = tree_rounds.Node(
  token_id=7,
  text='x',
  parent=None,
  depth=0,
  log_prob=0.0,
  is_expanded=True,
  is_sent=True,
  is_accepted=False,
  is_next=False,
  is_kept=False,
)


@pytest.fixture(scope='module')
def pairs(model):
  """Target and draft of each mode; the draft is sometimes right."""
  first, second = jax.devices()[:2]
  draft = ss.load(model, devices=[first], num_layers=1)
  return {
    'serial': (ss.load(model, devices=[first]), draft),
    'async': (ss.load(model, devices=[second]), draft),
  }


question = functools.partial(
  request_of, b'Why is the sky blue?', max_new_tokens=60
)


@pytest.mark.parametrize(
  ('mode', 'forced', 'temperature'),
  [('serial', 0.5, 1.0), ('async', None, 0.0)],
)
def test_rounds_are_those_of_the_decoder(pairs, mode, forced, temperature):
  tree = dataclasses.replace(TREE, forced_acceptance=forced)
  request = question(temperature=temperature)
  rounds = tree_rounds.collect(*pairs[mode], request, tree, 1000)
  *_, last = ss.Decoder(pairs[mode][0]).run([request])
  known = dataclasses.replace(
    request, reference_token_ids=last.result.token_ids
  )
  *_, last = ss.Decoder(*pairs[mode], tree=tree).run([known])
  result = last.result
  num_plain = result.stats.num_plain_rounds
  assert len(rounds) == result.stats.num_rounds - num_plain
  tokens = [text for r in rounds for text in r.emitted]
  names = token_names.of(pairs[mode][0].tokenizer)
  # The first one came of the prompt's end, and the last one may be plain.
  assert rounds[0].position == len(request.token_ids)
  assert len(tokens) + 1 + num_plain == len(result.token_ids)
  assert tokens == [
    names[t].text for t in result.token_ids[1 : 1 + len(tokens)]
  ]
  # The last verdict is nobody's, unless a plain round comes after it.
  followed = rounds if num_plain else rounds[:-1]
  outcomes = collections.Counter(r.outcome for r in followed)
  assert outcomes[tree_lib.HIT] == result.stats.num_hits
  assert outcomes[tree_lib.LATE_HIT] == result.stats.num_late_hits
  assert outcomes[tree_lib.MISS] == result.stats.num_misses
  if not num_plain:  # which the draft would have prepared, too
    num_forwards = sum(r.num_forwards for r in rounds)
    assert num_forwards == result.stats.num_draft_forwards
  for before, after in itertools.pairwise(rounds):
    assert after.position == before.position + len(before.emitted)
    kept = [n.text for n in before.nodes if n.is_kept]
    assert [n.text for n in after.nodes[: len(kept)]] == kept
    assert after.nodes[0].text == before.emitted[-1]
    next_root = [n.is_expanded for n in before.nodes if n.is_next]
    expected = {
      tree_lib.HIT: [True],
      tree_lib.LATE_HIT: [False],
      tree_lib.MISS: [],
    }
    assert next_root == expected[before.outcome]


def raw_trees(target, draft, request, tree_config, num_rounds):
  """The trees that the rounds must show, read without their code."""
  decoder = ss.Decoder(target, draft, tree=tree_config, run_ahead=0)
  with decoder.engine_for([request]) as engine:
    handle = engine.submit(request, shows_drafts=True)
    while num_rounds:
      if engine.step().lengths.any():
        num_rounds -= 1
        tree = jax.device_get(engine.drafter.rows.state.tree)
        yield tree, handle.latest


@pytest.mark.parametrize(
  ('mode', 'max_nodes'), [('serial', 12), ('async', 1000)]
)
def test_page_shows_the_raw_trees(pairs, mode, max_nodes):
  rounds = tree_rounds.collect(*pairs[mode], question(), TREE, 5)
  facts = tree_page.facts(*pairs[mode], TREE, 'why?')
  page = tree_page.render(rounds, facts, max_nodes)
  sections = list(ElementTree.fromstring(page).iter('section'))
  assert len(sections) == 5
  raw = raw_trees(*pairs[mode], question(), TREE, 5)
  for section, round_, (tree, update) in zip(
    sections, rounds, raw, strict=True
  ):
    boxes = json.loads(section.find('.//svg').get('data-boxes'))
    drawn = collections.Counter(
      name for box in boxes for name in box['classes'].split()
    )
    size = int(tree.size[0])
    is_miss = round_.outcome == tree_lib.MISS
    assert len(boxes) == min(size, max_nodes) + is_miss
    assert all(box['parent'] < i for i, box in enumerate(boxes) if i)
    assert drawn['missed'] == is_miss
    assert drawn['next'] == (not is_miss)
    assert drawn['root'] == 1
    assert drawn['sent'] == 1 + len(update.draft_nodes)
    assert drawn['accepted'] == len(update.token_ids) - 1
    num_expanded = int((tree.nodes.cache_slots[0] >= 0).sum())
    if max_nodes > size:
      num_candidates = drawn['candidate']
      assert num_candidates == size - num_expanded
    text = ''.join(section.itertext())
    assert f'nodes of the tree {size} · expanded {num_expanded} · ' in text
    assert f'not drawn {max(size - max_nodes, 0)}' in text


@pytest.mark.skipif(not shutil.which('node'), reason='needs Node.js')
def test_layout_has_no_collisions():
  generator = random.Random(0)
  trees = []
  for size in range(1, 60):
    probs, parents = [1.0], [None]
    for i in range(1, size):
      parents.append(generator.randrange(i))
      probs.append(probs[parents[-1]] * generator.random())
    passed, node = {0}, 0
    while node is not None:
      children = [i for i, parent in enumerate(parents) if parent == node]
      node = generator.choice([None, *children])
      passed.add(node)
    trees.append(
      [
        {'parent': parent, 'prob': prob, 'isPassed': i in passed}
        for i, (parent, prob) in enumerate(zip(parents, probs, strict=True))
      ]
    )
  script = programs.ROOT / 'swiftspec_jax' / 'server' / 'page' / 'drawing.js'
  code = f"""{script.read_text()}
    const trees = {json.dumps(trees)};
    trees.forEach(Tree.place);
    console.log(JSON.stringify(trees));"""
  done = subprocess.run(
    ['node', '-'], input=code, capture_output=True, text=True, check=True
  )
  for boxes in json.loads(done.stdout):
    places = {(box['column'], box['row']) for box in boxes}
    assert len(places) == len(boxes)
    assert {box['row'] for box in boxes if box['isPassed']} == {0}
    for i, box in enumerate(boxes):
      children = [other for other in boxes if other['parent'] == i]
      assert {child['column'] for child in children} <= {box['column'] + 1}
      if children:
        assert min(child['row'] for child in children) == box['row']
      unlikely = [child for child in children if not child['isPassed']]
      by_prob = sorted(unlikely, key=lambda child: -child['prob'])
      assert by_prob == sorted(unlikely, key=lambda child: child['row'])


def test_page_is_escaped_and_complete():
  nasty = '</svg><script>alert("&\'")</script> \n\t\x00\x7f\u200b'
  root = dataclasses.replace(NODE, text=nasty)
  child = dataclasses.replace(
    NODE, text=' <b>&', parent=0, depth=1, log_prob=-1.0, is_accepted=True
  )
  round_ = tree_rounds.Round(
    nodes=(root, child),
    position=3,
    context=nasty,
    emitted=(' <b>&', nasty),
    outcome=tree_lib.MISS,
    num_forwards=1,
  )
  page = tree_page.render([round_], {'prompt': nasty, '<name>': '&'})
  tree = ElementTree.fromstring(page)
  assert len(list(tree.iter('script'))) == 1
  boxes = json.loads(tree.find('.//section//svg').get('data-boxes'))
  names = [box['name'] for box in boxes]
  assert '␣<b>&' in names
  assert '</svg><script>a…'[:15] in names[0]
  assert not re.search(r'(src|href)=|url\(|@import', page)
  shown = ''.join(tree.itertext())
  assert '␣↵⇥\\x00\\x7f\\u200b' in shown
  assert '\x00' not in page


def test_rounds_end_with_the_output(pairs):
  request = question(max_new_tokens=3)
  rounds = tree_rounds.collect(*pairs['async'], request, TREE, 10)
  assert sum(len(r.emitted) for r in rounds) == 2
  target, draft = pairs['async']
  *_, last = ss.Decoder(target).run([request])
  config = dataclasses.replace(
    target.config, eos_token_ids=last.result.token_ids[1:2]
  )
  stopping = dataclasses.replace(target, config=config)
  assert len(tree_rounds.collect(stopping, draft, request, TREE, 10)) == 1
  with pytest.raises(errors.UserError, match='num_rounds must be at least 1'):
    tree_rounds.collect(target, draft, request, TREE, 0)
  with pytest.raises(errors.UserError, match='the prompt is empty'):
    tree_rounds.collect(target, draft, ss.Request(token_ids=()), TREE, 1)


def test_program(model, tmp_path):
  path = tmp_path / 'trees.html'
  output = programs.output_of(
    'draw_tree',
    f'--target={model}',
    f'--draft={model}',
    '--draft_layers=1',
    '--forced_acceptance=0.7',
    '--max_new_tokens=40',
    '--prompt=Is <i> & a tag?',
    f'--output={path}',
  )
  assert output.splitlines()[-1] == f'written to {path}'
  assert [line[:8] for line in output.splitlines()[:6]] == [
    f'round {i}:' for i in range(1, 7)
  ]
  page = path.read_text(encoding='utf-8')
  assert 'Is &lt;i&gt; &amp; a tag?' in page
  assert len(list(ElementTree.fromstring(page).iter('section'))) == 6
