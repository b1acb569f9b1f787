"""Devices that share the tokens of a sequence: equal numbers, no KV moves."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_cases import TREES, make_sizes
from decoding_cases import CONFIG

import swiftspec_jax as ss
from kernels_pallas.paged_attention import api, reference
from swiftspec_jax import errors, sharding, testing
from swiftspec_jax.cache import paged
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.serving.drafters.models.draft_tree import TreeDraft
from swiftspec_jax.serving.engine import PageEngine

# Devices, and how many of them share tokens.
SPLITS = [(2, 2), (4, 2), (8, 8)]


@pytest.mark.parametrize(('num_devices', 'num_parts'), SPLITS)
def test_parts_make_up_the_attention(num_devices, num_parts):
  pass


def run(model, draft):
  rng = np.random.default_rng(0)
  sizes = make_sizes(drafts=TREES) if isinstance(draft, TreeDraft) else make_sizes()
  engine = PageEngine(model, draft, sizes=sizes, policy=FixedLength(3))
  handles = [engine.submit(ss.Request(token_ids=tuple(rng.integers(0,250,n).tolist()), sampling=ss.SamplingParams(max_new_tokens=30))) for n in (100, 7, 60)]
  return [h.result().token_ids for h in handles]

@pytest.mark.parametrize(('num_devices', 'num_parts'), SPLITS)
@pytest.mark.parametrize('mode', ['none', 'lookup', 'model', 'tree'])
def test_same(num_devices, num_parts, mode):
  want = run(testing.random_model(CONFIG), None)
  model = testing.random_model(CONFIG, devices=jax.devices()[:num_devices], sequence_devices=num_parts)
  draft = {'none': None, 'lookup': ss.PromptLookup(prompt_lookup_min=1), 'model': model, 'tree': TreeDraft(model=model, width=3, branching=3)}[mode]
  assert run(model, draft) == want
