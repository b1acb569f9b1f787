"""Other libraries, on the same weights and token ids: the honest rivals.

Hugging Face transformers on the CPU, in float32. Times mean the same as in
`GenerationStats`, with one difference that its interface forces on us. Our
decoding starts behind the prefill of all but the last token of the prompt,
so it has a step for each token; in transformers, the forward that takes in
the prompt already gives the first tokens. So `decode_seconds` of a peer is
the time from its first tokens to the end, scaled by all new tokens over
those that came in that time. An output that is complete after the first
forward counts as decoded in no time, in the peer's favour.

Measure on an idle machine: the threads of torch wait for each other several
times in each layer, and other processes slow it down far more than XLA.
"""

import pathlib
import time

import jax
import numpy as np
import transformers

import swiftspec_jax as ss
from experiments.benchmark_run import Decode
from swiftspec_jax import errors, results
from swiftspec_jax.checkpoint import builtin

PEERS = ('hf', 'hf_prompt_lookup')


def check() -> None:
  """Raises UserError unless the peers can run here, and compare fairly."""
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


def load(target: ss.Model, num_speculative_tokens: int) -> dict[str, Decode]:
  """Loads the weights of `target` into transformers.

  Args:
    target: whose weights are float32.
    num_speculative_tokens: that hf_prompt_lookup drafts.

  Returns:
    A runner for each of `PEERS`.

  Raises:
    UserError: `target` is not float32, or transformers cannot read it.
  """
  if target.dtype.name != 'float32':
    raise errors.UserError(
      f'--peers compares in float32, but the dtype is {target.dtype.name}; '
      'give --dtype=float32'
    )
  model = _load_model(target.name)
  return {
    'hf': _make_runner(model, target, None),
    'hf_prompt_lookup': _make_runner(model, target, num_speculative_tokens),
  }


# Types of transformers are quoted, because looking them up would load torch.
def _load_model(name: str) -> 'transformers.PreTrainedModel':
  import torch

  source, options = name, {}
  path = pathlib.Path(name).expanduser()
  if name in ss.BUILTIN_MODELS:
    path = builtin.fetch(name)
  if path.suffix == '.gguf':
    source, options = path.parent, {'gguf_file': path.name}
  try:
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
    ends = () if sampling.ignore_eos else target.config.eos_token_ids
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
    # The first thing that a streamer gets is the prompt.
    times, sizes = np.array(clock.times[1:]), np.array(clock.sizes[1:])
    drafted = np.array(widths) - 1
    drafted[0] -= prompt.shape[1] - 1
    later = sizes[1:].sum()
    scale = len(token_ids) / later if later else 0
    stats = _stats(
      drafted,
      accepted=sizes - 1,
      num_positions=num_speculative_tokens or 0,
      prompt_tokens=prompt.shape[1],
      ttft_seconds=float(times[0] - start),
      decode_seconds=float((times[-1] - times[0]) * scale),
    )
    return results.GenerationResult(
      text=target.tokenizer.decode(token_ids, skip_special_tokens=True),
      token_ids=token_ids,
      finish_reason='stop' if token_ids[-1] in ends else 'length',
      logprobs=None,
      top_logprobs=None,
      stats=stats,
    )

  return run


def _generation_config(sampling, eos_token_ids, num_speculative_tokens):
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


def _stats(
  drafted: np.ndarray,
  accepted: np.ndarray,
  num_positions: int,
  **fields: int | float,
) -> results.GenerationStats:
  """Returns statistics from the draft tokens of each round."""
  positions = np.arange(num_positions)
  return results.GenerationStats(
    new_tokens=int((accepted + 1).sum()),
    num_rounds=len(accepted),
    num_drafted=int(drafted.sum()),
    num_accepted=int(accepted.sum()),
    drafted_per_position=tuple(
      (drafted[:, None] > positions).sum(axis=0).tolist()
    ),
    accepted_per_position=tuple(
      (accepted[:, None] > positions).sum(axis=0).tolist()
    ),
    **fields,
  )
