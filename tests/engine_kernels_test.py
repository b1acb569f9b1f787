"""A served target on kernels, interpreted: the tokens of plain decoding."""

import contextlib
import dataclasses
import functools

import jax
import kernels_test
import pytest
from decoding_cases import assert_same, request_of, run, sizes_of
from engine_cases import results_of
from jax.experimental.pallas import tpu as pltpu

import swiftspec_jax as ss
from kernels_pallas import dispatch, registry
from swiftspec_jax import errors, testing
from swiftspec_jax.drafters.texts.datastore import Datastore
from swiftspec_jax.drafters.texts.token_store import TokenStore
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.models.matrices import transposed
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.step import target_forward

CONFIG = dataclasses.replace(
  kernels_test.CONFIG, vocab_size=262, sliding_window=24
)
TARGET = testing.random_model(CONFIG, name='target')
SIZES = sizes_of(8, 64, rows=(2,), query_tokens=(24,), lengths=(0, 1, 2, 3))


@contextlib.contextmanager
def interpreted(name, monkeypatch):
  """Kernels run on CPUs."""
  if name == 'pallas_tpu':
    with pltpu.force_tpu_interpret_mode():
      yield
    return
  with monkeypatch.context() as patch:
    for kernel in ('fused_paged_attention', 'swiglu', 'paged_commit'):
      call = functools.partial(registry.function(kernel, name), interpret=True)
      patch.setattr(registry.module(kernel, name), kernel, call)
    yield


REQUESTS = [request_of(range(length), max_new_tokens=12) for length in (40, 3)]


@functools.cache
def plain():
  return run(ss.Decoder(TARGET, batch_size=2), REQUESTS)


def written_store():
  """What plain decoding writes: trees of it hold accepted nodes."""
  texts = [
    request.token_ids + result.token_ids
    for request, result in zip(REQUESTS, plain(), strict=True)
  ]
  return TokenStore.of_texts(texts, TARGET.tokenizer)


def serve(kernels, draft):
  config = dataclasses.replace(CONFIG, kernels=kernels)
  target = dataclasses.replace(TARGET, config=config)
  engine = Engine(target, draft, sizes=SIZES, policy=FixedLength(3))
  return results_of(engine, REQUESTS)


@pytest.mark.parametrize('kernels', ['pallas_tpu', 'pallas_gpu'])
def test_an_engine_on_kernels_gives_the_same_tokens(kernels, monkeypatch):
  draft = Datastore(store=written_store(), min_prob=0)
  with interpreted(kernels, monkeypatch):
    got = serve(kernels, draft)
  attention = {'pallas_tpu': 'paged', 'pallas_gpu': 'fused_paged'}[kernels]
  assert (f'{attention}_attention', kernels) in chosen()
  assert_same(got, plain())
  assert sum(result.stats.num_accepted for result in got) > 0


def chosen():
  return {
    (choice.kernel, choice.implementation) for choice in dispatch.choices()
  }


@pytest.mark.parametrize('num_devices', [1, 2])
def test_products_are_on_kernels(num_devices, monkeypatch):
  """Traced only, with weights in the order that accelerators have."""
  monkeypatch.setattr(dispatch, '_choices', {})
  config = dataclasses.replace(
    CONFIG, kernels='pallas_tpu', num_heads=8, num_kv_heads=4, ffw_dim=256
  )
  model = testing.random_model(
    config, dtype='bfloat16', devices=jax.devices()[:num_devices]
  )
  model = dataclasses.replace(model, params=transposed.undone(model.params))
  target_forward.check_kernels(model, SIZES)
  kernels = {'paged_attention', 'swiglu'}
  if num_devices > 1:
    kernels.add('matmul_all_reduce')
  found = {kernel for kernel, name in chosen() if name == 'pallas_tpu'}
  assert found == kernels


def test_a_model_that_kernels_cannot_serve_is_refused():
  config = dataclasses.replace(CONFIG, head_dim=32, kernels='pallas_tpu')
  model = testing.random_model(config, name='narrow')
  message = "cannot run narrow with kernels='pallas_tpu': .* head_dim 32 is not"
  for target, draft in ((model, None), (TARGET, model)):
    with pytest.raises(errors.UserError, match=message):
      Engine(target, draft, sizes=SIZES)
