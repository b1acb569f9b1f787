"""The folder of a benchmark: its settings, and a line for each result."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from swiftspec_jax import errors
from swiftspec_jax.cli import output_files
from swiftspec_jax.cli.prompts import Prompt
from swiftspec_jax.requests import results
from swiftspec_jax.runtime import input_files

_RESULTS = 'results.jsonl'
_SETTINGS = 'settings.json'
_PLACE = 'question_id', 'task', 'mode', 'repeat'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record(results.GenerationStats):
  """One line of results.jsonl: the figures of a request and more.

  `host_seconds` is the work of the host loop, waits excluded, and
  `forced_acceptance` what the draft was told to reach; both are None where
  there is no such thing. What older files lack has a default.
  """

  question_id: int | str
  task: str
  mode: str
  repeat: int
  token_ids: tuple[int, ...]
  finish_reason: str
  acceptance_length: float = 1.0
  tpot_seconds: float | None = None
  latency_seconds: float | None = None
  decoded_tokens: int | None = None
  host_seconds: float | None = None
  forced_acceptance: float | None = None

  @property
  def key(self) -> tuple[int | str, str, int]:
    """What tells this result from the others of a run."""
    return self.question_id, self.mode, self.repeat

  @property
  def timed_tokens(self) -> int:
    """Tokens that `decode_seconds` gave."""
    if self.decoded_tokens is None:
      return self.new_tokens  # older files
    return self.decoded_tokens


def make_record(
  prompt: Prompt,
  mode: str,
  repeat: int,
  result: results.GenerationResult,
  **values: float | None,
) -> Record:
  """Returns what is kept of `result`, and the `values` it does not have."""
  return Record(
    question_id=prompt.question_id,
    task=prompt.task,
    mode=mode,
    repeat=repeat,
    token_ids=result.token_ids,
    acceptance_length=result.stats.acceptance_length,
    finish_reason=result.finish_reason,
    tpot_seconds=result.stats.tpot_seconds,
    **vars(result.stats),
    **values,
  )


def open_directory(
  directory: pathlib.Path, settings: Mapping[str, Any], *, resume: bool
) -> list[Record]:
  """Makes sure that results can be added to `directory`.

  Args:
    directory: folder to write; made if it does not exist.
    settings: JSON values; all results in the directory must share them.
    resume: whether there may be results already.

  Returns:
    The results that are there.

  Raises:
    UserError: the directory cannot be written, holds files although `resume`
      is false, or has results of other settings.
  """
  names = output_files.open_directory(
    directory, 'or go on with what is there by --resume', resume=resume
  )
  if not names:
    return []
  if _SETTINGS not in names:
    raise errors.UserError(
      f'--resume: {directory} holds no benchmark, {_SETTINGS} is missing'
    )
  _check_settings(directory / _SETTINGS, settings)
  return _read_records(directory / _RESULTS)


def write_settings(
  directory: pathlib.Path, settings: Mapping[str, Any]
) -> None:
  """Records the settings that `open_directory` will compare with."""
  output_files.write_json(directory / _SETTINGS, settings)


def append(directory: pathlib.Path, record: Record) -> None:
  """Adds a complete line to the results, which begins with what it is of."""
  values = dataclasses.asdict(record)
  place = {name: values[name] for name in _PLACE}
  output_files.append_line(directory / _RESULTS, {**place, **values})


def _check_settings(path: pathlib.Path, settings: Mapping[str, Any]) -> None:
  old = input_files.read_json(path, 'what to resume')
  new = json.loads(json.dumps(settings))
  for name in sorted(old.keys() | new.keys()):
    if old.get(name) != new.get(name):
      raise errors.UserError(
        f'--resume: {name} is {json.dumps(new.get(name))}, but the results in '
        f'{path.parent} were made with {json.dumps(old.get(name))}; use that '
        'value or another --output_dir'
      )


def _read_records(path: pathlib.Path) -> list[Record]:
  records = []
  for number, values in enumerate(output_files.read_lines(path), start=1):
    try:
      lists = {k: tuple(v) for k, v in values.items() if isinstance(v, list)}
      records.append(Record(**{**values, **lists}))
    except (TypeError, AttributeError) as error:
      raise errors.UserError(
        f'{path}, line {number}: not a result: {error!r}'
      ) from error
  return records
