"""JSON objects of clients.

What the server does not have is refused, unless it asks for nothing: null, a
value of `_NEUTRAL`, or a field that changes no answer.
"""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import pydantic
from absl import logging

# Values that ask for nothing, by field.
Neutral: TypeAlias = Mapping[str, tuple[Any, ...]]

# They identify people and requests.
_IGNORED = ('metadata', 'request_id', 'safety_identifier', 'user')
# No answer differs by these; a log says once that each has no effect.
_WITHOUT_EFFECT = frozenset(
  {
    'early_stopping',  # it and length_penalty are for beams
    'include_obfuscation',
    'length_penalty',
    'prediction',
    'priority',
    'prompt_cache_key',
    'prompt_cache_options',
    'prompt_cache_retention',
    'service_tier',
    'store',
    'verbosity',
  }
)
# Fields that the server does not have, and values that ask for nothing: the
# defaults of OpenAI's API and of vLLM.
_NEUTRAL: Neutral = {
  'bad_words': ([],),
  'documents': ([],),
  'early_stopping': (False,),
  'function_call': ('none', 'auto'),
  'functions': ([],),
  'include_obfuscation': (False,),
  'include_reasoning': (True,),
  'kv_transfer_params': ({},),
  'length_penalty': (1,),
  'logits_processors': ([],),
  'media_io_kwargs': ({},),
  'mm_processor_kwargs': ({},),
  'modalities': (['text'],),
  'priority': (0,),
  'response_format': ({'type': 'text'},),
  'return_token_ids': (False,),
  'return_tokens_as_token_ids': (False,),
  'service_tier': ('auto', 'default'),
  'spaces_between_special_tokens': (True,),
  'store': (False,),
  'use_beam_search': (False,),
  'verbosity': ('medium',),
  'vllm_xargs': ({},),
}


@functools.cache
def _note_without_effect(name: str) -> None:
  """Logs once that a field has no effect."""
  logging.warning('A client sends %s, which has no effect on answers.', name)


class JsonObject(pydantic.BaseModel):
  """A JSON object whose unknown fields may only ask for nothing."""

  model_config = pydantic.ConfigDict(extra='forbid')
  _neutral: ClassVar[Neutral] = {}  # of this kind alone

  @pydantic.model_validator(mode='before')
  @classmethod
  def _drop_neutral(cls, values: Any) -> Any:
    if not isinstance(values, dict):
      return values
    neutral = {**_NEUTRAL, **cls._neutral}
    asked = {
      name: value
      for name, value in values.items()
      if value is not None
      and name not in _IGNORED
      and value not in neutral.get(name, ())
    }
    for name in _WITHOUT_EFFECT.intersection(asked):
      _note_without_effect(name)
      del asked[name]
    return asked
