"""Other libraries, on the same model and token ids: the honest rivals.

Hugging Face transformers on the CPU, in float32, and llama.cpp, which computes
with the numbers of a GGUF file as they are (`llama_peer`). Times mean the same
as in `GenerationStats`.

Measure on an idle machine: the threads of torch wait for each other several
times in each layer, and other processes slow it down far more than XLA.
"""

import pathlib
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

import jax
import numpy as np

import swiftspec_jax as ss
from experiments.measuring import llama_peer, peer_results
from experiments.measuring.benchmark_run import Decode
from swiftspec_jax import errors
from swiftspec_jax.checkpoint import builtin

if TYPE_CHECKING:
  import transformers

_HF = ('hf', 'hf_prompt_lookup')
PEERS = (*_HF, *llama_peer.PEERS)


def check(names: Collection[str]) -> None:
  """Raises UserError unless these peers can run here, and compare fairly."""
  if set(names) & set(llama_peer.PEERS):
    llama_peer.check()
  if set(names) & set(_HF):
    try:
      import accelerate  # noqa: F401, reading GGUF needs it
      import torch  # noqa: F401
    except ModuleNotFoundError as error:
      raise errors.UserError(
        f'--peers needs {error.name}; run: pip install -e ".[peers]"'
      ) from error
  if jax.default_backend() != 'cpu':
    raise errors.UserError(
      '--peers runs torch on the CPU, but JAX uses '
      f'{jax.default_backend()}; set JAX_PLATFORMS=cpu to compare'
    )


def facts(target: ss.Model, names: Collection[str]) -> dict[str, float]:
  """Returns what to know of peers whose weights are not those of `target`."""
  if not set(names) & set(llama_peer.PEERS):
    return {}
  bits = llama_peer.bits_per_weight(llama_peer.file_of(target))
  return {'llama_cpp_bits_per_weight': bits}


def load(
  target: ss.Model, names: Collection[str], num_speculative_tokens: int
) -> dict[str, Decode]:
  """Loads the model of `target` into other libraries.

  Args:
    target: model with float32 weights, for transformers.
    names: some of `PEERS`.
    num_speculative_tokens: number of tokens that prompt lookup drafts.

  Returns:
    A runner for each of `names`.

  Raises:
    UserError: `target` is not float32, or a library cannot read it.
  """
  runners = {}
  if set(names) & set(_HF):
    runners |= _load_hf(target, num_speculative_tokens)
  if set(names) & set(llama_peer.PEERS):
    runners |= llama_peer.load(target, names, num_speculative_tokens)
  return {name: runners[name] for name in names}


def _load_hf(target, num_speculative_tokens):
  if target.dtype.name != 'float32':
    raise errors.UserError(
      '--peers=hf compares in float32, but the dtype is '
      f'{target.dtype.name}; give --dtype=float32'
    )
  model = _load_model(target.name)
  return {
    'hf': _make_runner(model, target, None),
    'hf_prompt_lookup': _make_runner(model, target, num_speculative_tokens),
  }


def _load_model(name: str) -> 'transformers.PreTrainedModel':
  import torch
  import transformers

  source, options = name, {}
  path = pathlib.Path(name).expanduser()
  if name in ss.BUILTIN_MODELS:
    path = builtin.fetch(name)
  if path.suffix == '.gguf':
    source, options = path.parent, {'gguf_file': path.name}
  try:
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
      source, dtype=torch.float32, **options
    )
  except (OSError, ValueError) as error:
    raise errors.UserError(
      f'transformers cannot load {name} for --peers: {error}'
    ) from error
  return model.eval()


class _Clock:
  """A streamer that notes when tokens come, and how many there are."""

  def __init__(self):
    self.times = []
    self.sizes = []

  def put(self, value):
    self.times.append(time.perf_counter())
    self.sizes.append(value.numel())

  def end(self):
    pass


def _make_runner(
  model: 'transformers.PreTrainedModel',
  target: ss.Model,
  num_speculative_tokens: int | None,
) -> Decode:
  import torch

  def run(request: ss.Request) -> ss.GenerationResult:
    sampling = request.sampling
    ends = peer_results.ends_of(target, request)
    # Else the model's own sampling defaults would fill in what is not set.
    model.generation_config = _generation_config(
      sampling, ends, num_speculative_tokens
    )
    torch.manual_seed(sampling.seed)
    prompt = torch.tensor([request.token_ids])
    widths = []

    def note_width(module, args, kwargs):
      widths.append(kwargs['input_ids'].shape[1])

    hook = model.register_forward_pre_hook(note_width, with_kwargs=True)
    clock = _Clock()
    start = time.perf_counter()
    with torch.inference_mode():
      output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), streamer=clock
      )
    hook.remove()
    token_ids = tuple(output[0, prompt.shape[1] :].tolist())
    drafted = np.array(widths) - 1
    drafted[0] -= prompt.shape[1] - 1
    rounds = peer_results.Rounds(
      start=start,
      # The first thing that a streamer gets is the prompt.
      times=np.array(clock.times[1:]),
      sizes=np.array(clock.sizes[1:]),
      drafted=drafted,
    )
    return peer_results.make_result(
      target, request, token_ids, rounds, num_speculative_tokens or 0
    )

  return run


def _generation_config(sampling, eos_token_ids, num_speculative_tokens):
  import transformers

  options = {}
  if sampling.temperature > 0:
    options = {
      'do_sample': True,
      'temperature': sampling.temperature,
      'top_k': sampling.top_k,
      'top_p': sampling.top_p,
    }
  return transformers.GenerationConfig(
    max_new_tokens=sampling.max_new_tokens,
    eos_token_id=list(eos_token_ids) or None,
    pad_token_id=eos_token_ids[0] if eos_token_ids else None,
    prompt_lookup_num_tokens=num_speculative_tokens,
    **options,
  )
