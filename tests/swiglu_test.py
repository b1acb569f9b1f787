"""One test body for all implementations of the gated product, interpreted.

The oracle is a product in float64 of the same rounded inputs. With weights of
variance 1 / D both products are of order one. Tolerances: float32 sums of up to
400 terms keep six digits. In bfloat16 the kernels round the result alone, to 8
bits; the reference rounds both products and each step of the activation, too,
which is four roundings of 2**-9 in a product of numbers up to 4.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import implementations, interpret_tpu
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.swiglu import api, pallas_gpu, pallas_tpu
from swiftspec_jax.runtime import sharding

pytestmark = pytest.mark.usefixtures('no_races')

TOLERANCES = {'float32': 3e-6, 'bfloat16': 2e-2}


IMPLEMENTATIONS = implementations(
  'swiglu',
  pallas_tpu=pallas_tpu.Config(block_bytes=2**17, block_columns=128),
  pallas_gpu=None,
)
for _name, _config in (
  ('unsplit', pallas_gpu.Config(block_rows=16, block_columns=32)),
  ('uneven', pallas_gpu.Config(block_rows=16, block_columns=64, num_splits=5)),
):
  IMPLEMENTATIONS[f'pallas_gpu_{_name}'] = functools.partial(
    IMPLEMENTATIONS['pallas_gpu'], config=_config
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """Sizes as in the kernels' legend."""

  num_tokens: int = 8
  embed_dim: int = 256
  ffw_dim: int = 256
  dtype: str = 'float32'
  activation: str = 'silu'


CASES = {
  'whole_tiles': Case(num_tokens=16),
  'one_token': Case(num_tokens=1, activation='gelu_tanh'),
  # Columns that end within a tile, rows that are no whole lanes.
  'edges': Case(num_tokens=5, embed_dim=144, ffw_dim=200),
  'bfloat16': Case(dtype='bfloat16', embed_dim=384, ffw_dim=200),
}


def arguments(case, seed=0):
  """Random inputs of order one and weights of variance 1 / D."""
  random = np.random.default_rng(seed)
  x = random.normal(size=(case.num_tokens, case.embed_dim))
  weight = random.normal(size=(case.embed_dim, 2, case.ffw_dim))
  weight /= math.sqrt(case.embed_dim)
  dtype = jnp.dtype(case.dtype)
  return x.astype(dtype), weight.astype(dtype)


def oracle(x, gate_up, activation):
  """In float64, with the definitions of the activations."""
  x, gate_up = (np.asarray(a, np.float64) for a in (x, gate_up))
  gate, up = x @ gate_up[:, 0], x @ gate_up[:, 1]
  if activation == 'silu':
    return gate / (1 + np.exp(-gate)) * up
  inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
  return gate * (1 + np.tanh(inner)) / 2 * up


@functools.cache
def compiled(name, activation):
  return jax.jit(
    functools.partial(IMPLEMENTATIONS[name], activation=activation)
  )


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('name', IMPLEMENTATIONS)
def test_equals_oracle(name, case):
  case = CASES[case]
  arrays = arguments(case)
  got = compiled(name, case.activation)(*arrays)
  assert got.dtype == case.dtype
  want, tolerance = oracle(*arrays, case.activation), TOLERANCES[case.dtype]
  np.testing.assert_allclose(
    np.asarray(got, np.float32), want, atol=tolerance, rtol=tolerance
  )


@pytest.mark.parametrize('name', IMPLEMENTATIONS)
def test_padding_changes_nothing(name):
  """Other tokens, columns of zeros and rows of zeros beside the same ones."""
  x, gate_up = arguments(CASES['edges'])
  call = compiled(name, CASES['edges'].activation)
  rows = (0, 16)
  padded = call(
    np.pad(np.pad(x, ((0, 0), rows)), ((0, 3), (0, 0)), constant_values=1),
    np.pad(gate_up, (rows, (0, 0), (0, 56))),
  )
  np.testing.assert_allclose(padded[:5, :200], call(x, gate_up), atol=2e-6)
  assert not padded[:, 200:].any()


def test_each_device_takes_its_columns():
  """The TPU kernel on two simulated devices that share the columns."""
  x, gate_up = arguments(CASES['whole_tiles'])
  mesh = sharding.make_mesh(jax.devices()[:2])
  columns = sharding.sharding_of(mesh, (None, None, 'ffw'))
  call = functools.partial(
    api.swiglu, activation='silu', implementation='pallas_tpu', sharding=columns
  )
  with pltpu.force_tpu_interpret_mode(interpret_tpu()):
    got = jax.jit(call)(x[None], jax.device_put(gate_up, columns))
  assert got.sharding.spec == columns.spec
  want = oracle(x, gate_up, 'silu')
  np.testing.assert_allclose(got[0], want, atol=3e-6, rtol=3e-6)


def test_what_no_kernel_takes_is_named():
  x, gate_up = arguments(dataclasses.replace(CASES['edges'], embed_dim=45))
  options = {'activation': 'silu', 'implementation': 'pallas_gpu'}
  with pytest.raises(NotImplementedError, match='45 rows of the weights'):
    api.swiglu(x[None], gate_up, **options)
  with pytest.raises(NotImplementedError, match='300 tokens'):
    api.swiglu(jnp.zeros((3, 100, 256)), jnp.zeros((256, 2, 64)), **options)
