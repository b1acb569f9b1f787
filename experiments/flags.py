"""Flags that several programs share, and what they stand for."""

from collections.abc import Sequence

import jax
from absl import flags

import swiftspec_jax as ss
from swiftspec_jax import errors

MODES = ('autoregressive', 'prompt_lookup', 'chain')

_TARGET = flags.DEFINE_string(
  'target',
  'smollm2-135m-instruct',
  'Model that defines the output: a built-in name '
  f'({", ".join(ss.BUILTIN_MODELS)}), a directory in Hugging Face layout, a '
  '.gguf file, or a Hugging Face hub id.',
)
_DRAFT = flags.DEFINE_string(
  'draft', None, 'Draft model of mode chain; named like --target.'
)
_NUM_SPECULATIVE_TOKENS = flags.DEFINE_integer(
  'num_speculative_tokens',
  None,
  'Tokens drafted in a round. By default that of the drafter: '
  f'{ss.PromptLookup().num_speculative_tokens} for prompt_lookup, 4 for chain.',
  lower_bound=1,
)
_PROMPT_LOOKUP_MIN = flags.DEFINE_integer(
  'prompt_lookup_min',
  ss.PromptLookup().prompt_lookup_min,
  'Shortest n-gram that prompt_lookup takes for a match.',
)
_PROMPT_LOOKUP_MAX = flags.DEFINE_integer(
  'prompt_lookup_max',
  ss.PromptLookup().prompt_lookup_max,
  'Longest n-gram that prompt_lookup compares.',
)
_MAX_NEW_TOKENS = flags.DEFINE_integer(
  'max_new_tokens', 256, 'Token limit of each output.'
)
_TEMPERATURE = flags.DEFINE_float(
  'temperature', 0.0, "0 is greedy, 1 the model's own law."
)
_TOP_K = flags.DEFINE_integer(
  'top_k', 0, 'Sample from the k most probable tokens; 0 keeps all.'
)
_TOP_P = flags.DEFINE_float(
  'top_p',
  1.0,
  'Sample from the most probable tokens that have this probability together.',
)
_SEED = flags.DEFINE_integer('seed', 0, 'Of the noise of sampling.')
_DTYPE = flags.DEFINE_enum(
  'dtype',
  None,
  ['float32', 'bfloat16'],
  'Of weights and cache. Default: float32 on CPU, bfloat16 elsewhere.',
)
_TARGET_DEVICES = flags.DEFINE_integer(
  'target_devices',
  1,
  'Devices that share the model (tensor parallel).',
  lower_bound=1,
)


def sampling() -> ss.SamplingParams:
  """Returns what the flags say about sampling, checked."""
  return ss.SamplingParams(
    temperature=_TEMPERATURE.value,
    top_k=_TOP_K.value,
    top_p=_TOP_P.value,
    seed=_SEED.value,
    max_new_tokens=_MAX_NEW_TOKENS.value,
  )


def prompt_lookup() -> ss.PromptLookup:
  """Returns the drafter of mode prompt_lookup, checked."""
  num_tokens = _NUM_SPECULATIVE_TOKENS.value
  return ss.PromptLookup(
    prompt_lookup_min=_PROMPT_LOOKUP_MIN.value,
    prompt_lookup_max=_PROMPT_LOOKUP_MAX.value,
    **({} if num_tokens is None else {'num_speculative_tokens': num_tokens}),
  )


def default_modes() -> tuple[str, ...]:
  """Returns all modes that the flags allow."""
  return MODES if _DRAFT.value else MODES[:2]


def check(modes: Sequence[str]) -> None:
  """Raises UserError if the flags do not fit together; loads nothing."""
  sampling()
  prompt_lookup()
  devices()
  if 'chain' in modes and not _DRAFT.value:
    raise errors.UserError('mode chain needs a draft model: give --draft')
  if _DRAFT.value and 'chain' not in modes:
    raise errors.UserError(
      f'--draft={_DRAFT.value} is used by mode chain only; the mode is '
      f'{", ".join(modes)}'
    )


def devices() -> list[jax.Device]:
  """Returns the devices that hold the models."""
  found = jax.devices()
  if _TARGET_DEVICES.value > len(found):
    raise errors.UserError(
      f'--target_devices={_TARGET_DEVICES.value}, but there are only '
      f'{len(found)} devices ({found[0].platform})'
    )
  return found[: _TARGET_DEVICES.value]


def load_target() -> ss.Model:
  """Loads the model of --target."""
  return ss.load(_TARGET.value, dtype=_DTYPE.value, devices=devices())


def load_draft(target: ss.Model) -> ss.Model | None:
  """Loads the model of --draft; None where none was given."""
  if not _DRAFT.value:
    return None
  return ss.load(
    _DRAFT.value, dtype=_DTYPE.value, devices=devices(), draft_of=target
  )


def make_decoder(
  mode: str, target: ss.Model, draft: ss.Model | None
) -> ss.Decoder:
  """Returns a decoder of one of `MODES`, for one request at a time."""
  if mode == 'autoregressive':
    return ss.Decoder(target)
  if mode == 'prompt_lookup':
    return ss.Decoder(target, prompt_lookup())
  return ss.Decoder(
    target, draft, num_speculative_tokens=_NUM_SPECULATIVE_TOKENS.value
  )


def to_json() -> dict[str, str | int | float | None]:
  """Returns the values of the shared flags, by name."""
  holders = (
    _TARGET,
    _DRAFT,
    _NUM_SPECULATIVE_TOKENS,
    _PROMPT_LOOKUP_MIN,
    _PROMPT_LOOKUP_MAX,
    _MAX_NEW_TOKENS,
    _TEMPERATURE,
    _TOP_K,
    _TOP_P,
    _SEED,
    _DTYPE,
    _TARGET_DEVICES,
  )
  return {holder.name: holder.value for holder in holders}
