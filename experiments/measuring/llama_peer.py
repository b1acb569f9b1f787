"""llama.cpp as a peer: the GGUF file of a target, with its own numbers.

Its weights and activations are quantized otherwise than ours, so its output is
its own. It speculates by its own means and defaults: matches of n-grams
(`ngram_simple`), or a draft model.
"""

import json
import os
import pathlib
import urllib.request
from typing import TYPE_CHECKING, Any

import swiftspec_jax as ss
from experiments.measuring.benchmark_run import Decode
from swiftspec_jax import errors
from swiftspec_jax.checkpoint import builtin
from swiftspec_jax.requests import results

if TYPE_CHECKING:
  import xllamacpp

_PLAIN, DRAFT = 'llama_cpp', 'llama_cpp_draft'
PEERS = (_PLAIN, 'llama_cpp_prompt_lookup', DRAFT)
PACKAGES = ('xllamacpp',)


def file_of(name: str) -> pathlib.Path:
  """Returns the GGUF file of a model.

  Raises:
    UserError: it has none.
  """
  if name in ss.BUILTIN_MODELS:
    return builtin.fetch(name)
  path = pathlib.Path(name).expanduser()
  if path.suffix != '.gguf':
    raise errors.UserError(
      f'--peers=llama_cpp reads GGUF files only, but {name} is none; give a '
      f'.gguf file or one of {", ".join(ss.BUILTIN_MODELS)}'
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
  name: str, target: ss.Model, target_name: str, draft_name: str | None
) -> Decode:
  """Does what `peers.load` does, for one of `PEERS`."""
  import xllamacpp

  path = file_of(target_name)
  params = xllamacpp.CommonParams()
  params.model.path = str(path)
  params.n_ctx = target.config.max_context
  params.n_parallel = 1
  params.verbosity = -1
  kinds = xllamacpp.common_speculative_type
  speculative, kind = params.speculative, None
  if name == DRAFT:
    speculative.draft.mparams.path = str(file_of(draft_name))
    kind = kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE
  elif name != _PLAIN:
    kind = kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE
  if kind is not None:
    speculative.types = [kind]
  for threads in (
    params.cpuparams,
    params.cpuparams_batch,
    speculative.draft.cpuparams,
    speculative.draft.cpuparams_batch,
  ):
    threads.n_threads = os.cpu_count()  # as XLA takes, too
  failed = f'llama.cpp cannot load {path} for --peers: '
  with errors.explained(failed, RuntimeError):
    return _make_decode(xllamacpp.Server(params))


def _make_decode(server: 'xllamacpp.Server') -> Decode:
  def decode(request: ss.Request) -> ss.GenerationResult:
    sampling = request.sampling
    names = 'temperature', 'top_k', 'top_p', 'min_p', 'seed', 'ignore_eos'
    fields = {
      'prompt': request.token_ids,
      'n_predict': sampling.max_new_tokens,
      **{name: getattr(sampling, name) for name in names},
      # Else it would keep the beginning of an equal prompt.
      'cache_prompt': False,
      'return_tokens': True,
    }
    call = urllib.request.Request(
      f'{server.listening_address}/completion',
      json.dumps(fields).encode(),
      {'Content-Type': 'application/json'},
    )
    with urllib.request.urlopen(call) as response:
      answer = json.load(response)
    return ss.GenerationResult(
      text=answer['content'],
      token_ids=tuple(answer['tokens']),
      finish_reason='length' if answer['stop_type'] == 'limit' else 'stop',
      stats=_stats(len(request.token_ids), answer['timings']),
    )

  return decode


def _stats(
  prompt_tokens: int, timings: dict[str, Any]
) -> results.GenerationStats:
  """Returns the statistics; the prompt gives the first token."""
  new_tokens = timings['predicted_n']
  accepted = timings.get('draft_n_accepted', 0)
  ttft_seconds = timings['prompt_ms'] / 1000
  decode_seconds = timings['predicted_ms'] / 1000
  return results.GenerationStats(
    prompt_tokens=prompt_tokens,
    new_tokens=new_tokens,
    decoded_tokens=new_tokens - 1,
    num_rounds=max(new_tokens - 1 - accepted, 0),
    num_drafted=timings.get('draft_n', 0),
    num_accepted=accepted,
    ttft_seconds=ttft_seconds,
    decode_seconds=decode_seconds,
    latency_seconds=ttft_seconds + decode_seconds,
  )
