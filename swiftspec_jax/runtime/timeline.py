"""When each program of a round ran, found without making the host wait.

One thread for each device track waits for a small output of every program and
notes when it is there. A program started when it was dispatched, its inputs
were there and the one before it on the same devices had ended, whichever was
last. So times are those of outputs seen from the host: exact to the wake-up of
a thread, and without a profiler, on every platform.
"""

import collections
import dataclasses
import json
import queue
import statistics
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax

TARGET, DRAFT, TRANSFER, HOST = 'target', 'draft', 'transfer', 'host'
TRACKS = (TARGET, DRAFT, TRANSFER, HOST)


@dataclasses.dataclass(eq=False)
class Span:
  """A program or a section of host code; times in seconds."""

  track: str
  name: str
  round_index: int
  dispatched: float
  after: 'Span | None' = None  # the program on another track that it needs
  end: float = float('nan')  # until it has ended
  start: float = float('nan')
  count: jax.Array | None = None  # i32[] forwards, of programs that tell


class Timeline:
  """Notes when programs ran; owns the threads that wait for them."""

  def __init__(self):
    self._spans: list[Span] = []
    self._latest: dict[str, Span] = {}
    self._round_index = 0
    self._queues = {name: queue.SimpleQueue() for name in TRACKS[:-1]}
    for waiting in self._queues.values():
      threading.Thread(target=_watch, args=(waiting,), daemon=True).start()
    # The threads hold the queues alone, so that they end with the timeline.
    weakref.finalize(self, _stop, tuple(self._queues.values()))

  def start_round(self) -> None:
    """Begins the next round: what is noted from now on belongs to it."""
    self._round_index += 1

  def program(
    self,
    track: str,
    name: str,
    dispatched: float,
    marker: jax.Array,
    after: str | None = None,
  ) -> None:
    """Notes a program that was dispatched.

    Args:
      track: `TARGET`, `DRAFT` or `TRANSFER`.
      name: name of the program.
      dispatched: `time.perf_counter()` before the dispatch.
      marker: an output that is not donated to a later program.
      after: name of the program whose latest output it takes, if that ran on
        another track.
    """
    before = None if after is None else self._latest.get(after)
    span = Span(track, name, self._round_index, dispatched, before)
    if marker.ndim == 0:
      span.count = marker
    self._latest[name] = span
    self._spans.append(span)
    self._queues[track].put((span, marker))

  def host(self, name: str, start: float, end: float) -> None:
    """Notes a section of host code."""
    span = Span(HOST, name, self._round_index, start)
    span.start, span.end = start, end
    self._spans.append(span)

  def finish(self) -> list[Span]:
    """Waits for everything noted so far; returns it in order of dispatch."""
    for waiting in self._queues.values():
      done = threading.Event()
      waiting.put((done, None))
      done.wait()
    # What another program needed had ended before it; its thread woke late.
    for span in reversed(self._spans):
      if span.after is not None:
        span.after.end = min(span.after.end, span.end)
    last_ends: dict[str, float] = collections.defaultdict(float)
    for span in self._spans:
      if span.track != HOST:
        given = span.after.end if span.after else span.dispatched
        start = max(span.dispatched, last_ends[span.track], given)
        span.start = min(start, span.end)
        last_ends[span.track] = span.end
    return list(self._spans)


def _watch(waiting: queue.SimpleQueue) -> None:
  while (noted := waiting.get()) is not None:
    item, marker = noted
    if isinstance(item, threading.Event):
      item.set()
      continue
    jax.block_until_ready(marker)
    item.end = time.perf_counter()


def _stop(queues: Sequence[queue.SimpleQueue]) -> None:
  for waiting in queues:
    waiting.put(None)


def to_chrome_trace(spans: Sequence[Span]) -> str:
  """Returns JSON for chrome://tracing or ui.perfetto.dev."""
  origin = min((span.start for span in spans), default=0.0)
  names = [
    {
      'ph': 'M',
      'name': 'thread_name',
      'pid': 0,
      'tid': tid,
      'args': {'name': name},
    }
    for tid, name in enumerate(TRACKS)
  ]
  events = [
    {
      'ph': 'X',
      'name': span.name,
      'pid': 0,
      'tid': TRACKS.index(span.track),
      'ts': (span.start - origin) * 1e6,
      'dur': (span.end - span.start) * 1e6,
      'args': {'round': span.round_index},
    }
    for span in spans
  ]
  return json.dumps({'traceEvents': names + events, 'displayTimeUnit': 'ms'})


def summarize(spans: Sequence[Span]) -> Mapping[str, float]:
  """Returns figures of a round, from the first verification to the last.

  Seconds are those of a mean round, with two exceptions. `target_step_seconds`
  is the median of a target forward. `draft_step_seconds` is the mean of a draft
  forward between a proposal and the verdict on it.
  """
  verifications = [span for span in spans if span.name == 'verify']
  if len(verifications) < 2:
    return {}
  begin, end = verifications[0].start, verifications[-1].start
  num_rounds = len(verifications) - 1

  def busy(*tracks):
    pieces = [
      (max(span.start, begin), min(span.end, end))
      for span in spans
      if span.track in tracks and span.end > begin and span.start < end
    ]
    return _length(pieces) / num_rounds

  target, draft = busy(TARGET), busy(DRAFT)
  together = target + draft - busy(TARGET, DRAFT)
  host: dict[str, float] = collections.defaultdict(float)
  for span in spans:
    if span.track == HOST and begin <= span.start < end:
      host[span.name] += (span.end - span.start) / num_rounds
  round_seconds = (end - begin) / num_rounds
  growing = [
    (int(span.count), span.end - span.start)
    for span in spans
    if span.count is not None and begin <= span.start < end
  ]
  num_forwards = sum(count for count, _ in growing)
  growth_seconds = sum(seconds for _, seconds in growing)
  return {
    'num_rounds': num_rounds,
    'round_seconds': round_seconds,
    'target_busy_seconds': target,
    'draft_busy_seconds': draft,
    'target_idle_seconds': round_seconds - target,
    'overlap_seconds': together,
    'overlap_fraction': together / max(min(target, draft), 1e-12),
    'target_step_seconds': statistics.median(
      span.end - span.start for span in spans if span.name == 'verify'
    ),
    **(
      {
        'draft_step_seconds': growth_seconds / num_forwards,
        'growth_forwards': num_forwards / num_rounds,
      }
      if num_forwards
      else {}
    ),
    **{f'host_{name}_seconds': value for name, value in host.items()},
  }


def _length(pieces: Sequence[tuple[float, float]]) -> float:
  """Returns the length of the union of intervals."""
  total, reached = 0.0, float('-inf')
  for start, end in sorted(pieces):
    total += max(0.0, end - max(start, reached))
    reached = max(reached, end)
  return total


def table(summary: Mapping[str, Any]) -> str:
  """Returns the summary as lines of text, times in milliseconds."""
  lines = []
  for name, value in summary.items():
    if name.endswith('_seconds'):
      label = name.removesuffix('_seconds').replace('_', ' ')
      lines.append(f'{label:<24}{value * 1e3:>10.2f} ms')
    else:
      lines.append(f'{name.replace("_", " "):<24}{value:>10.2f}')
  return '\n'.join(lines)
