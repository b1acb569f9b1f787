"""Long runs: nothing is compiled again and nothing piles up."""

import pathlib

import jax
import numpy as np
import pytest
from tree_cases import CONFIG

import swiftspec_jax as ss
from swiftspec_jax import profiling, testing
from swiftspec_jax.config import TreeConfig

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('no_programs')]


def resident_bytes():
  pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
  return pages * 4096


def play(tree_decoder, rng, num_prompts):
  num_tokens = 0
  requests = [
    ss.Request(
      token_ids=tuple(rng.integers(0, 256, rng.integers(1, 100)).tolist()),
      sampling=ss.SamplingParams(max_new_tokens=100, ignore_eos=True),
    )
    for _ in range(num_prompts)
  ]
  for event in tree_decoder.run(requests):
    if event.result is not None:
      num_tokens += event.result.stats.new_tokens
  return num_tokens


@pytest.mark.parametrize('num_rows', [1, 4])
def test_200_prompts_of_100_tokens(num_rows):
  devices = jax.devices()
  tree_decoder = ss.Decoder(
    testing.random_model(CONFIG, devices=devices[:1]),
    testing.random_model(CONFIG, devices=devices[1:2]),
    tree=TreeConfig(),
    batch_size=num_rows,
  )
  tree_decoder.warmup(256)
  rng = np.random.default_rng(0)
  play(tree_decoder, rng, 20)
  before, num_arrays = resident_bytes(), len(jax.live_arrays())
  with profiling.count_compilations() as compilations:
    num_tokens = play(tree_decoder, rng, 200)
  assert num_tokens == 20_000
  assert compilations.count == 0
  assert len(jax.live_arrays()) <= num_arrays
  assert resident_bytes() - before < 16 * 2**20
