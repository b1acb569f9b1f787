"""A small model, and requests that are decoded to their ends."""

import numpy as np

import swiftspec_jax as ss
from swiftspec_jax.config import ModelConfig

# A layer more is a fifth more to compile; tests of caches take two.
CONFIG = ModelConfig(
  family='llama',
  vocab_size=262,
  num_layers=1,
  embed_dim=32,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  ffw_dim=64,
  max_context=512,
)


def requests_of(num_requests, longest_prompt=90, **sampling):
  """Random prompts and, unless it is given, random numbers of tokens."""
  rng = np.random.default_rng(3)
  return [
    ss.Request(
      token_ids=tuple(
        rng.integers(0, 256, rng.integers(1, longest_prompt)).tolist()
      ),
      sampling=ss.SamplingParams(
        **{'max_new_tokens': int(rng.integers(1, 50)), **sampling}
      ),
    )
    for _ in range(num_requests)
  ]


def run(decoder, requests):
  """Returns the results in the order of the requests."""
  events = list(decoder.run(requests))
  found = {e.index: e.result for e in events if e.result is not None}
  for i, result in found.items():
    assert ''.join(e.text for e in events if e.index == i) == result.text
  return [found[i] for i in range(len(requests))]


def assert_same(got, want):
  for one, other in zip(got, want, strict=True):
    assert one.token_ids == other.token_ids
    assert one.finish_reason == other.finish_reason
