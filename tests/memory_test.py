"""What a model takes of memory, and the warning that it is too much."""

import jax
import pytest

import swiftspec_jax as ss
from swiftspec_jax.checkpoint import memory


@pytest.mark.parametrize('weight_dtype', [None, 'int8', 'int8_dynamic'])
def test_bytes_are_those_of_the_loaded_model(model, weight_dtype):
  loaded = ss.load(model, weight_dtype=weight_dtype)
  counted = memory.num_bytes(loaded.config, loaded.dtype, loaded.mesh)
  held = sum(x.nbytes for x in jax.tree.leaves(loaded.params))
  assert counted == held == loaded.num_bytes


def test_a_model_that_is_too_large_is_told_with_a_remedy(
  model, tmp_path, monkeypatch, caplog
):
  path = tmp_path / 'meminfo'
  monkeypatch.setattr(memory, '_MEMINFO', path)
  path.write_text('MemTotal: 9 kB\nMemFree: 0 kB\nMemAvailable:   1 kB\n')
  ss.load(model)
  assert f'The weights of {model} take 0.0 GB of memory' in caplog.text
  assert 'are free; weight_dtype=int8_dynamic takes 0.0 GB.' in caplog.text
  caplog.clear()
  ss.load(model, weight_dtype='int8_dynamic')
  assert 'are free; choose a smaller model.' in caplog.text
  caplog.clear()
  path.write_text('MemAvailable: 999999999 kB\n')
  ss.load(model)
  assert not caplog.text


def test_this_machine_has_memory():
  assert memory.free_bytes() > 2**20
