"""SmolLM2-135M decodes prompts: with and without kernels and drafts."""

import functools
import statistics

import jax

import swiftspec_jax as ss
from experiments.accelerator import rows as rows_lib
from experiments.accelerator import shapes, weights
from experiments.accelerator.rows import Row
from experiments.accelerator.sections import Job, Settings
from experiments.flags import run_flags
from experiments.measuring import benchmark_run
from swiftspec_jax.checkpoint import builtin
from swiftspec_jax.cli import prompts
from swiftspec_jax.requests import results

_KERNELS = ('reference', 'auto')
_MODES = ('autoregressive', 'prompt_lookup', 'serial')
_NUM_PROMPTS = 6
_NUM_TOKENS = 128


def jobs(settings: Settings) -> list[Job]:
  """Returns the jobs; on a CPU `auto` is the reference, and is left out."""
  name = weights.find(settings)
  if name is None:
    place = builtin.cache_dir()
    reason = f'{weights.SMOLLM2} is not in {place}; give --model=PATH'
    row = Row(status=rows_lib.NO_WEIGHTS, reason=reason)
    return [Job(name='SmolLM2-135M', run=lambda: [row])]
  is_cpu = jax.default_backend() == 'cpu'
  return [
    Job(
      name=mode,
      shape=f'kernels={kernels}',
      run=functools.partial(_measure, name, mode, kernels, settings.tiny),
      limit=150.0,
    )
    for kernels in (_KERNELS[:1] if is_cpu else _KERNELS)
    for mode in _MODES
  ]


@functools.lru_cache(maxsize=1)
def _load(name: str, kernels: str) -> ss.Model:
  return ss.load(name, kernels=kernels)


def _decoder(target: ss.Model, mode: str, kernels: str) -> ss.Decoder:
  if mode == 'autoregressive':
    return ss.Decoder(target)
  if mode == 'prompt_lookup':
    return ss.Decoder(target, ss.PromptLookup())
  draft = ss.load(weights.DRAFT, draft_of=target, kernels=kernels)
  return ss.Decoder(target, draft, tree=ss.TreeConfig())


@functools.lru_cache(maxsize=2)
def _decode(
  name: str, mode: str, kernels: str, tiny: bool
) -> list[results.GenerationResult]:
  """Returns what the prompts give, each decoded for the second time."""
  target = _load(name, kernels)
  decode = benchmark_run.make_decode(_decoder(target, mode, kernels))
  num_prompts, num_tokens = (1, 4) if tiny else (_NUM_PROMPTS, _NUM_TOKENS)
  sampling = ss.SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
  encoded = benchmark_run.encode(
    target,
    prompts.read_prompts(run_flags.DEFAULT_PROMPTS, num_prompts),
    num_tokens,
  )
  found = []
  for _, token_ids in encoded:
    request = ss.Request(token_ids=token_ids, sampling=sampling)
    decode(request)  # compiles
    found.append(decode(request))
  return found


def _measure(name, mode, kernels, tiny) -> list[Row]:
  plain = _decode(name, 'autoregressive', 'reference', tiny)
  found = _decode(name, mode, kernels, tiny)
  seconds, reference_seconds = map(_token_seconds, (found, plain))
  pairs = zip(found, plain, strict=True)
  num_equal = sum(own.token_ids == other.token_ids for own, other in pairs)
  target = _load(name, kernels)
  share = None
  if mode == 'autoregressive':
    share = target.num_bytes / seconds / shapes.bandwidth()
  stats = [result.stats for result in found]
  return [
    Row(
      seconds=seconds,
      reference_seconds=reference_seconds,
      bandwidth_share=share,
      figures={
        'tokens_per_second': 1 / seconds,
        'acceptance_length': results.total_acceptance_length(stats),
        'outputs_equal': f'{num_equal}/{len(found)}',
        'prefill_seconds': statistics.median(s.ttft_seconds for s in stats),
        'dtype': target.dtype.name,
      },
    )
  ]


def _token_seconds(found) -> float:
  """Returns seconds of decoding for each token."""
  seconds = sum(result.stats.decode_seconds for result in found)
  return seconds / sum(result.stats.decoded_tokens for result in found)
