"""Grammars of clients: vLLM's `structured_outputs`, OpenAI's `response_format`.

Every schema is enforced, so `strict` changes nothing.
"""

from typing import Any, Literal

import pydantic
from pydantic import Field

from swiftspec_jax.config import StructuredOutputs
from swiftspec_jax.server.json_object import JsonObject


class Grammar(JsonObject):
  """The value of `structured_outputs`."""

  json_: dict[str, Any] | str | None = Field(None, alias='json')
  json_object: bool = False
  regex: str | None = None
  choice: list[str] = Field([])
  grammar: str | None = None

  def to_params(self) -> StructuredOutputs:
    """Returns what the engine takes.

    Raises:
      UserError: none is given, or more than one.
    """
    return StructuredOutputs(**self.model_dump(by_alias=True))


class _NamedSchema(JsonObject):
  name: str
  description: str | None = None
  schema_: dict[str, Any] = Field(alias='schema')
  strict: bool | None = None


class ResponseFormat(JsonObject):
  """The value of `response_format`; that of type `text` asks for nothing."""

  type: Literal['json_object', 'json_schema']
  json_schema: _NamedSchema | None = None

  @pydantic.model_validator(mode='after')
  def _check_schema(self):
    if (self.type == 'json_schema') != (self.json_schema is not None):
      raise ValueError('type json_schema needs json_schema, and no other does')
    return self

  def to_params(self) -> StructuredOutputs:
    """Returns what the engine takes."""
    if self.json_schema is None:
      return StructuredOutputs(json_object=True)
    return StructuredOutputs(json=self.json_schema.schema_)
