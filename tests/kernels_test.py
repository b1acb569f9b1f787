"""Models run on kernels as they do without them."""

import dataclasses
import functools

import decoding_cases
import jax
import jax.numpy as jnp
import model_cases
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import swiftspec_jax as ss
from kernels_pallas import dispatch, last_program, registry
from kernels_pallas.verification import api as verification_api
from swiftspec_jax import testing
from swiftspec_jax.config.architecture import Experts
from swiftspec_jax.models import decoder, experts
from swiftspec_jax.models.cache import dense
from swiftspec_jax.models.matrices import quantization
from swiftspec_jax.runtime import sharding

CONFIG = dataclasses.replace(
  decoding_cases.CONFIG,
  vocab_size=270,
  num_layers=2,
  head_dim=64,
  ffw_dim=32,
  max_context=128,
  sliding_window=16,
  sliding_layers=(True, False),
)


def hidden_states(model, config):
  """Of a tree after a prefix; the prefix is taken in by the reference."""
  cache = dense.init(config, 1, 128, jnp.float32, model.mesh)
  return _hidden_states(model.params, cache, config=config)


@functools.partial(jax.jit, static_argnames='config')
def _hidden_states(params, cache, config):
  token_ids = model_cases.token_ids()
  num_nodes = len(model_cases.PARENTS)
  _, cache = decoder.forward(
    params,
    config,
    jnp.asarray(token_ids[None, : model_cases.NUM_PREFIX]),
    cache,
    starts=jnp.zeros(1, jnp.int32),
    context=128,
  )
  cache = dense.extend(cache, jnp.asarray([model_cases.NUM_PREFIX]))
  return decoder.forward(
    params,
    config,
    jnp.asarray(token_ids[None, -num_nodes:]),
    cache,
    starts=cache.kv_lengths,
    positions=cache.kv_lengths[:, None] + model_cases.tree_depths()[None],
    attention_mask=jnp.asarray(model_cases.tree_mask()[None]),
  )[0]


def test_a_model_on_kernels_gives_the_same():
  model = testing.random_model(CONFIG)
  on_kernels = dataclasses.replace(model.config, kernels='pallas_tpu')
  with pltpu.force_tpu_interpret_mode():
    got = hidden_states(model, on_kernels)
  want = hidden_states(model, model.config)
  np.testing.assert_allclose(got, want, atol=2e-6)
  chosen = {
    (choice.implementation, choice.reason) for choice in dispatch.choices()
  }
  assert ('pallas_tpu', 'asked for') in chosen


@pytest.mark.ci
def test_a_layer_of_few_launches_gives_the_same(monkeypatch):
  """On GPUs: rotation and write in attention."""
  for kernel in ('fused_attention', 'quantized_matmul'):
    module = registry.module(kernel, 'pallas_gpu')
    call = functools.partial(getattr(module, kernel), interpret=True)
    monkeypatch.setattr(module, kernel, call)
  quantized = registry.module('quantized_matmul', 'pallas_gpu')
  monkeypatch.setattr(quantized, '_MOST_FLOAT32_ROWS', 64)  # of the prefix
  found = []
  for kernels in ('pallas_gpu', 'reference'):
    config = dataclasses.replace(CONFIG, weight_dtype='int4', kernels=kernels)
    found.append(hidden_states(testing.random_model(config), config))
  np.testing.assert_allclose(*found, atol=1e-5)
  chosen = {
    choice.kernel
    for choice in dispatch.choices()
    if choice.implementation == 'pallas_gpu'
  }
  assert {'fused_attention', 'quantized_matmul'} <= chosen


def test_experts_on_kernels_give_the_same():
  sizes = Experts(num_experts=5, num_active=2, ffw_dim=128)
  shapes = {
    'router': (5, 128),
    'experts_gate': (5, 128, 128),
    'experts_up': (5, 128, 128),
    'experts_down': (5, 128, 128),
  }
  random = np.random.default_rng(0)
  weights = {
    name: random.normal(size=shape, scale=1 / 16).astype(np.float32)
    for name, shape in shapes.items()
  }

  def mixed(kernels):
    scheme = quantization.Scheme(
      weight_dtype='mxfp4', group_size=32, kernels=kernels, is_experts=True
    )
    layer = {
      name: scheme.quantize(array, (None,) * 3, sharding.make_mesh())
      if array.ndim == 3
      else array
      for name, array in weights.items()
    }
    return jax.jit(experts.feed_forward, static_argnums=(2, 3))(
      weights['router'][:3], layer, sizes, 'silu'
    )

  with pltpu.force_tpu_interpret_mode():
    got = mixed('pallas_tpu')
  np.testing.assert_allclose(got, mixed('auto'), atol=1e-6)
  chosen = {x.implementation for x in dispatch.choices() if 'uint8' in x.shape}
  assert chosen == {'pallas_tpu', 'reference'}


def test_a_shared_vocabulary_takes_the_reference():
  mesh = Mesh(np.asarray(jax.devices()[:2]), ('model',))
  scores = jnp.zeros((1, 2, 8)).at[0, 0, 3].set(1.0).at[0, 1, 5].set(1.0)
  token_ids, num_accepted, path, _ = verification_api.verify_tree(
    scores,
    token_ids=jnp.asarray([[0, 3]]),
    parents=jnp.asarray([[-1, 0]]),
    sizes=jnp.asarray([2]),
    ancestor_mask=jnp.tril(jnp.ones((1, 2, 2), bool)),
    implementation='pallas_tpu',
    sharding=NamedSharding(mesh, PartitionSpec()),
  )
  assert (token_ids.tolist(), path.tolist()) == ([[3, 5]], [[0, 1]])
  assert num_accepted.tolist() == [1]


def test_kernels_of_other_devices_are_refused(model):
  assert jax.default_backend() == 'cpu'
  with pytest.raises(ss.UserError, match="kernels='pallas_tpu' cannot run"):
    ss.load(model, kernels='pallas_tpu')
  assert ss.load(model, kernels='reference').config.kernels == 'reference'


def test_unknown_kernels_are_named():
  with pytest.raises(ss.UserError, match='kernels must be one of auto'):
    dataclasses.replace(CONFIG, kernels='fast')


def test_kernels_that_xla_would_run_at_once_are_refused(monkeypatch):
  """They count in the same array, which XLA takes for one that they read."""
  flag = '--xla_gpu_command_buffer_scheduling_mode'
  monkeypatch.setenv('XLA_FLAGS', f'{flag}=LHS')
  last_program.counters(1, lambda: 0)
  monkeypatch.setenv('XLA_FLAGS', f'--xla_a=1 {flag}=CONCURRENT')
  with pytest.raises(ValueError, match='must run one after the other'):
    last_program.counters(1, lambda: 0)


def test_loops_in_command_buffers_are_refused(monkeypatch):
  flag = '--xla_gpu_enable_command_buffer'
  monkeypatch.setenv('XLA_FLAGS', f'{flag}=')
  dispatch.check_flags(has_kernels=False)
  monkeypatch.setenv('XLA_FLAGS', f'{flag}=+WHILE')
  with pytest.raises(ValueError, match='leave WHILE out'):
    dispatch.check_flags(has_kernels=False)
