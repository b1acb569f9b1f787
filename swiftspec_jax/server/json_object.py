"""JSON objects of clients.

What the server does not have is refused, unless it asks for nothing: null, a
value of `_NEUTRAL`, or a field that changes no answer.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import pydantic

# Values that ask for nothing, by field.
Neutral: TypeAlias = Mapping[str, tuple[Any, ...]]

# Of no consequence for the answer.
_IGNORED = (
  'metadata',
  'parallel_tool_calls',
  'prompt_cache_key',
  'prompt_cache_options',
  'prompt_cache_retention',
  'request_id',
  'safety_identifier',
  'user',
)
# Fields that the server does not have, and values that ask for nothing: the
# defaults of OpenAI's API and of vLLM.
_NEUTRAL: Neutral = {
  'bad_words': ([],),
  'best_of': (1,),
  'chat_template_kwargs': ({},),
  'documents': ([],),
  'early_stopping': (False,),
  'function_call': ('none', 'auto'),
  'functions': ([],),
  'include_reasoning': (True,),
  'kv_transfer_params': ({},),
  'length_penalty': (1,),
  'logits_processors': ([],),
  'media_io_kwargs': ({},),
  'mm_processor_kwargs': ({},),
  'modalities': (['text'],),
  'priority': (0,),
  'reasoning_effort': ('none',),
  'response_format': ({'type': 'text'},),
  'return_token_ids': (False,),
  'return_tokens_as_token_ids': (False,),
  'service_tier': ('auto', 'default'),
  'spaces_between_special_tokens': (True,),
  'store': (False,),
  'suffix': ('',),
  'tool_choice': ('none', 'auto'),
  'tools': ([],),
  'use_beam_search': (False,),
  'verbosity': ('medium',),
  'vllm_xargs': ({},),
}


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
    return {
      name: value
      for name, value in values.items()
      if value is not None
      and name not in _IGNORED
      and value not in neutral.get(name, ())
    }
