"""The examples of docs/how_to/extend.md, as files of a user."""

import dataclasses
import functools
import importlib
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_cases import request_of, sizes_of
from jax.experimental.pallas import tpu as pltpu
from safetensors import numpy as safetensors_numpy

import swiftspec_jax as ss
from kernels_pallas import comparison, dispatch, registry
from swiftspec_jax import testing
from swiftspec_jax.checkpoint import hf
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.models import families
from swiftspec_jax.server import metrics

PAGE = pathlib.Path(__file__).parents[1] / 'docs' / 'how_to' / 'extend.md'
EXAMPLES = dict(
  re.findall(r'^```python\n# (\S+)\n(.*?)^```$', PAGE.read_text(), re.M | re.S)
)
# a, b and c follow each other; d is followed by a or, more rarely, by b.
CYCLE = testing.table_model(
  np.array([[0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0], [0.6, 0.4, 0, 0]])
)
PROMPTS = [[3], [0, 1, 2], [1, 1], [2], [0, 1], [3, 3]]


@pytest.fixture(autouse=True)
def own_files(tmp_path, monkeypatch):
  """Writes the examples into a folder on the path."""
  for name, code in EXAMPLES.items():
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(code)
  monkeypatch.syspath_prepend(tmp_path)
  tables = families.FAMILIES, metrics.OF_RESULTS, registry.PACKAGES
  known = [{**table} for table in tables]
  yield
  for table, entries in zip(tables, known, strict=True):
    table.clear()
    table.update(entries)


def example(name):
  return importlib.import_module(name)


@functools.cache
def plain_outputs():
  outputs = ss.generate(CYCLE, PROMPTS, max_new_tokens=20)
  return [output.token_ids for output in outputs]


def serve(draft, policy, run_ahead=0):
  """Returns engine, handles and the record of each step; two rows decode."""
  lengths = (0, 1, 2, 3, 4)
  sizes = sizes_of(16, 64, rows=(2,), query_tokens=(12,), lengths=lengths)
  engine = Engine(CYCLE, draft, sizes=sizes, policy=policy, run_ahead=run_ahead)
  handles = [
    engine.submit(request_of(prompt, max_new_tokens=20)) for prompt in PROMPTS
  ]
  steps = []
  while engine.num_requests:
    record = engine.step()
    steps.append((engine.scheduler.num_waiting, record))
  return engine, handles, steps


def test_the_drafter():
  drafter = example('periodic').Periodic(period=3)
  outputs = ss.generate(CYCLE, PROMPTS, max_new_tokens=20, draft=drafter)
  assert [output.token_ids for output in outputs] == plain_outputs()
  # The second prompt is a period: 5 tokens a round.
  assert outputs[1].stats.num_rounds == 4
  assert outputs[1].stats.acceptance_rate == 1
  _, handles, _ = serve(drafter, example('modest').Modest(), run_ahead=1)
  results = [handle.result() for handle in handles]
  assert [result.token_ids for result in results] == plain_outputs()
  assert results[1].stats.acceptance_rate == 1


def test_drafter_policy_and_metric_of_an_engine():
  example('plain_rounds')
  engine, handles, steps = serve(
    example('periodic_on_host').PeriodicOnHost(3), example('modest').Modest()
  )
  results = [handle.result() for handle in handles]
  assert [result.token_ids for result in results] == plain_outputs()
  longest = {
    waiting >= 3: max(
      record.lengths.max(initial=0) for n, record in steps if n == waiting
    )
    for waiting, _ in sorted(steps, key=lambda step: step[0])
  }
  assert longest == {False: 4, True: 2}
  figures = metrics.Metrics(engine, 'cycle')
  for handle in handles:
    figures.note_update(handle.latest, None)
  assert figures.registry.get_sample_value(
    'swiftspec:plain_rounds_total', {'model_name': 'cycle'}
  ) == sum(result.stats.num_plain_rounds for result in results)


def test_the_kernel():
  example('with_rms_norm')
  (spec, *_) = registry.module('rms_norm', 'arg_specs').arg_specs()
  assert registry.implementations('rms_norm') == ('pallas_tpu',)
  small = dataclasses.replace(spec, num_tokens=20, embed_dim=128)
  with pltpu.force_tpu_interpret_mode():
    assert comparison.compare('rms_norm', 'pallas_tpu', small).is_same
  call = functools.partial(
    registry.function('rms_norm', 'api'),
    jnp.asarray([[3.0, -4.0]]),
    jnp.asarray([1.0, 2.0]),
    epsilon=0.0,
  )
  # The mean of the squares is 12.5.
  want = np.array([[3, -8]]) / 12.5**0.5
  np.testing.assert_allclose(call(), want, rtol=1e-6)
  assert dispatch.choices()[-1].reason == 'no kernel for cpu'
  with pytest.raises(NotImplementedError, match='2 columns are no whole'):
    call(implementation='pallas_tpu')
  with pytest.raises(NotImplementedError, match='there is none'):
    call(implementation='pallas_gpu')


def read(directory):
  config = hf.read_config(directory)
  return config, hf.read_params(directory, config, lambda part, specs: part)


def test_the_family(tmp_path):
  """Is Llama with the scale and the offset in the weights."""
  options = {'hidden_act': 'gelu_pytorch_tanh', 'head_dim': 8}
  gemma, llama = tmp_path / 'gemma', tmp_path / 'llama'
  assert 'gemma' not in families.FAMILIES
  example('gemma')
  testing.write_tiny_checkpoint(gemma, model_type='gemma', **options)
  testing.write_tiny_checkpoint(llama, **options)
  weights = safetensors_numpy.load_file(gemma / 'model.safetensors')
  weights['model.embed_tokens.weight'] *= np.float32(32**0.5)
  for name in weights:
    if name.endswith('norm.weight'):
      weights[name] += 1
  safetensors_numpy.save_file(weights, llama / 'model.safetensors')
  (config, params), (same, same_params) = map(read, (gemma, llama))
  assert config == dataclasses.replace(
    same, family='gemma', embed_scale=32**0.5
  )
  params['embedding'] = params['embedding'] * np.float32(32**0.5)
  jax.tree.map(np.testing.assert_array_equal, params, same_params)
