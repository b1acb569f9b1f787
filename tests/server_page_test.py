"""The page at /, and what streams tell of speculation."""

import dataclasses
import functools
import json
import re

import numpy as np
import pytest
import server_cases
from decoding_cases import sizes_of
from report_test import Page
from server_cases import LENGTH, NAME, fetch, make_service, serving
from tree_cases import TREE

from swiftspec_jax import testing
from swiftspec_jax.drafters.models.draft_tree import TreeDraft
from swiftspec_jax.drafters.models.persistent_trees import PersistentTrees
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.server.service import Service


@pytest.fixture(scope='module')
def address():
  with serving(make_service(), api_keys=('key',)) as address:
    yield address


ask = functools.partial(server_cases.ask, Authorization='Bearer key')


def test_the_page_needs_no_key_and_asks_only_its_server(address):
  status, text = fetch(f'{address}/')
  assert status == 200
  answer, _ = ask(address, '/')
  assert answer.headers['Content-Type'] == 'text/html; charset=utf-8'
  policy = answer.headers['Content-Security-Policy']
  assert "default-src 'none'; connect-src 'self'" in policy
  assert not re.search(r'https?:|["\'(]//|url\(|@import|innerHTML', text)
  page = Page(text)
  assert not page.values('src')
  assert page.values('href') == ['data:,']
  # What the script fetches.
  paths = set(re.findall(r"ask\('([^']+)'", text))
  assert paths == {'v1/models', 'v1/chat/completions'}


def test_the_page_can_be_used_without_eyes_or_mouse(address):
  page = Page(fetch(f'{address}/')[1])
  ids = page.values('id')
  assert len(ids) == len(set(ids))
  labels = page.values('for')
  for tag, attrs in page.elements:
    if tag in ('input', 'select', 'textarea'):
      assert attrs['id'] in labels
  assert ('html', {'lang': 'en'}) in page.elements
  assert {'alert', 'status'} <= set(page.values('role'))
  assert not page.values('tabindex')
  assert not page.values('onclick')
  # Every element that the script names is there.
  text = fetch(f'{address}/')[1]
  assert set(re.findall(r"at\('(\w+)'\)", text)) <= set(ids)


def test_models_say_how_drafts_can_be_limited(address):
  _, text = ask(address, '/v1/models')
  limits = json.loads(text)['data'][0]['speculation']
  assert limits == {'max_tokens': LENGTH}


TOLD = {'stream_options': {'include_speculation': True}}


def choices(address, path='/v1/completions', **options):
  """Choices of the events of a stream."""
  body = {'model': NAME, 'max_tokens': 40, 'temperature': 0, 'stream': True}
  _, text = ask(address, path, {**body, **options})
  events = [part.removeprefix('data: ') for part in text.split('\n\n')]
  assert events[-2:] == ['[DONE]', '']
  return [c for event in events[:-2] for c in json.loads(event)['choices']]


def test_streams_tell_who_proposed_each_token(address):
  found = choices(address, prompt='aegc', **TOLD)
  steps = [choice['speculation'] for choice in found]
  for choice, step in zip(found, steps, strict=True):
    pieces = step['pieces']
    assert ''.join(piece['text'] for piece in pieces) == choice['text']
    *drafted, own = [piece['source'] for piece in pieces]
    assert set(drafted) <= {'lookup'}
    # A limit may cut the target's own token.
    assert own == 'target' or choice is found[-1]
    assert len(drafted) <= step['num_drafted'] <= LENGTH
  sources = [piece['source'] for step in steps for piece in step['pieces']]
  assert len(sources) == 40
  assert sources.count('lookup') > 0

  (*plain,) = choices(address, prompt='aegc', max_speculative_tokens=0, **TOLD)
  assert [c['speculation']['num_drafted'] for c in plain] == [0] * 40
  texts = [''.join(c['text'] for c in every) for every in (found, plain)]
  assert texts[0] == texts[1]
  assert {
    piece['source'] for c in plain for piece in c['speculation']['pieces']
  } == {'target'}


def test_streams_tell_it_only_if_asked(address):
  assert not any('speculation' in c for c in choices(address, prompt='aegc'))
  messages = [{'role': 'user', 'content': 'aegc'}]
  path = '/v1/chat/completions'
  opening, *rest = choices(address, path, messages=messages, **TOLD)
  assert 'speculation' not in opening
  assert all('speculation' in choice for choice in rest)


def test_stop_strings_cut_pieces_too(address):
  whole = ''.join(c['text'] for c in choices(address, prompt='aegc'))
  stop = whole[9:11]
  found = choices(address, prompt='aegc', stop=stop, **TOLD)
  pieces = [p for c in found for p in c['speculation']['pieces']]
  text = ''.join(piece['text'] for piece in pieces)
  assert text == whole[: whole.index(stop)]
  assert len(pieces) == whole.index(stop) + len(stop)


def told(answer):
  """Pieces and draft nodes of the steps of a stream, with their numbers."""
  return [
    (s['pieces'], s['draft_nodes'], s['num_drafted'])
    for s in (choice['speculation'] for choice in answer)
  ]


def check_nodes(steps):
  for pieces, nodes, num_drafted in steps:
    assert len(nodes) <= num_drafted
    assert all(node['parent'] < i for i, node in enumerate(nodes))
    accepted = [i for i, node in enumerate(nodes) if node['is_accepted']]
    above = [-1, *accepted[:-1]]
    assert [nodes[i]['parent'] for i in accepted] == above[: len(accepted)]
    # The end of the text may cut what was accepted.
    drafted = [piece for piece in pieces if piece['source'] != 'target']
    assert drafted == [
      {'text': nodes[i]['text'], 'source': nodes[i]['source']}
      for i in accepted[: len(drafted)]
    ]


ALL = {'include_speculation': True, 'include_draft_nodes': True}


def test_streams_show_drafts(address):
  steps = told(choices(address, prompt='aegc', stream_options=ALL))
  check_nodes(steps)
  for _, nodes, num_drafted in steps:
    assert len(nodes) == num_drafted
    assert [node['parent'] for node in nodes] == [*range(-1, num_drafted - 1)]
    assert {node['prob'] for node in nodes} <= {None}
    assert {node['source'] for node in nodes} <= {'lookup'}
  assert any(nodes for _, nodes, _ in steps)
  body = {'model': NAME, 'prompt': 'a', 'stream': True}
  body['stream_options'] = {'include_draft_nodes': True}
  _, text = ask(address, '/v1/completions', body)
  assert 'needs include_speculation=true' in text


def make_tree_service(makes_draft):
  """The text is abcdeabcde; the draft does not know what follows d and e."""
  cycle = np.eye(8)[[1, 2, 3, 4, 0, 5, 6, 7]]
  table = 0.6 * cycle + 0.4 / 8
  table[[3, 4]] = 0.9 * np.eye(8)[[6, 6]] + 0.1 / 8
  target = testing.table_model(cycle, name=NAME)
  drafts = {'lengths': (0, 7), 'draft_steps': (0, 3)}
  engine = Engine(
    target,
    makes_draft(testing.table_model(table, name='draft')),
    sizes=sizes_of(20, 64, rows=(1,), query_tokens=(8,), **drafts),
    policy=FixedLength(7),
  )
  return Service(engine, target)


TREES = {
  'tree': lambda model: TreeDraft(model=model, width=4, branching=2),
  'serial': lambda model: PersistentTrees(
    model=model, tree=dataclasses.replace(TREE, branching=2, prompt_lookup=True)
  ),
}


@pytest.mark.parametrize('mode', TREES)
def test_trees_tell_lookups_from_the_draft_model(mode):
  with serving(make_tree_service(TREES[mode])) as address:
    steps = told(
      choices(address, prompt='a', max_tokens=40, stream_options=ALL)
    )
  check_nodes(steps)
  pieces = [piece for own, _, _ in steps for piece in own]
  assert ''.join(piece['text'] for piece in pieces) == 'bcdea' * 8
  by_letter = {
    letter: {p['source'] for p in pieces if p['text'] == letter}
    for letter in 'abcde'
  }
  # After d and e the draft is wrong, after the others right.
  assert 'draft' not in by_letter['e']
  assert 'lookup' in by_letter['e']
  assert 'draft' in by_letter['b'] | by_letter['c']
  for _, nodes, _ in steps:
    for node in nodes:
      assert 0 < node['prob'] <= 1
      above = nodes[node['parent']]['prob'] if node['parent'] >= 0 else 1
      assert node['prob'] <= above
