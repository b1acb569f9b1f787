"""Other libraries, measured in the same run as our own."""

import importlib.util
import json

import gguf
import numpy as np
import programs
import pytest

from experiments.measuring import llama_peer, peers
from swiftspec_jax import errors, testing

HAS_TORCH = importlib.util.find_spec('torch') is not None
HAS_LLAMA = importlib.util.find_spec('xllamacpp') is not None


@pytest.mark.skipif(HAS_TORCH, reason='torch is installed')
def test_missing_torch_is_explained(tmp_path):
  error = programs.error_of(
    'benchmark', '--peers=hf', f'--output_dir={tmp_path}'
  )
  assert 'run: pip install -e ".[peers]"' in error


@pytest.mark.skipif(HAS_LLAMA, reason='llama.cpp is installed')
def test_missing_llama_cpp_is_explained():
  with pytest.raises(errors.UserError, match=r'pip install -e "\.\[peers'):
    peers.check(['llama_cpp'])


def test_llama_cpp_needs_a_gguf_file():
  with pytest.raises(errors.UserError, match='reads GGUF files only'):
    llama_peer.file_of('org/model')


def test_bits_of_a_gguf_file(tmp_path):
  path = tmp_path / 'model.gguf'
  writer = gguf.GGUFWriter(path, 'llama')
  writer.add_tensor('norm', np.ones(16, np.float32))
  kind = gguf.GGMLQuantizationType.Q4_0  # 18 bytes for 32 weights
  table = gguf.quantize(np.ones((2, 32), np.float32), kind)
  writer.add_tensor('table', table, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  assert llama_peer.bits_per_weight(path) == 8 * (16 * 4 + 2 * 18) / (16 + 64)


@pytest.mark.peers
@pytest.mark.skipif(not HAS_LLAMA, reason='needs llama.cpp')
def test_llama_cpp_decodes_its_own_tokens(tmp_path):
  names = ['llama_cpp', 'llama_cpp_prompt_lookup', 'llama_cpp_draft']
  output = programs.output_of(
    'benchmark',
    '--modes=chain',
    '--draft=smollm2-135m-instruct',
    '--weight_dtype=wide',
    f'--peers={",".join(names)}',
    '--limit=1',
    '--warmup=0',
    '--max_new_tokens=12',
    f'--output_dir={tmp_path}',
  )
  summary = json.loads((tmp_path / 'summary.json').read_text())
  assert 4 < summary['provenance']['llama_cpp_bits_per_weight'] < 6
  for name in names:
    figures = summary['modes'][name]
    assert figures['outputs_equal'] is None
    assert figures['tokens_per_second'] > 0
    assert f'{name}: the output' not in output
  lines = programs.read_lines(tmp_path, 'results.jsonl')
  plain, *drafted = (line for line in lines if line['mode'] in names)
  assert plain['num_rounds'] == 11  # the prompt gives the first token
  for line in drafted:
    assert line['token_ids'] == plain['token_ids']
    assert line['num_accepted'] == 11 - line['num_rounds']
    assert line['num_drafted'] >= line['num_accepted']
  assert drafted[-1]['num_accepted'] > 4  # by the same model


@pytest.mark.peers
def test_peers_give_the_same_tokens(tmp_path, monkeypatch):
  # The threads of torch get in each other's way where processors are busy.
  monkeypatch.setenv('OMP_NUM_THREADS', '1')
  model, directory = tmp_path / 'model', tmp_path / 'results'
  testing.write_tiny_checkpoint(model)
  texts = 'What is rain? ' * 5, 'Name a tree.', 'a'
  prompts = programs.write_prompts(tmp_path, *texts)
  own = 'autoregressive,prompt_lookup,chain'
  others = 'hf,hf_prompt_lookup,hf_draft'
  programs.output_of(
    'benchmark',
    f'--target={model}',
    f'--draft={model}',
    '--weight_dtype=wide',
    f'--prompts={prompts}',
    '--max_new_tokens=60',
    f'--modes={own}',
    f'--peers={others}',
    f'--output_dir={directory}',
  )
  modes = json.loads((directory / 'summary.json').read_text())['modes']
  assert list(modes) == [*own.split(','), *others.split(',')]
  for figures in modes.values():
    assert figures['outputs_equal'] is True
    assert figures['tokens_per_second'] > 0
  assert modes['hf']['acceptance_length'] == 1
  assert modes['hf_prompt_lookup']['acceptance_length'] > 1
  assert modes['hf_draft']['acceptance_length'] >= 2  # the target itself
  for line in programs.read_lines(directory, 'results.jsonl'):
    # A round gives what it accepts and one token; the last may be cut. Here the
    # prompt gives the first token before any round.
    is_peer = line['mode'].startswith('hf')
    emitted = line['num_rounds'] + line['num_accepted'] + (not is_peer)
    assert 0 <= emitted - line['new_tokens'] <= 7
    assert line['num_accepted'] <= line['num_drafted']
    assert line['ttft_seconds'] > 0
    assert line['decode_seconds'] > 0


@pytest.mark.peers
@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--dtype=bfloat16'], 'compares in float32, but the dtype is bfloat16'),
    (['--weight_dtype=int8'], 'and the weight_dtype int8; give --dtype=float'),
    (['--peers=vllm'], "--peers: unknown name 'vllm'; supported: hf, hf_"),
  ],
)
def test_unfair_or_unknown_peers_are_refused(tmp_path, flags, message):
  testing.write_tiny_checkpoint(tmp_path / 'model')
  status, _, complaints = programs.run(
    'benchmark',
    f'--target={tmp_path / "model"}',
    '--limit=1',
    '--max_new_tokens=8',
    '--peers=hf',
    f'--output_dir={tmp_path / "results"}',
    *flags,
  )
  assert status == 1
  assert message in complaints.splitlines()[-1]
