"""Measured costs as JSON files, which fit only what they were measured for."""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
from absl import logging

from swiftspec_jax import errors
from swiftspec_jax.policies.cost_model.measured import CostKey, MeasuredCosts
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.policies.cost_model.tables import CostTable
from swiftspec_jax.runtime import atomic_file, input_files

_FORMAT = 1  # of the file


def save(path: pathlib.Path, costs: MeasuredCosts) -> None:
  """Makes or replaces a file of costs."""
  values = {
    'format': _FORMAT,
    'key': dataclasses.asdict(costs.key),
    'parts': {
      part: {name: array.tolist() for name, array in vars(table).items()}
      for part, table in costs.parts.items()
    },
  }
  with atomic_file.replacing(path) as partial:
    partial.write_text(f'{json.dumps(values)}\n', encoding='utf-8')


def load(path: pathlib.Path, expected: CostKey | None = None) -> MeasuredCosts:
  """Reads costs.

  Args:
    path: path of the file.
    expected: key of the costs that are wanted; None takes them as they are, as
      a simulation does.

  Raises:
    UserError: the file is none of costs, or its costs are those of another
      model, device or set of compiled sizes.
  """
  values = input_files.read_json(path, 'costs')
  if values.get('format') != _FORMAT:
    raise errors.UserError(
      f'{path} holds no costs of format {_FORMAT}; measure again'
    )
  try:
    costs = _parse(values)
  except (KeyError, TypeError, ValueError) as error:
    raise errors.UserError(
      f'{path} is damaged: {error!r}; measure again'
    ) from error
  if costs.parts['draft'].seconds.any() and not costs.drafts_by_model:
    logging.warning(
      '%s does not say how long a draft model takes for prompts; that counts '
      'as no time until you measure again',
      path,
    )
  if expected is not None:
    _check(path, dataclasses.asdict(costs.key), dataclasses.asdict(expected))
  return costs


def _parse(values: dict[str, Any]) -> MeasuredCosts:
  key = dict(values['key'])
  buckets = {name: tuple(sizes) for name, sizes in key.pop('buckets').items()}
  return MeasuredCosts(
    key=CostKey(**key, buckets=StepBuckets(**buckets)),
    parts={
      part: CostTable(**{name: np.array(v) for name, v in table.items()})
      for part, table in values['parts'].items()
    },
  )


def _check(
  path: pathlib.Path, found: dict[str, Any], expected: dict[str, Any]
) -> None:
  found, expected = ({**k, **k['buckets']} for k in (found, expected))
  for name in expected:
    if name != 'buckets' and found[name] != expected[name]:
      raise errors.UserError(
        f'{path} was measured with {name}={found[name]!r}, here it is '
        f'{expected[name]!r}; measure again'
      )
