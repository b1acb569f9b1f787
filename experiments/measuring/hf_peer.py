"""Hugging Face transformers as a peer, on the CPU and in float32.

Measure on an idle machine: the threads of torch wait for each other several
times in each layer, and other processes slow it down far more than XLA.
"""

import functools
import pathlib
import time
from typing import TYPE_CHECKING

import numpy as np

import swiftspec_jax as ss
from experiments.measuring.benchmark_run import Decode
from swiftspec_jax import errors
from swiftspec_jax.checkpoint import builtin
from swiftspec_jax.requests import results

if TYPE_CHECKING:
  import transformers

_LOOKUP, DRAFT = 'hf_prompt_lookup', 'hf_draft'
PEERS = ('hf', _LOOKUP, DRAFT)
PACKAGES = ('accelerate', 'torch')  # reading GGUF needs the first one


def load(
  name: str,
  target: ss.Model,
  target_name: str,
  draft_name: str | None,
  num_speculative_tokens: int,
) -> Decode:
  """Does what `peers.load` does, for one of `PEERS`."""
  weight_dtype = target.config.weight_dtype
  if target.dtype.name != 'float32' or weight_dtype is not None:
    raise errors.UserError(
      f'--peers={name} compares in float32, but the dtype is '
      f'{target.dtype.name} and the weight_dtype {weight_dtype}; give '
      '--dtype=float32 --weight_dtype=wide'
    )
  draft = _load_model(draft_name) if name == DRAFT else None
  length = num_speculative_tokens if name == _LOOKUP else None
  return _make_decode(_load_model(target_name), target, length, draft)


@functools.cache  # several peers take the same one
def _load_model(name: str) -> 'transformers.PreTrainedModel':
  import torch
  import transformers

  source, options = name, {}
  path = pathlib.Path(name).expanduser()
  if name in ss.BUILTIN_MODELS:
    path = builtin.fetch(name)
  if path.suffix == '.gguf':
    source, options = path.parent, {'gguf_file': path.name}
  transformers.logging.disable_progress_bar()
  failed = f'transformers cannot load {name} for --peers: '
  with errors.explained(failed, (OSError, ValueError)):
    model = transformers.AutoModelForCausalLM.from_pretrained(
      source, dtype=torch.float32, **options
    )
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


def _make_decode(
  model: 'transformers.PreTrainedModel',
  target: ss.Model,
  num_speculative_tokens: int | None,
  draft: 'transformers.PreTrainedModel | None',
) -> Decode:
  import torch

  def decode(request: ss.Request) -> ss.GenerationResult:
    sampling = request.sampling
    ends = () if sampling.ignore_eos else target.config.eos_token_ids
    # Else the model's own sampling defaults would fill in what is not set.
    model.generation_config = _generation_config(
      sampling, ends, num_speculative_tokens
    )
    torch.manual_seed(sampling.seed)
    prompt = torch.tensor([request.token_ids])
    num_prompt = len(request.token_ids)
    widths = []

    def note_width(module, args, kwargs):
      widths.append(kwargs['input_ids'].shape[1])

    hook = model.register_forward_pre_hook(note_width, with_kwargs=True)
    clock = _Clock()
    start = time.perf_counter()
    with torch.inference_mode():
      output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        streamer=clock,
        assistant_model=draft,
      )
    hook.remove()
    token_ids = tuple(output[0, num_prompt:].tolist())
    # The first thing that a streamer gets is the prompt.
    times, sizes = np.array(clock.times[1:]), np.array(clock.sizes[1:])
    return ss.GenerationResult(
      text=target.tokenizer.decode(token_ids, skip_special_tokens=True),
      token_ids=token_ids,
      finish_reason='stop' if token_ids[-1] in ends else 'length',
      stats=results.GenerationStats(
        prompt_tokens=num_prompt,
        new_tokens=len(token_ids),
        decoded_tokens=len(token_ids) - int(sizes[0]),
        # The prompt is a round, as it can have drafts, too.
        num_rounds=len(sizes),
        num_drafted=sum(widths) - len(widths) - num_prompt + 1,
        num_accepted=len(token_ids) - len(sizes),
        ttft_seconds=float(times[0] - start),
        decode_seconds=float(times[-1] - times[0]),
        latency_seconds=float(times[-1] - start),
      ),
    )

  return decode


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
