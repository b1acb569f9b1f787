"""What has to be compiled, as numbers that cannot creep back.

Every program is compiled before the first token that needs it, so its size and
the number of programs are what a user waits for.
"""

import dataclasses
import re

import jax
import numpy as np
import pytest
from absl import flags as absl_flags

import swiftspec_jax as ss
from swiftspec_jax import testing
from swiftspec_jax.cli.flags import engine_flags
from swiftspec_jax.config import ModelConfig, TreeConfig
from swiftspec_jax.drafters.trees import tree_draft
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.models import decoder
from swiftspec_jax.models.cache import dense
from swiftspec_jax.runtime import profiling

absl_flags.FLAGS.mark_as_parsed()

CONFIG = ModelConfig(
  family='llama',
  vocab_size=263,
  num_layers=2,
  embed_dim=48,
  num_heads=6,
  num_kv_heads=2,
  head_dim=16,
  ffw_dim=72,
  max_context=1024,
  tie_embeddings=True,
)
# With a text of 8 tokens and 20 more, in a process that has compiled nothing:
# programs of XLA, small ones of the host's own arrays too, with some room.
MOST_PROGRAMS = {'plain': 9, 'lookup': 9, 'auto': 12, 'serial': 18}


def model_of(num_layers):
  config = dataclasses.replace(CONFIG, num_layers=num_layers)
  return testing.random_model(config, dtype='float32')


def instructions(num_layers, num_tokens):
  """Returns the numbers of all instructions of a step, and of native calls."""
  model = model_of(num_layers)
  cache = dense.init(model.config, 1, 64, model.dtype, model.mesh)

  def run(params, token_ids, cache):
    return decoder.forward(
      params, model.config, token_ids, cache, starts=cache.kv_lengths
    )

  token_ids = np.zeros((1, num_tokens), np.int32)
  text = jax.jit(run).lower(model.params, token_ids, cache).compile().as_text()
  return np.array(
    [
      len(re.findall(r'^\s+(?:ROOT )?%?\S+ = ', text, re.MULTILINE)),
      text.count(' custom-call('),
    ]
  )


@pytest.mark.parametrize('num_tokens', [1, 8])
def test_a_layer_is_six_native_calls_and_little_else(num_tokens):
  of_layer = instructions(3, num_tokens) - instructions(2, num_tokens)
  all_instructions, calls = of_layer
  assert calls == 6
  assert all_instructions <= 30


def test_a_turn_of_a_draft_has_few_kernels():
  """They are what has to be compiled in tree modes, not the layers."""
  draft, sizes = model_of(1), TreeConfig()
  state = tree_draft.init(
    draft.config, sizes, draft.dtype, batch_size=1, capacity=64, mesh=draft.mesh
  )
  turn = tree_draft.take_turn.lower(
    draft.params,
    state,
    np.zeros((1, sizes.num_nodes + 1), np.int32),
    config=draft.config,
    tree_config=sizes,
    num_nodes=sizes.num_nodes,
    num_steps=sizes.num_turn_steps,
  )
  assert turn.compile().as_text().count(' fusion(') <= 200


def test_a_server_has_few_programs():
  sizes = engine_flags.sizes()
  assert len([*sizes.all_plain(), *sizes.all_mixed()]) <= 44
  # Those of one CPU leave out padding, so a few are enough.
  engine = Engine(model_of(1), ss.PromptLookup(), sizes=sizes)
  assert engine.programs.num_programs <= 12


@pytest.mark.parametrize('mode', MOST_PROGRAMS)
def test_modes_compile_few_programs(mode):
  target = model_of(2)
  options = {
    'plain': {},
    'lookup': {'draft': ss.PromptLookup()},
    'auto': {'draft': ss.PromptLookup(), 'policy': 'goodput'},
    'serial': {'draft': model_of(1), 'tree': TreeConfig()},
  }[mode]
  sampling = ss.SamplingParams(max_new_tokens=20)
  request = ss.Request(token_ids=tuple(range(8)), sampling=sampling)

  def run():
    list(ss.Decoder(target, **options).run([request]))

  run()  # kernels are compared with their references
  jax.clear_caches()
  with profiling.count_compilations() as compilations:
    run()
  assert compilations.count <= MOST_PROGRAMS[mode]
