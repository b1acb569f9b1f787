"""Steps and rounds of Llama 8B with 1B, with random weights.

Times do not depend on the weights; acceptance is forced.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

import swiftspec_jax as ss
from experiments.accelerator import shapes, weights
from experiments.accelerator.rows import Row
from experiments.accelerator.sections import Job, Settings
from experiments.aot import models
from experiments.kernels import kernel_timing
from experiments.measuring import benchmark_run
from swiftspec_jax.cli import references, step_times

_PAIR = models.PAIRS['large'][0]
_TINY = {
  'num_layers': 1,
  'embed_dim': 64,
  'num_heads': 4,
  'num_kv_heads': 2,
  'head_dim': 16,
  'ffw_dim': 128,
  'vocab_size': 512,
}
_WEIGHTS = ('bfloat16', 'int8', 'int4')
_TREE = ss.TreeConfig(num_nodes=8, forced_acceptance=0.7, prompt_lookup=False)
_PROMPT_TOKENS = 512
_NEW_TOKENS = 128
_NUM_STEPS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Setup:
  """What the models of a job run on; a key of caches."""

  weight_dtype: str
  kernels: str
  tiny: bool

  def model(self, config: ss.ModelConfig, name: str) -> ss.Model:
    sizes = _TINY if self.tiny else {}
    quantized = None if self.weight_dtype == 'bfloat16' else self.weight_dtype
    config = dataclasses.replace(
      config, kernels=self.kernels, weight_dtype=quantized, **sizes
    )
    return weights.random_model(config, name, 'bfloat16')


def jobs(settings: Settings) -> list[Job]:
  """Returns the jobs; without kernels the steps alone, at the end."""
  platform = jax.default_backend()
  names = _WEIGHTS[:1] if settings.tiny else _WEIGHTS
  setups = [
    _Setup(weight_dtype=name, kernels=kernels, tiny=settings.tiny)
    for kernels in ('auto', *(() if platform == 'cpu' else ('reference',)))
    for name in names
  ]
  return [
    Job(
      name=name,
      shape=f'{setup.weight_dtype}, kernels={setup.kernels}',
      run=functools.partial(measure, setup),
      limit=300.0,  # the first of a setup compiles, and compares kernels
    )
    for setup in setups
    for name, measure in _MEASURES.items()
    if setup.kernels == 'auto' or name in ('8B plain step', '8B verify 8')
  ]


@functools.lru_cache(maxsize=1)
def _target(setup: _Setup) -> ss.Model:
  return setup.model(_PAIR.target, 'random 8B')


@functools.lru_cache(maxsize=1)
def _draft(setup: _Setup) -> ss.Model:
  return setup.model(_PAIR.draft, 'random 1B')


@functools.lru_cache(maxsize=1)
def _tree_decoder(setup: _Setup) -> ss.Decoder:
  """Returns a decoder that has decoded."""
  decoder = ss.Decoder(_target(setup), _draft(setup), tree=_TREE)
  benchmark_run.make_decode(decoder)(_request(setup))
  return decoder


@functools.lru_cache(maxsize=1)
def _references(setup: _Setup) -> references.References:
  return references.References(_target(setup))


def _request(setup: _Setup) -> ss.Request:
  """Returns a request that knows its output."""
  num_prompt, num_new = (8, 4) if setup.tiny else (_PROMPT_TOKENS, _NEW_TOKENS)
  sampling = ss.SamplingParams(max_new_tokens=num_new, ignore_eos=True)
  request = ss.Request(token_ids=tuple(range(num_prompt)), sampling=sampling)
  return _references(setup).add_to(request)


@functools.lru_cache(maxsize=1)
def _plain_step(setup: _Setup) -> tuple[float, float | None]:
  _request(setup)  # decodes it plainly
  return _time(step_times.enqueue_step(_references(setup).decoder))


def _time(run: Callable[[], Any]) -> tuple[float, float | None]:
  """Returns seconds of one of many runs in a row, and those of the device."""

  def run_all():
    results = [run() for _ in range(_NUM_STEPS)]
    jax.block_until_ready(results[-1])

  run_all()
  seconds = kernel_timing.wall_seconds(run_all) / _NUM_STEPS
  if not kernel_timing.has_clock():
    return seconds, None
  found = kernel_timing.device_seconds(kernel_timing.profile(run_all))
  return seconds, sum(found) / _NUM_STEPS


def _row(
  setup,
  model,
  seconds,
  busy_seconds=None,
  *,
  num_tokens,
  context=_PROMPT_TOKENS,
) -> list[Row]:
  """Returns a row of a forward of `model`; plans read its figures."""
  embedding = 0
  if not model.config.tie_embeddings:  # of which a step reads few rows
    embedding = model.params['embedding'].nbytes
  num_bytes = model.num_bytes - embedding
  return [
    Row(
      seconds=seconds,
      reference_seconds=_plain_step(setup)[0],
      bandwidth_share=num_bytes / seconds / shapes.bandwidth(),
      figures={
        'busy_seconds': busy_seconds,
        'num_bytes': num_bytes,
        'num_tokens': num_tokens,
        'context': context,
        **dataclasses.asdict(setup),
      },
    )
  ]


def _measure_plain(setup: _Setup) -> list[Row]:
  return _row(setup, _target(setup), *_plain_step(setup), num_tokens=1)


def _measure_verify(setup: _Setup) -> list[Row]:
  verify = step_times.enqueue_step(_tree_decoder(setup), _TREE.num_nodes)
  num_tokens = _TREE.num_nodes
  return _row(setup, _target(setup), *_time(verify), num_tokens=num_tokens)


def _measure_draft(setup: _Setup) -> list[Row]:
  draft = _draft(setup)
  max_tokens = _PROMPT_TOKENS + _NEW_TOKENS
  seconds = step_times.draft_step_seconds(draft, _TREE, max_tokens)
  return _row(setup, draft, seconds, num_tokens=_TREE.num_leaves, context=0)


def _measure_rounds(setup: _Setup) -> list[Row]:
  decode = benchmark_run.make_decode(_tree_decoder(setup))
  stats = decode(_request(setup)).stats
  seconds = 1 / stats.tokens_per_second
  return [
    Row(
      seconds=seconds,
      reference_seconds=_plain_step(setup)[0],
      figures={
        'tokens_per_second': 1 / seconds,
        'acceptance_length': stats.acceptance_length,
        'round_seconds': stats.decode_seconds / (stats.num_rounds - 1),
        'forced_acceptance': _TREE.forced_acceptance,
        'num_nodes': _TREE.num_nodes,
        'num_draft_steps': _TREE.num_draft_steps,
      },
    )
  ]


_MEASURES = {
  '8B plain step': _measure_plain,
  '8B verify 8': _measure_verify,
  '1B draft forward': _measure_draft,
  '8B + 1B token': _measure_rounds,
}
