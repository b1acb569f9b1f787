"""Engines of a small model, and random load for them."""

import dataclasses

import jax
import numpy as np
from decoding_cases import CONFIG, sizes_of

import swiftspec_jax as ss
from swiftspec_jax import policies, testing
from swiftspec_jax.drafters import make_drafter
from swiftspec_jax.drafters.models.draft_tree import TreeDraft
from swiftspec_jax.drafters.models.self_draft import SelfDraft
from swiftspec_jax.drafters.texts.datastore import Datastore
from swiftspec_jax.drafters.texts.suffix_lookup import SuffixLookup
from swiftspec_jax.drafters.texts.token_store import TokenStore
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.tree import types

TARGET = testing.random_model(CONFIG, seed=0, name='target')
BAD_DRAFT = testing.random_model(CONFIG, seed=1, name='bad-draft')
READING_DRAFT = testing.random_model(
  dataclasses.replace(
    CONFIG, feature_layers=(0,), feature_dim=CONFIG.embed_dim
  ),
  seed=1,
  name='reading-draft',
)


def _near(model, deviation):
  """A model of about the same opinions."""
  generator = np.random.default_rng(0)

  def disturb(array):
    x = np.asarray(array)
    noise = generator.normal(0, deviation * x.std(), x.shape)
    return jax.device_put(x + noise.astype(x.dtype), array.sharding)

  params = jax.tree.map(disturb, model.params)
  return dataclasses.replace(model, params=params, name='near-target')


NEAR_TARGET = _near(TARGET, 0.1)
STORE = TokenStore.of_texts(
  np.random.default_rng(0).integers(0, 256, (4, 2000)), TARGET.tokenizer
)
DRAFTS = {
  'lookup': ss.PromptLookup(prompt_lookup_min=1),
  'suffixes': SuffixLookup(min_match=1, num_past_tokens=200),
  'datastore': Datastore(store=STORE, min_prob=0),
  'itself': TARGET,
  'self': SelfDraft(num_sink_tokens=8, window=16),
  'bad_draft': BAD_DRAFT,
  'tree': TreeDraft(model=NEAR_TARGET, width=3, branching=3),
  'bad_tree': TreeDraft(model=READING_DRAFT),
}
MAX_CONTEXT = 160
# Of 8 tokens: four long rows do not fit. A program is compiled for this number.
NUM_PAGES = 40


CHAINS = {'rows': (1, 4), 'lengths': (0, 1, 2, 3)}
FEW = {**CHAINS, 'rows': (4,)}  # of the rows, and of the contexts
ALL_OR_NONE = {'rows': (4,), 'lengths': (0, 3)}
ONE_CONTEXT = dict(CHAINS)
# Programs that grow trees take long to compile, so there are few.
TREES = {
  'rows': (4,),
  'lengths': tuple(range(7)),
  'draft_steps': (0, 1, 2, 3, 3, 3, 3),
}


def make_sizes(num_pages=NUM_PAGES, query_tokens=(24,), drafts=CHAINS):
  """Few programs, all small; pages are short, so that rows own several."""
  contexts = (64, MAX_CONTEXT) if drafts is CHAINS else (MAX_CONTEXT,)
  return sizes_of(
    num_pages, MAX_CONTEXT, 8, contexts, query_tokens=query_tokens, **drafts
  )


def make_engine(
  draft=None, policy=None, chains=CHAINS, target=TARGET, **options
):
  drafts = TREES if make_drafter.spec_of(draft).makes_trees else chains
  sizes = make_sizes(drafts=drafts)
  return Engine(target, draft, sizes=sizes, policy=policy, **options)


class RandomLengths(policies.Policy):
  """Asks for any draft, looked up or not, and verifies any part of it."""

  def __init__(self, seed=0, share_of_none=0.3):
    self._generator = np.random.default_rng(seed)
    self._share_of_none = share_of_none
    self.outcomes = []

  def plan_draft(self, view):
    lengths = self._generator.integers(0, view.limits + 1)
    if self._generator.random() < self._share_of_none:
      lengths[:] = 0
    is_lookup = view.can_look_up and self._generator.random() < 0.5
    return policies.DraftPlan(lengths=lengths, is_lookup=is_lookup)

  def plan_verify(self, view, plan, drafts):
    return self._generator.integers(0, drafts.lengths + 1)

  def observe(self, outcome):
    self.outcomes.append(outcome)


def random_sampling(generator):
  """Greedy, drawn, truncated or adjusted requests."""
  options = {
    'max_new_tokens': int(generator.integers(1, 40)),
    'seed': int(generator.integers(0, 1000)),
  }
  kind = generator.integers(0, 5)
  if kind:
    options['temperature'] = float(generator.uniform(0.5, 1.2))
  if kind == 2:
    options |= {'top_k': 20, 'top_p': 0.9, 'min_p': 0.01}
  if kind == 3:
    options |= {
      'repetition_penalty': 1.2,
      'presence_penalty': 0.8,
      'frequency_penalty': 0.3,
      'logit_bias': {5: 1.0},
      'banned_token_ids': (7, 8),
      'logprobs': True,
      'top_logprobs': 3,
    }
  if kind == 4:
    options |= {
      'forced_token_ids': (3, 4, 5),
      'stop_token_ids': tuple(range(0, 256, 2)),
      'min_tokens': options['max_new_tokens'],
    }
  return ss.SamplingParams(**options)


def random_requests(count, seed=0, longest_prompt=90):
  generator = np.random.default_rng(seed)
  requests = []
  for _ in range(count):
    period = int(generator.integers(2, 20))
    prompt = generator.integers(0, 256, period).tolist() * 50
    length = int(generator.integers(1, longest_prompt))
    requests.append(
      ss.Request(
        token_ids=tuple(prompt[:length]), sampling=random_sampling(generator)
      )
    )
  return requests


def results_of(engine, requests):
  """Returns the results of requests that all come at once."""
  handles = [engine.submit(request) for request in requests]
  return [handle.result() for handle in handles]


def assert_empty(engine, num_pages=NUM_PAGES):
  """No page, slot or request is left."""
  scheduler = engine.scheduler
  assert scheduler.table.num_free == num_pages
  assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
  assert (scheduler.table.pages < 0).all()
  assert engine.num_requests == 0


def tokens_of(drafts):
  """Draft tokens [U, K] of an engine's drafts, chains or trees."""
  if drafts.trees is None:
    return np.asarray(drafts.chains)
  return types.TreeProposal.unpack(np.asarray(drafts.trees)).token_ids[:, 1:]


def trees_of(drafts):
  """The trees of an engine's drafts, on the host."""
  return types.TreeProposal.unpack(np.asarray(drafts.trees))
