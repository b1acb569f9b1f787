"""Tasks over a document, openings of user turns, and sums, in many wordings."""

import dataclasses
import importlib.resources
import tomllib
from collections.abc import Sequence

import numpy as np

_WORDINGS = tomllib.loads(
  importlib.resources.files(__package__)
  .joinpath('wordings.toml')
  .read_text(encoding='utf-8')
)
LEAD_INS = _WORDINGS['lead_ins']
ADDENDA = _WORDINGS['addenda']
FOLLOW_UPS = _WORDINGS['follow_ups']
SYSTEM_PROMPTS = _WORDINGS['system_prompts']
# What a user turn begins with; the model goes on from there.
OPENINGS = _WORDINGS['openings']


@dataclasses.dataclass(frozen=True)
class Task:
  """One kind of task over a document.

  Attributes:
    kind: name, stored with the samples.
    weight: frequency, relative to the other kinds.
    limit: most tokens of an answer.
    wordings: texts of the instruction; {language}, {count} and {word} are
      filled in.
  """

  kind: str
  weight: float
  limit: int
  wordings: list[str]


TASKS = [Task(**values) for values in _WORDINGS['tasks']]


def fill(wording: str, rng: np.random.Generator, word: str) -> str:
  """Returns a wording with its placeholders filled in."""
  return (
    wording.replace('{language}', pick(rng, _WORDINGS['languages']))
    .replace('{topic}', pick(rng, _WORDINGS['topics']))
    .replace('{city}', pick(rng, _WORDINGS['cities']))
    .replace('{count}', str(rng.integers(2, 8)))
    .replace('{year}', str(rng.integers(1850, 2024)))
    .replace('{word}', word)
  )


def pick(rng: np.random.Generator, values: Sequence[str]) -> str:
  """Returns one of the values."""
  return values[rng.integers(len(values))]


def draw_task(rng: np.random.Generator) -> Task:
  """Returns a kind of task, by weight."""
  weights = np.array([task.weight for task in TASKS])
  return TASKS[rng.choice(len(TASKS), p=weights / weights.sum())]


def word_problem(rng: np.random.Generator) -> str:
  """Returns a sum in words with numbers drawn at random."""
  small, large = rng.integers(2, 13, 2), rng.integers(2, 100, 2)
  names = _WORDINGS['names']
  name, other = rng.choice(len(names), 2, replace=False)
  numbers = sorted(int(number) for number in (*large, small[0]))
  return pick(rng, _WORDINGS['sums']).format(
    name=names[name],
    other=names[other],
    things=pick(rng, _WORDINGS['things']),
    a=numbers[1],
    b=int(small[1]),
    c=numbers[1] + numbers[2] * int(rng.integers(1, 6)),
    d=numbers[0],
  )
