"""The record of a training run: JSON lines, a picture, a table."""

import pathlib
from collections.abc import Mapping
from typing import Any

from swiftspec_jax.cli import output_files
from swiftspec_jax.runtime import sharding

_METRICS = 'metrics.jsonl'
_PICTURE = 'training.png'
_COLUMNS = ('num_tokens', 'agreement', 'acceptance', 'chain_acceptance_length')


class TrainingLog:
  """Lines of a run; those after the step it goes on from are dropped.

  Of processes that train together, the first one writes.
  """

  def __init__(self, directory: pathlib.Path, step: int):
    self._path = directory / _METRICS
    self._picture = directory / _PICTURE
    lines = output_files.read_lines(self._path)
    kept = [line for line in lines if line['step'] <= step]
    # The first evaluation is repeated when nothing else was done.
    kept = kept if step else []
    if sharding.is_first_process():
      output_files.write_lines(self._path, kept)

  def add(self, step: int, **values: Any) -> None:
    """Appends a line.

    Raises:
      UserError: it cannot be written.
    """
    if sharding.is_first_process():
      output_files.append_line(self._path, {'step': step, **values})

  def draw(self) -> None:
    """Writes the picture of loss and acceptance; not without matplotlib."""
    if not sharding.is_first_process():
      return
    try:
      from swiftspec_jax.cli import plots
    except ImportError:
      return
    lines = output_files.read_lines(self._path)
    steps = [line for line in lines if 'training' in line]
    evaluations = [line for line in lines if 'held_out' in line]
    figure, (loss, agreement, chain) = plots.make_figure(
      8, 8, num_rows=3, sharex=True
    )
    x = [line['step'] for line in steps]
    loss.plot(x, [line['training']['loss'] for line in steps], linewidth=0.8)
    loss.set_ylabel('loss')
    agreement.plot(
      x,
      [line['training']['agreement'] for line in steps],
      linewidth=0.8,
      label='training',
    )
    x = [line['step'] for line in evaluations]
    held_out = [line['held_out'] for line in evaluations]
    for kind in sorted({kind for figures in held_out for kind in figures}):
      is_all = kind == 'all'
      for axes, key in (
        (agreement, 'agreement'),
        (chain, 'chain_acceptance_length'),
      ):
        axes.plot(
          x,
          [figures.get(kind, {}).get(key) for figures in held_out],
          linewidth=2 if is_all else 0.8,
          color='black' if is_all else None,
          label=f'held out, {kind}',
        )
    agreement.set_ylabel("agreement with the\ntarget's best token")
    chain.set_ylabel('acceptance length,\nchain of 4')
    chain.set_xlabel('step')
    chain.legend(fontsize='x-small', ncols=3)
    output_files.write(self._picture, plots.png(figure))


def table(figures: Mapping[str, Mapping[str, float]]) -> str:
  """Returns the held-out figures as text, a line for each kind."""
  width = max(len(name) for name in _COLUMNS)
  lines = [' ' * 10 + ''.join(f'{name:>{width + 2}}' for name in _COLUMNS)]
  for kind, values in figures.items():
    cells = [
      f'{values[name]:>{width + 2},}'
      if name == 'num_tokens'
      else f'{values[name]:>{width + 2}.3f}'
      for name in _COLUMNS
    ]
    lines.append(f'{kind:10}' + ''.join(cells))
  return '\n'.join(lines)
