"""Files of prompts: JSON lines in the format of Spec-Bench and MT-Bench."""

import dataclasses
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

from swiftspec_jax import errors
from swiftspec_jax.runtime import input_files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
  """One task for a model.

  Attributes:
    question_id: unique in its file.
    task: the kind of task, by which results are grouped.
    turns: texts of the user; programs use the first one.
  """

  question_id: int | str
  task: str
  turns: tuple[str, ...]


def read_prompts(path: pathlib.Path, limit: int | None = None) -> list[Prompt]:
  """Reads prompts.

  Args:
    path: each line is a JSON object with `question_id`, `task` (or
      `category`) and `turns`, a list of texts. Empty lines are skipped.
    limit: number of prompts to read, from the start; None is all.

  Raises:
    UserError: the file cannot be read or holds no prompt, or a line is not a
      prompt.
  """
  prompts: dict[int | str, Prompt] = {}
  for place, values in input_files.read_lines(path, 'prompts'):
    prompt = _parse(values, place)
    if prompt.question_id in prompts:
      raise errors.UserError(
        f'{place}: question_id {prompt.question_id!r} occurs twice'
      )
    prompts[prompt.question_id] = prompt
    if len(prompts) == limit:
      break
  if not prompts:
    raise errors.UserError(f'{path} holds no prompts')
  return list(prompts.values())


def of_each_task(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
  """Returns the first `count` prompts of each task, the tasks in turn."""
  tasks: dict[str, list[Prompt]] = {}
  for prompt in prompts:
    tasks.setdefault(prompt.task, []).append(prompt)
  turns = itertools.zip_longest(*(own[:count] for own in tasks.values()))
  return [prompt for turn in turns for prompt in turn if prompt is not None]


def _parse(values: dict[str, Any], place: str) -> Prompt:
  question_id = values.get('question_id')
  if isinstance(question_id, bool) or not isinstance(question_id, int | str):
    raise errors.UserError(
      f"{place}: 'question_id' must be a text or a whole number, got "
      f'{_short(question_id)}'
    )
  task = values.get('task', values.get('category'))
  if not isinstance(task, str) or not task:
    raise errors.UserError(
      f"{place}: 'task' (or 'category') must be a text, got {_short(task)}"
    )
  turns = values.get('turns')
  if (
    not isinstance(turns, list)
    or not turns
    or not all(isinstance(turn, str) and turn for turn in turns)
  ):
    raise errors.UserError(
      f"{place}: 'turns' must be a list of one or more texts, got "
      f'{_short(turns)}'
    )
  return Prompt(question_id=question_id, task=task, turns=tuple(turns))


def _short(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 60 else f'{text[:57]}...'
