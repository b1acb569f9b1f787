"""What --trace_dir gets: when each program of a request ran."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import swiftspec_jax as ss
from swiftspec_jax.cli import output_files
from swiftspec_jax.runtime import timeline as timeline_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
  """One traced request: its output, spans and figures."""

  result: ss.GenerationResult
  spans: list[timeline_lib.Span]
  summary: dict[str, Any]


def trace(
  timeline: ss.Timeline, decode: Callable[[], ss.GenerationResult]
) -> Trace:
  """Runs `decode` and returns its part of the timeline.

  Args:
    timeline: timeline of the decoder that `decode` uses.
    decode: decodes one request with a token tree.
  """
  num_before = len(timeline.finish())
  result = decode()
  spans = timeline.finish()[num_before:]
  stats = result.stats
  num_forwards = stats.num_draft_forwards / max(stats.num_rounds, 1)
  summary = {
    **timeline_lib.summarize(spans),
    'acceptance_length': stats.acceptance_length,
    'hit_rate': stats.hit_rate,
    'late_hit_rate': stats.late_hit_rate,
    'miss_rate': stats.miss_rate,
    'draft_forwards_waited_for': num_forwards,
  }
  if 'draft_busy_seconds' in summary and num_forwards:
    # In mode serial there are no others.
    seconds = summary['draft_busy_seconds'] / num_forwards
    summary.setdefault('draft_step_seconds', seconds)
  return Trace(result=result, spans=spans, summary=summary)


def write(directory: pathlib.Path, traced: Trace) -> None:
  """Writes timeline.json (for ui.perfetto.dev) and timeline_summary.json."""
  output_files.write(
    directory / 'timeline.json',
    timeline_lib.to_chrome_trace(traced.spans).encode(),
  )
  output_files.write_json(directory / 'timeline_summary.json', traced.summary)
