"""Mixtures of experts against a loop in plain NumPy, and in all modes."""

import dataclasses

import checkpoint_cases
import jax
import numpy as np
import pytest
from decoding_cases import assert_same, run
from engine_cases import RandomLengths, make_sizes, results_of
from tree_cases import CONFIG, TREE, requests_of

import swiftspec_jax as ss
from swiftspec_jax import errors, testing
from swiftspec_jax.config.architecture import Experts, IRope
from swiftspec_jax.distillation.student import StudentConfig
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.models import experts
from swiftspec_jax.simulator.planning.forward import Forward, Launches

SIZES = Experts(num_experts=5, num_active=3, ffw_dim=6)
MOE = dataclasses.replace(CONFIG, experts=SIZES)
GPT_OSS = dataclasses.replace(
  CONFIG,
  experts=dataclasses.replace(SIZES, use_bias=True, gate_limit=0.5),
  use_qkv_bias=True,
  use_output_bias=True,
  use_sinks=True,
  sliding_window=40,
  sliding_layers=(True, False),
)

LLAMA4 = dataclasses.replace(
  CONFIG,
  experts=dataclasses.replace(SIZES, scales_inputs=True, has_shared=True),
  irope=IRope(nope_layers=(1,), floor_scale=7),
  sliding_window=40,
  sliding_layers=(True, False),
)


def random_layer(seed=0):
  generator = np.random.default_rng(seed)

  def random(*shape):
    return generator.normal(size=shape).astype(np.float32)

  return {
    'router': random(5, 4),
    'experts_gate': random(5, 4, 6),
    'experts_up': random(5, 4, 6),
    'experts_down': random(5, 6, 4),
    'router_bias': random(5),
    'experts_gate_bias': random(5, 6),
    'experts_up_bias': random(5, 6),
    'experts_down_bias': random(5, 4),
  }


def oracle(x, layer, sizes):
  """Token by token, expert by expert."""
  if not sizes.use_bias:
    layer = {
      name: np.zeros_like(array) if name.endswith('bias') else array
      for name, array in layer.items()
    }
  outputs = []
  for token in x.astype(np.float64):
    scores = layer['router'] @ token + layer['router_bias']
    probs = np.exp(scores) / np.exp(scores).sum()
    chosen = sorted(range(len(probs)), key=lambda i: -probs[i])
    chosen = chosen[: sizes.num_active]
    total = probs[chosen].sum() if sizes.is_normalized else 1
    output = 0
    for i in chosen:
      gate, up = (
        token @ layer[f'experts_{name}'][i] + layer[f'experts_{name}_bias'][i]
        for name in ('gate', 'up')
      )
      hidden = gate / (1 + np.exp(-gate)) * up
      if sizes.gate_limit:
        gate = np.minimum(gate, sizes.gate_limit)
        up = np.clip(up, -sizes.gate_limit, sizes.gate_limit)
        slope = sizes.gate_slope
        hidden = gate / (1 + np.exp(-slope * gate)) * (up + 1)
      down = hidden @ layer['experts_down'][i] + layer['experts_down_bias'][i]
      output += probs[i] / total * down
    outputs.append(output)
  return np.array(outputs)


@pytest.mark.parametrize(
  ('num_active', 'is_normalized', 'gate_limit'),
  [
    (1, False, None),
    (1, True, 0.5),
    (3, False, 0.5),
    (3, True, None),
    (5, False, None),
    (5, True, 0.5),
  ],
)
def test_experts_are_those_of_the_loop(num_active, is_normalized, gate_limit):
  sizes = dataclasses.replace(
    SIZES,
    num_active=num_active,
    is_normalized=is_normalized,
    gate_limit=gate_limit,
    use_bias=gate_limit is not None,
  )
  layer = random_layer()
  x = np.random.default_rng(1).normal(size=(7, 4)).astype(np.float32)
  x[3] = x[2]
  feed_forward = jax.jit(experts.feed_forward, static_argnums=(2, 3))
  mixed = feed_forward(x, layer, sizes, 'silu')
  np.testing.assert_allclose(
    mixed, oracle(x, layer, sizes), atol=1e-5, rtol=1e-6
  )
  # A token is not touched by those beside it, whatever they are.
  x[[0, 6]] = np.nan
  beside = feed_forward(x, layer, sizes, 'silu')
  np.testing.assert_allclose(beside[1:6], mixed[1:6], atol=1e-6, rtol=1e-6)


def draft_and_plain(config):
  """A target, a draft with experts, too: of int8, requests, plain output."""
  target = testing.random_model(config, devices=jax.devices()[:2])
  draft = testing.random_model(
    dataclasses.replace(config.with_layers(1), weight_dtype='int8'),
    devices=jax.devices()[:2],
    name='draft',
  )
  requests = [*requests_of(3), *requests_of(2, temperature=1.0)]
  return target, draft, requests, run(ss.Decoder(target), requests)


def test_trees_change_no_output():
  target, draft, requests, plain = draft_and_plain(LLAMA4)
  trees = run(ss.Decoder(target, draft, tree=TREE, batch_size=3), requests)
  assert_same(trees, plain)
  assert sum(result.stats.num_accepted for result in trees) > 20


def test_pages_change_no_output():
  target, draft, requests, plain = draft_and_plain(GPT_OSS)
  engine = Engine(
    target,
    draft,
    sizes=make_sizes(drafts={'rows': (4,), 'lengths': (0, 3)}),
    policy=RandomLengths(0),
  )
  assert_same(results_of(engine, requests), plain)


@pytest.mark.parametrize('weight_dtype', ['int8', 'int4', 'mxfp4'])
def test_few_bits_are_the_same_on_two_devices(weight_dtype):
  config = dataclasses.replace(GPT_OSS, weight_dtype=weight_dtype)
  one = testing.random_model(config)
  two = testing.random_model(config, devices=jax.devices()[:2])
  for layer, other in zip(
    one.params['layers'], two.params['layers'], strict=True
  ):
    for name in ('experts_gate', 'experts_up', 'experts_down'):
      whole, parts = layer[name], other[name]
      for array, other_array in (
        (whole.values, parts.values),
        (whole.scales, parts.scales),
      ):
        size = tuple(map(slice, array.shape))
        np.testing.assert_array_equal(np.asarray(other_array)[size], array)
      shard = parts.values.sharding.shard_shape(parts.values.shape)
      assert np.prod(shard) * 2 == parts.values.size


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'attention_bias': True}, 'attention_bias=True is not supported'),
    ({'num_experts_per_tok': 7}, 'num_active must be from 1 to num_experts=6'),
    ({'moe_intermediate_size': 10}, r'gate_proj.weight has shape \(20, 32\)'),
    ({'num_experts': 7}, r'mlp.gate.weight has shape \(6, 32\)'),
  ],
)
def test_what_does_not_fit_is_named(tmp_path, changes, message):
  testing.write_tiny_checkpoint(tmp_path, 'qwen3_moe')
  checkpoint_cases.check_refused(tmp_path, message, changes)


def test_what_experts_cannot_do_yet_is_refused(tmp_path):
  testing.write_tiny_checkpoint(tmp_path, 'qwen3_moe')
  message = 'must be one of int8, int4, float8, mxfp4 for mix'
  with pytest.raises(errors.UserError, match=message):
    ss.load(tmp_path, weight_dtype='int8_dynamic')
  with pytest.raises(errors.UserError, match='a dense draft'):
    StudentConfig(init_layers=(0,)).model_config(MOE)
  student = StudentConfig(num_layers=1).model_config(GPT_OSS)
  assert student.experts is None
  assert not student.use_sinks
  with pytest.raises(errors.UserError, match='name a dense model'):
    Forward(
      config=MOE,
      num_chips=1,
      num_tokens=1,
      context=1,
      launches=Launches(layer=1, rest=1),
    )
