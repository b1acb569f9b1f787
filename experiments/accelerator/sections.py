"""The sections of the report, in order of value."""

import dataclasses
import importlib
import pathlib
from collections.abc import Callable, Mapping, Sequence

import jax

from experiments.accelerator.rows import Row
from experiments.flags import run_flags


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What all sections are told.

  Attributes:
    directory: folder of the report.
    model: path or name of SmolLM2-135M; None is the built-in one, if it is in
      the cache.
    tiny: the smallest sizes; None is only on CPUs.
  """

  directory: pathlib.Path
  model: str | None = None
  tiny: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """A measurement that stands or falls alone.

  Attributes:
    name: name of its first row.
    shape: shape of its first row.
    run: measures; rows without a name or a shape get those of the job.
    limit: seconds after which it counts as hanging.
    is_baseline: it is of a library, which may not do the shape.
  """

  name: str
  shape: str = ''
  run: Callable[[], Sequence[Row]]
  limit: float = 90.0
  is_baseline: bool = False

  @property
  def key(self) -> tuple[str, str]:
    """As that of its first row."""
    return self.name, self.shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
  """A part of the report.

  Attributes:
    name: name for flags and rows.
    title: title on the page.
    seconds: after which it begins no other job, and the next section has its
      turn.
    note: text on the page: what the columns mean.
    module: has `jobs(settings)`, a list of `Job`, the most valuable first. It
      is imported by the child only. Default: that of the name in `jobs`.
  """

  name: str
  title: str
  seconds: float
  note: str
  module: str | None = None

  def jobs(self, settings: Settings) -> list[Job]:
    """Returns what is to be measured; asks JAX for its devices."""
    if settings.tiny is None:
      is_cpu = jax.default_backend() == 'cpu'
      settings = dataclasses.replace(settings, tiny=is_cpu)
    module = self.module or f'{__package__}.jobs.{self.name}_jobs'
    return importlib.import_module(module).jobs(settings)


SECTIONS = (
  Section(
    name='first',
    title='First minutes: kernels that are wrong, or not deterministic',
    seconds=200,
    note='The greatest difference from the reference as a share of its '
    'greatest number. odd_runs of 100 gave other bits than the first: a race. '
    'Seconds of a call by the clock of the device.',
  ),
  Section(
    name='device',
    title='Device: versions, memory, products',
    seconds=60,
    note='Seconds of one copy, read or product by the clock of the device. All '
    'shares below are of the read.',
  ),
  Section(
    name='correctness',
    title='Kernels against their references',
    seconds=120,
    note='The greatest difference as a share of the greatest number of the '
    'reference; "differs" is beyond what the order of sums explains.',
  ),
  Section(
    name='kernels',
    title='Times of kernels, XLA and libraries',
    seconds=120,
    note='Seconds of a call by the clock of the device; the reference is plain '
    'JAX at the same shape. loop_seconds are those of a call in one program of '
    'many, gaps included.',
  ),
  Section(
    name='tiles',
    title='Tiles of kernels',
    seconds=90,
    note='Seconds with the best tiles, beside those with the defaults. '
    'tiles.json has the tiles.',
  ),
  Section(
    name='small',
    title='SmolLM2-135M',
    seconds=90,
    note='Seconds of a token; the reference is plain decoding without kernels.',
  ),
  Section(
    name='large',
    title='Shapes of Llama 8B and 1B, random weights',
    seconds=240,
    note='Seconds of a step, of a draft forward, or with forced acceptance of '
    'a token; the reference is a plain step of the same weights. The share is '
    'that of the weights alone. busy_seconds are those of the device.',
  ),
  Section(
    name='engine',
    title='Serving engine',
    seconds=240,
    note='Steps: seconds as measured and fitted; the reference is a plain step '
    'of as many rows. Load: seconds per token and request; the reference is no '
    'speculation at the same rate.',
  ),
)


def choose(names: Sequence[str]) -> list[Section]:
  """Returns the sections of these names in their order, all if none is given.

  Raises:
    UserError: a name is unknown.
  """
  known = [section.name for section in SECTIONS]
  run_flags.check_names('sections', names, known)
  return [section for section in SECTIONS if section.name in names or not names]


def plan(
  chosen: Sequence[Section], spent: Mapping[str, float]
) -> list[tuple[Section, float]]:
  """Returns sections and their seconds for a call.

  Those that have not had their time yet come first, then all for as long as
  there is time.

  Args:
    chosen: sections in order of value.
    spent: seconds that former calls gave to each section.
  """
  first = [
    (section, rest)
    for section in chosen
    if (rest := section.seconds - spent.get(section.name, 0.0)) > 0
  ]
  return [*first, *((section, float('inf')) for section in chosen)]
