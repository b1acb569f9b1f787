"""Flags by which models take longer texts than they were trained for."""

import json
from collections.abc import Mapping
from typing import Any

from absl import flags

from swiftspec_jax import errors

_ROPE_SCALING = flags.DEFINE_string(
  'rope_scaling',
  None,
  'Have --target and --draft take longer texts than they were trained for: '
  'what config.json would say, as in {"rope_type": "yarn", "factor": 4.0}. '
  'Types are yarn, linear and dynamic; original_max_position_embeddings is by '
  'default the context of the model.',
)
_DRAFT_ROPE_SCALING = flags.DEFINE_string(
  'draft_rope_scaling',
  None,
  'The same for --draft alone; null leaves it as it is. Default: as '
  '--rope_scaling.',
)
HOLDERS = (_ROPE_SCALING, _DRAFT_ROPE_SCALING)


def check() -> None:
  """Raises UserError for values that are no JSON objects."""
  of_target()
  of_draft()


def of_target() -> Mapping[str, Any] | None:
  """Returns the entries for the target; None leaves it as it is.

  Raises:
    UserError: they are no JSON object.
  """
  return _read(_ROPE_SCALING)


def of_draft() -> Mapping[str, Any] | None:
  """Returns the entries for the draft, as `of_target` does."""
  own = _DRAFT_ROPE_SCALING
  return _read(_ROPE_SCALING if own.value is None else own)


def _read(holder: flags.FlagHolder[str | None]) -> Mapping[str, Any] | None:
  if holder.value is None:
    return None
  example = '{"rope_type": "yarn", "factor": 4.0}'
  try:
    values = json.loads(holder.value)
  except ValueError as error:
    raise errors.UserError(
      f'--{holder.name}={holder.value} must be JSON such as {example}: {error}'
    ) from error
  if values is not None and not isinstance(values, dict):
    raise errors.UserError(
      f'--{holder.name}={holder.value} must be an object such as {example}'
    )
  return values
