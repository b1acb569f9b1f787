"""Endpoints between texts and token ids, as vLLM has them."""

import fastapi
import pydantic
from pydantic import Field

from swiftspec_jax import errors
from swiftspec_jax.server import answer_types
from swiftspec_jax.server.json_object import JsonObject
from swiftspec_jax.server.messages import Message
from swiftspec_jax.server.schema import Conversation, TokenId

router = fastapi.APIRouter()


class TokenizeRequest(Conversation):
  """The body of /tokenize."""

  model: str | None = None
  prompt: str | None = None
  messages: list[Message] = Field([])
  add_special_tokens: bool = Field(
    True, description='For a prompt; chat templates have their own.'
  )
  return_token_strs: bool = False

  @pydantic.model_validator(mode='after')
  def _check_one(self):
    if (self.prompt is None) == (not self.messages):
      raise ValueError('give either prompt or messages')
    return self


class DetokenizeRequest(JsonObject):
  """The body of /detokenize."""

  model: str | None = None
  tokens: list[TokenId] = Field(min_length=1)


@router.post('/tokenize', response_model=answer_types.Tokens)
async def tokenize(body: TokenizeRequest, http: fastapi.Request):
  """Returns the token ids of a prompt, as requests would have them."""
  service = http.app.state.service
  service.check_model(body.model)
  prompt = body.prompt
  if prompt is None:
    prompt = [message.to_template() for message in body.messages]
  (ids,) = await service.encoder.encode(
    [prompt],
    template_options=body.template_options,
    add_special_tokens=body.add_special_tokens,
  )
  names = service.model.tokenizer.convert_ids_to_tokens(list(ids))
  return {
    'count': len(ids),
    'max_model_len': service.engine.max_context,
    'tokens': ids,
    'token_strs': names if body.return_token_strs else None,
  }


@router.post('/detokenize', response_model=answer_types.Text)
async def detokenize(body: DetokenizeRequest, http: fastapi.Request):
  """Returns the text of token ids."""
  service = http.app.state.service
  service.check_model(body.model)
  tokenizer = service.model.tokenizer
  if max(body.tokens) >= len(tokenizer):
    raise errors.UserError(
      f'tokens has {max(body.tokens)}; ids are 0 to {len(tokenizer) - 1}'
    )
  return {'prompt': tokenizer.decode(body.tokens)}
