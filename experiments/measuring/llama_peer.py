"""llama.cpp as a peer: the GGUF file of a target, with its own numbers.

Its weights and activations are quantized otherwise than ours, so its output is
its own.
"""

import importlib.util
import os
import pathlib
import time
from collections.abc import Collection

import numpy as np

import swiftspec_jax as ss
from experiments.measuring import peer_results
from experiments.measuring.benchmark_run import Decode
from swiftspec_jax import errors
from swiftspec_jax.checkpoint import builtin

_LOOKUP = 'llama_cpp_prompt_lookup'
PEERS = ('llama_cpp', _LOOKUP)


def check() -> None:
  """Raises UserError unless llama.cpp is installed."""
  if importlib.util.find_spec('llama_cpp') is None:
    raise errors.UserError(
      '--peers=llama_cpp needs llama-cpp-python; run: '
      'CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON '
      '-DGGML_F16C=ON" pip install -e ".[llama_cpp]" (takes minutes; for '
      'AVX-512 add -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON)'
    )


def file_of(target: ss.Model) -> pathlib.Path:
  """Returns the GGUF file of a model.

  Raises:
    UserError: it has none.
  """
  if target.name in ss.BUILTIN_MODELS:
    return builtin.fetch(target.name)
  path = pathlib.Path(target.name).expanduser()
  if path.suffix != '.gguf':
    raise errors.UserError(
      f'--peers=llama_cpp reads GGUF files only, but --target={target.name} '
      f'is none; give a .gguf file or one of {", ".join(ss.BUILTIN_MODELS)}'
    )
  return path


def bits_per_weight(path: pathlib.Path) -> float:
  """Returns the mean bits of a weight in a GGUF file."""
  import gguf

  from swiftspec_jax.checkpoint import gguf_header

  num_bytes = num_weights = 0
  for tensor in gguf_header.read(path)[1].values():
    block_weights, block_bytes = gguf.GGML_QUANT_SIZES[tensor.kind]
    num_bytes += tensor.data.size
    num_weights += tensor.data.size // block_bytes * block_weights
  return 8 * num_bytes / num_weights


def load(
  target: ss.Model, names: Collection[str], num_speculative_tokens: int
) -> dict[str, Decode]:
  """Returns a runner for each of `names` that is one of `PEERS`.

  Args:
    target: target with a GGUF file.
    names: names of peers.
    num_speculative_tokens: number of tokens that prompt lookup drafts.

  Raises:
    UserError: llama.cpp cannot read the file.
  """
  path = file_of(target)
  num_drafted = {'llama_cpp': 0, _LOOKUP: num_speculative_tokens}
  return {
    name: _make_runner(path, target, num_drafted[name])
    for name in PEERS
    if name in names
  }


def _make_runner(
  path: pathlib.Path, target: ss.Model, num_speculative_tokens: int
) -> Decode:
  model, widths = _load_model(path, target, num_speculative_tokens)

  def run(request: ss.Request) -> ss.GenerationResult:
    sampling = request.sampling
    ends = peer_results.ends_of(target, request)
    model.reset()  # else it would keep the beginning of an equal prompt
    model.set_seed(sampling.seed)
    widths.clear()
    token_ids, times, num_forwards = [], [], []
    start = time.perf_counter()
    for token_id in model.generate(
      request.token_ids,
      temp=sampling.temperature,
      top_k=sampling.top_k,
      top_p=sampling.top_p,
      min_p=sampling.min_p,
    ):
      token_ids.append(token_id)
      times.append(time.perf_counter())
      num_forwards.append(len(widths))
      if token_id in ends or len(token_ids) == sampling.max_new_tokens:
        break
    lasts = np.flatnonzero(np.diff(num_forwards, append=len(widths) + 1))
    drafted = np.array(widths) - 1
    drafted[0] = 0  # is the prompt
    rounds = peer_results.Rounds(
      start=start,
      times=np.array(times)[lasts],
      sizes=np.diff(lasts, prepend=-1),
      drafted=drafted,
    )
    return peer_results.make_result(
      target, request, tuple(token_ids), rounds, num_speculative_tokens
    )

  return run


def _load_model(path, target, num_speculative_tokens):
  """Returns the model, and a list that gets the tokens of its forwards."""
  import llama_cpp
  from llama_cpp import llama_speculative

  widths = []

  class Counted(llama_cpp.Llama):
    def eval(self, tokens):
      widths.append(len(tokens))
      super().eval(tokens)

  draft = None
  if num_speculative_tokens:
    draft = llama_speculative.LlamaPromptLookupDecoding(
      num_pred_tokens=num_speculative_tokens
    )
  num_threads = os.cpu_count()  # as XLA takes, too
  try:
    model = Counted(
      str(path),
      n_ctx=target.config.max_context,
      n_threads=num_threads,
      n_threads_batch=num_threads,
      draft_model=draft,
      verbose=False,
    )
  except ValueError as error:
    raise errors.UserError(
      f'llama.cpp cannot load {path} for --peers: {error}'
    ) from error
  return model, widths
