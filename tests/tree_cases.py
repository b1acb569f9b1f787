"""Pairs of small models that decode with trees, and requests for them."""

import dataclasses
import functools

import decoding_cases
import jax

import swiftspec_jax as ss
from swiftspec_jax import policies, testing
from swiftspec_jax.config import TreeConfig

CONFIG = dataclasses.replace(
  decoding_cases.CONFIG, num_layers=2, max_context=256
)
TREE = TreeConfig(
  num_nodes=8,
  width=4,
  num_draft_steps=3,
  branching=4,
  num_restart_steps=1,
  min_leaf_mass=0.0,
  capacity=64,
  num_cache_rows=32,
  prompt_lookup=False,
)
HYBRID = dataclasses.replace(TREE, prompt_lookup=True)
FEATURE_LAYERS = (0, 1)
# A program is compiled for its devices. The draft's, which take the longest,
# are the same in both modes.
DEVICES = {'serial': ((0, 1), (0, 1)), 'async': ((1, 2), (0, 1))}


@functools.cache
def pair(
  target_devices, draft_devices, draft_seed=0, vocab_size=262, num_layers=1
):
  """A target and a draft; the draft of seed 0 has the target's weights."""
  config = dataclasses.replace(
    CONFIG, vocab_size=vocab_size, num_layers=num_layers
  )
  devices = jax.devices()
  target = testing.random_model(config, devices=devices[slice(*target_devices)])
  draft = testing.random_model(
    config,
    seed=draft_seed,
    name='draft',
    devices=devices[slice(*draft_devices)],
  )
  return target, draft


@functools.cache
def fed_pair(target_devices, draft_devices, vocab_size=262):
  """A target, and a draft of its weights that also reads its features."""
  target, stand_alone = pair(
    target_devices, draft_devices, vocab_size=vocab_size, num_layers=2
  )
  config = dataclasses.replace(
    CONFIG,
    vocab_size=vocab_size,
    feature_layers=FEATURE_LAYERS,
    feature_dim=len(FEATURE_LAYERS) * CONFIG.embed_dim,
  )
  draft = testing.random_model(
    config, seed=1, name='head', devices=jax.devices()[slice(*draft_devices)]
  )
  fusion = 0.12 * draft.params['feature_fusion']
  params = {**draft.params, **stand_alone.params, 'feature_fusion': fusion}
  return target, dataclasses.replace(draft, params=params)


def requests_of(num_requests, **sampling):
  """Requests with seeds of their own."""
  requests = decoding_cases.requests_of(
    num_requests, longest_prompt=60, **sampling
  )
  return [
    dataclasses.replace(
      request, sampling=dataclasses.replace(request.sampling, seed=i)
    )
    for i, request in enumerate(requests)
  ]


def path_to(tree, node):
  """Tokens from the root to a node of the first tree."""
  path = []
  while node >= 0:
    path.append(int(tree.nodes.token_ids[0, node]))
    node = int(tree.nodes.parents[0, node])
  return path[::-1]


# Five for the three rows of a decoder: rows come and go.
MIXED = [
  *requests_of(3),
  *requests_of(1, temperature=1.0),
  *requests_of(1, temperature=0.7, top_k=20, top_p=0.9),
]


@functools.cache
def plain(num_layers=1):
  """What plain decoding makes of the mixed requests."""
  target, _ = pair((0, 1), (0, 1), num_layers=num_layers)
  return decoding_cases.run(ss.Decoder(target, batch_size=3), MIXED)


class Pauses(policies.Policy):
  """Drafts as much as it can, but in some rounds nothing."""

  def __init__(self, *rounds):
    self._rounds, self._round = rounds, 0

  def plan_draft(self, view):
    self._round += view.num_rows > 0
    is_pause = self._round in self._rounds
    return policies.DraftPlan(lengths=view.limits * (not is_pause))
