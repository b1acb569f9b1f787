"""What clients can ask for.

Names and defaults are those of OpenAI, for `top_k` and what follows it those
of vLLM. What is not here is refused, unless it asks for nothing.
"""

import dataclasses
import random
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import pydantic
from pydantic import Field

from swiftspec_jax.config import MAX_TOP_LOGPROBS, SamplingParams
from swiftspec_jax.server.json_object import JsonObject, Neutral
from swiftspec_jax.server.messages import Message, NamedTool, Tool
from swiftspec_jax.server.structured import Grammar, ResponseFormat
from swiftspec_jax.tokenizer import chat_template

_NUM_SEEDS = 2**32
# Those that mean the same in both; a grammar is made from two others.
_SAMPLING_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)}
_SAMPLING_FIELDS -= {'structured_outputs'}
TokenId = Annotated[int, Field(strict=True, ge=0)]
_Text = Annotated[str, Field(min_length=1)]
# These are looked for after every token.
_MAX_STOPS = 16
_Stop = Annotated[str, Field(min_length=1, max_length=256)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Bias = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(JsonObject):
  """Options of `stream`."""

  include_usage: bool = False
  continuous_usage_stats: bool = Field(
    False, description='Each event then has the numbers of tokens so far.'
  )
  include_speculation: bool = Field(
    False,
    description='Choices of events then tell who proposed each token.',
  )
  include_draft_nodes: bool = Field(
    False,
    description='They also have all draft tokens of the step, as a tree.',
  )

  @pydantic.model_validator(mode='after')
  def _check_draft_nodes(self):
    if self.include_draft_nodes and not self.include_speculation:
      raise ValueError('include_draft_nodes needs include_speculation=true')
    return self


class _Body(JsonObject):
  """What both kinds of requests have."""

  model: str | None = None
  n: int = Field(1, ge=1, le=128)
  temperature: float = Field(1.0, ge=0, le=2)
  top_p: float = Field(1.0, gt=0, le=1)
  seed: int | None = Field(
    None,
    ge=-(2**63),
    lt=2**63,
    description=f'Counts modulo {_NUM_SEEDS}.',
  )
  stop: _Stop | list[_Stop] = Field([])
  logit_bias: dict[int, _Bias] = Field({})
  presence_penalty: _Penalty = 0.0
  frequency_penalty: _Penalty = 0.0
  stream: bool = False
  stream_options: StreamOptions = StreamOptions()
  top_k: int = Field(
    0, ge=-1, lt=2**31, description='0 and -1 keep all tokens.'
  )
  min_p: float = Field(0.0, ge=0, lt=1)
  repetition_penalty: float = Field(1.0, ge=0.01, le=100)
  ignore_eos: bool = False
  stop_token_ids: list[TokenId] = Field([])
  min_tokens: int = Field(0, ge=0, lt=2**31)
  include_stop_str_in_output: bool = False
  skip_special_tokens: bool = True
  max_speculative_tokens: int | None = Field(
    None,
    ge=0,
    description='Longest draft; 0 for none, nothing leaves it to the server.',
  )
  response_format: ResponseFormat | None = None
  structured_outputs: Grammar | None = None

  @pydantic.model_validator(mode='after')
  def _check_both(self):
    if self.response_format and self.structured_outputs:
      raise ValueError('give response_format or structured_outputs, not both')
    if 'stream_options' in self.model_fields_set and not self.stream:
      raise ValueError('stream_options needs stream=true')
    if isinstance(self.stop, list) and len(self.stop) > _MAX_STOPS:
      raise ValueError(f'stop has more than {_MAX_STOPS} strings')
    return self

  def samplings(self) -> list[SamplingParams]:
    """Returns the sampling of each choice.

    Raises:
      UserError: a value is out of range.
    """
    seed = random.randrange(_NUM_SEEDS) if self.seed is None else self.seed
    grammar = self.structured_outputs or self.response_format
    values = self.model_dump(include=_SAMPLING_FIELDS) | {
      'top_k': max(self.top_k, 0),
      'stop': (self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
      'stop_token_ids': tuple(self.stop_token_ids),
      # Who wants none only has the prompt read.
      'max_new_tokens': 1 if self.max_new_tokens == 0 else self.max_new_tokens,
      'logprobs': self.with_logprobs,
      'top_logprobs': self.num_top_logprobs,
      'structured_outputs': grammar and grammar.to_params(),
    }
    return [
      SamplingParams(**values | {'seed': (seed + i) % _NUM_SEEDS})
      for i in range(self.n)
    ]


class CompletionRequest(_Body):
  """The body of /v1/completions."""

  prompt: _Text | list[_Text] | list[TokenId] | list[list[TokenId]]
  suffix: str = Field(
    '', description='What comes after the text, for models that fill in.'
  )
  best_of: int | None = Field(None, description='The same as n, if anything.')
  max_tokens: int = Field(16, ge=0, description='0 needs echo=true.')
  logprobs: int | None = Field(None, ge=0, le=5)
  add_special_tokens: bool = True
  echo: bool = Field(
    False,
    description='Texts then begin with their prompt, and so do log-'
    'probabilities.',
  )

  @pydantic.model_validator(mode='after')
  def _check(self):
    if self.best_of not in (None, self.n):
      raise ValueError(
        f'best_of is {self.best_of}; this server returns all choices, so it '
        f'must be n, {self.n}'
      )
    if self.suffix and self.echo:
      raise ValueError('a completion with suffix has no echo')
    if not (self.max_tokens or self.echo):
      raise ValueError('max_tokens=0 needs echo=true; give at least 1')
    return self

  @property
  def max_new_tokens(self) -> int:
    return self.max_tokens

  @property
  def scores_prompts(self) -> bool:
    return self.echo and self.with_logprobs

  @property
  def with_logprobs(self) -> bool:
    return self.logprobs is not None

  @property
  def num_top_logprobs(self) -> int:
    return self.logprobs or 0

  @property
  def prompts(self) -> list[str | list[int]]:
    """The prompts, each by itself."""
    if isinstance(self.prompt, str) or not isinstance(
      next(iter(self.prompt), 0), str | list
    ):
      return [self.prompt]
    return self.prompt


class Conversation(JsonObject):
  """What chat templates make a prompt of."""

  messages: list[Message] = Field(min_length=1)
  tools: list[Tool] = Field([])
  reasoning_effort: str | None = Field(
    None, description='For chat templates that read it.'
  )
  chat_template_kwargs: dict[str, Any] = Field(
    {}, description='Variables of the chat template.'
  )
  add_generation_prompt: bool = True
  continue_final_message: bool = Field(
    False, description='The model goes on with the last message.'
  )

  @property
  def offered_tools(self) -> list[Tool]:
    """The tools that the model is told of."""
    return self.tools

  @property
  def template_options(self) -> chat_template.Options:
    """What the chat template gets besides messages."""
    variables = dict(self.chat_template_kwargs)
    if self.reasoning_effort is not None:
      variables.setdefault('reasoning_effort', self.reasoning_effort)
    return chat_template.Options(
      tools=[tool.to_template() for tool in self.offered_tools],
      variables=variables,
      opens_turn=self.add_generation_prompt,
      continues=self.continue_final_message,
    )


class ChatRequest(Conversation, _Body):
  """The body of /v1/chat/completions."""

  _neutral: ClassVar[Neutral] = {
    'add_special_tokens': (False,),
    'echo': (False,),
  }
  scores_prompts: ClassVar[bool] = False

  max_completion_tokens: int | None = Field(None, ge=1)
  max_tokens: int | None = Field(
    None, ge=1, description='max_completion_tokens comes first.'
  )
  logprobs: bool = False
  top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
  tool_choice: Literal['none', 'auto', 'required'] | NamedTool = 'auto'
  parallel_tool_calls: bool = Field(
    True, description='Otherwise, an answer has its first call alone.'
  )

  @pydantic.model_validator(mode='after')
  def _check(self):
    if self.top_logprobs and not self.logprobs:
      raise ValueError('top_logprobs needs logprobs=true')
    if self.tool_choice not in ('none', 'auto') and not self.callable_tools:
      raise ValueError('tool_choice asks for a tool that is not in tools')
    return self

  @property
  def offered_tools(self) -> list[Tool]:
    return [] if self.tool_choice == 'none' else self.tools

  @property
  def callable_tools(self) -> list[Tool]:
    """The tools that the model may call."""
    if not isinstance(self.tool_choice, NamedTool):
      return self.offered_tools
    name = self.tool_choice.function.name
    return [tool for tool in self.tools if tool.function.name == name]

  @property
  def max_new_tokens(self) -> int | None:
    return self.max_completion_tokens or self.max_tokens

  @property
  def with_logprobs(self) -> bool:
    return self.logprobs

  @property
  def num_top_logprobs(self) -> int:
    return self.top_logprobs or 0


Body: TypeAlias = CompletionRequest | ChatRequest
