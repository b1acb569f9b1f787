"""The types of answers, as OpenAI has them."""

from typing import Literal, NotRequired

# That of `typing` is not good enough for pydantic before Python 3.12.
from typing_extensions import TypedDict

FinishReason = Literal['stop', 'length', 'tool_calls', 'error']


class Piece(TypedDict):
  """A token; pieces of an event, joined, are the text of the event."""

  text: str
  source: Literal['target', 'draft', 'lookup']


class DraftNode(TypedDict):
  """A draft token of a step; its parent comes before it, -1 has none."""

  text: str
  parent: int
  source: Literal['draft', 'lookup']
  prob: float | None  # of this token and all above it, by the drafter
  is_accepted: bool


class Speculation(TypedDict):
  """What a step of a choice did; not in OpenAI's API."""

  num_drafted: int
  pieces: list[Piece]
  draft_nodes: NotRequired[list[DraftNode]]


class Usage(TypedDict):
  """Numbers of tokens; a prompt with several choices counts once."""

  prompt_tokens: int
  completion_tokens: int
  total_tokens: int


class CompletionLogprobs(TypedDict):
  """Lists with an entry for each token."""

  tokens: list[str]
  token_logprobs: list[float | None]  # None: the first token of a prompt
  top_logprobs: list[dict[str, float] | None] | None
  text_offset: list[int]


class CompletionChoice(TypedDict):
  """One continuation."""

  index: int
  text: str
  logprobs: CompletionLogprobs | None
  finish_reason: FinishReason | None
  stop_reason: int | str | None


class Completion(TypedDict):
  """The answer of /v1/completions."""

  id: str
  object: Literal['text_completion']
  created: int
  model: str
  system_fingerprint: str
  choices: list[CompletionChoice]
  usage: Usage


class TopLogprob(TypedDict):
  """A token that might have been there."""

  token: str
  logprob: float
  bytes: list[int] | None


class TokenLogprob(TopLogprob):
  """A token of a chat."""

  top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
  """The tokens of a choice."""

  content: list[TokenLogprob]
  refusal: None


class CalledFunction(TypedDict):
  """What is called; the arguments are the model's JSON, as it wrote it."""

  name: str
  arguments: str


class ToolCall(TypedDict):
  """A call of a tool."""

  id: str
  type: Literal['function']
  function: CalledFunction


class ChatMessage(TypedDict):
  """What the model says."""

  role: Literal['assistant']
  content: str | None  # None: it only calls tools
  reasoning_content: NotRequired[str]
  refusal: None
  tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
  """One answer."""

  index: int
  message: ChatMessage
  logprobs: ChatLogprobs | None
  finish_reason: FinishReason
  stop_reason: int | str | None


class ChatCompletion(TypedDict):
  """The answer of /v1/chat/completions."""

  id: str
  object: Literal['chat.completion']
  created: int
  model: str
  system_fingerprint: str
  choices: list[ChatChoice]
  usage: Usage


class DraftLimits(TypedDict):
  """What `max_speculative_tokens` can be; not in OpenAI's API."""

  max_tokens: int


class Model(TypedDict):
  """A model that is served."""

  id: str
  object: Literal['model']
  created: int
  owned_by: str
  max_model_len: int
  speculation: DraftLimits


class Models(TypedDict):
  """The answer of /v1/models."""

  object: Literal['list']
  data: list[Model]


class Version(TypedDict):
  """The answer of /version."""

  version: str


class Tokens(TypedDict):
  """The answer of /tokenize."""

  count: int
  max_model_len: int
  tokens: list[int]
  token_strs: list[str] | None


class Text(TypedDict):
  """The answer of /detokenize."""

  prompt: str


class Health(TypedDict):
  """The answer of /health; requests are served while it warms up, too."""

  status: Literal['ok', 'warming up']
  num_programs: int
  num_compiled_programs: int


class Error(TypedDict):
  """What was wrong."""

  message: str
  type: str
  param: str | None
  code: str | None


class ErrorAnswer(TypedDict):
  """The answer to a request that is not served."""

  error: Error
