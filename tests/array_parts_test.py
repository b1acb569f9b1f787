"""Loading reads of a checkpoint what each device needs, and nothing twice."""

import functools
import math

import jax
import numpy as np
import pytest

import swiftspec_jax as ss
from swiftspec_jax import testing
from swiftspec_jax.checkpoint import hf, safetensors_file
from swiftspec_jax.models import families
from swiftspec_jax.models import params as params_lib


class Counted(np.memmap):
  """A tensor in a file that notes how many bytes are read of it."""

  READ = []  # noqa: RUF012

  def __getitem__(self, index):
    part = super().__getitem__(index)
    is_part = isinstance(index, tuple) and {*map(type, index)} == {slice}
    if is_part and self._mmap is not None:  # no copy
      self.READ.append(part.nbytes)
    return part


@pytest.mark.parametrize(
  ('family', 'dtype', 'num_devices', 'num_sharing'),
  [
    ('llama', 'bfloat16', 4, 1),
    ('llama', 'float32', 4, 1),
    ('llama', 'float32', 4, 2),
    ('qwen3_moe', 'bfloat16', 2, 1),
    ('gemma3_text', 'bfloat16', 1, 1),
  ],
)
def test_each_device_reads_its_part(
  family, dtype, num_devices, num_sharing, tmp_path
):
  testing.write_tiny_checkpoint(tmp_path, family, torch_dtype=dtype)
  options = {'dtype': dtype, 'devices': jax.devices()[:num_devices]}
  model = ss.load(tmp_path, **options, sequence_devices=num_sharing)
  get, _ = hf.open_tensors(tmp_path)
  Counted.READ.clear()
  params = families.params_from_hf(
    functools.partial(
      families.get_checked, lambda name: get(name).view(Counted)
    ),
    model.config,
    families.FAMILIES[family].norm_offset,
    functools.partial(
      params_lib.place_params, dtype=model.dtype, mesh=model.mesh
    ),
  )
  tensors = safetensors_file.tensors_of(tmp_path / 'model.safetensors')
  matrices = [x() for x in tensors.values() if x().ndim > 1]
  copies = dict.fromkeys('qkvo', num_sharing)  # that share only the tokens
  expected = sum(
    x().nbytes * copies.get(name.partition('attn.')[2][:1], 1)
    for name, x in tensors.items()
    if x().ndim > 1
  )
  assert sum(Counted.READ) == expected
  largest = max(x.nbytes for x in matrices)
  assert max(Counted.READ) <= math.ceil(largest / num_devices)
  jax.tree.map(np.testing.assert_array_equal, params, model.params)


def test_a_loaded_model_does_not_change_with_its_file(tmp_path):
  testing.write_tiny_checkpoint(tmp_path, num_hidden_layers=1)
  model = ss.load(tmp_path)
  before = jax.tree.map(np.array, model.params)
  with (tmp_path / 'model.safetensors').open('r+b') as file:
    size = file.seek(0, 2)
    file.seek(size // 2)
    file.write(bytes(size - size // 2))
  jax.tree.map(np.testing.assert_array_equal, model.params, before)
