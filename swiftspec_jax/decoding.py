"""The host loop: rows of a batch, dispatched ahead and read late.

`Decoder` owns what lives on the devices between steps. A step is dispatched
before the one before it has been read, so the devices never wait for Python;
a row that turns out to have ended is cut, and its surplus is never emitted.
"""

import collections
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from swiftspec_jax import errors, results, spec_step, types
from swiftspec_jax import sampling as sampling_lib
from swiftspec_jax import sharding as sharding_lib
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.cache import dense
from swiftspec_jax.config import SamplingParams
from swiftspec_jax.drafting import Drafter
from swiftspec_jax.drafting.draft_model import DraftModel
from swiftspec_jax.drafting.no_draft import NoDraft
from swiftspec_jax.model import Model

# Cache capacities that are compiled for: powers of two from here on.
_SMALLEST_CAPACITY = 256
_CHUNK_SIZES = (32, 128, 512)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """One prompt, as token ids, and how to continue it."""

  token_ids: tuple[int, ...]
  sampling: SamplingParams = SamplingParams()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
  """News of one request: text that is certain, and at its end the result."""

  index: int  # of the request in the list that was given
  text: str
  result: results.GenerationResult | None = None


class Decoder:
  """Decodes requests with one target, one drafter and `batch_size` rows."""

  def __init__(
    self,
    target: Model,
    draft: Model | Drafter | None = None,
    *,
    num_speculative_tokens: int | None = None,
    batch_size: int = 1,
    run_ahead: int = 1,
  ):
    """Checks that the parts fit; compiles and allocates nothing yet.

    Args:
      target: defines the output.
      draft: how to speculate: a model that drafts a chain, a drafter such as
        `PromptLookup()`, or None for plain decoding.
      num_speculative_tokens: K of a draft model; a drafter has its own.
      batch_size: B, rows that decode together.
      run_ahead: steps that are dispatched before one is read; 0 waits for
        each.

    Raises:
      UserError: the draft has another vocabulary or other devices, or a count
        is out of range.
    """
    for name, value, least in (
      ('batch_size', batch_size, 1),
      ('run_ahead', run_ahead, 0),
    ):
      if value < least:
        raise errors.UserError(f'{name} must be at least {least}, got {value}')
    drafter = _drafter(target, draft, num_speculative_tokens)
    window = target.config.sliding_window
    if window is not None and window <= drafter.num_speculative_tokens:
      raise errors.UserError(
        f'num_speculative_tokens={drafter.num_speculative_tokens} must be '
        f"less than the target's sliding window of {window}"
      )
    self._target = target
    self._drafter = drafter
    self._draft_params = draft.params if isinstance(draft, Model) else None
    self._batch_size = batch_size
    self._run_ahead = run_ahead
    self._capacity = 0
    self._state: types.DecodeState | None = None
    self._row_state: types.DecodeState | None = None

  def run(self, requests: Sequence[Request]) -> Iterator[Event]:
    """Decodes requests; yields news of each as it becomes certain.

    Closing the iterator early stops the decoding.

    Raises:
      UserError: an empty prompt, a prompt that leaves no room in the
        context, or a token id outside the vocabulary; at the call, not at
        the first event.
    """
    waiting = collections.deque(
      _Row(i, request, self._check(request), self._target, self._drafter)
      for i, request in enumerate(requests)
    )
    return self._run(waiting) if waiting else iter(())

  def _run(self, waiting: collections.deque['_Row']) -> Iterator[Event]:
    features = [row.request.sampling for row in waiting]
    self._prepare(max(row.limit for row in waiting), features)
    rows: list[_Row | None] = [None] * self._batch_size
    in_flight = collections.deque()
    try:
      while waiting or any(rows):
        for slot in range(self._batch_size):
          if rows[slot] is None and waiting:
            rows[slot] = waiting.popleft()
            self._admit(rows[slot], slot, features)
        in_flight.append((self.dispatch(), tuple(rows)))
        if len(in_flight) > self._run_ahead:
          yield from _read(*in_flight.popleft())
          rows = [row if row and not row.is_finished else None for row in rows]
    finally:
      # The surplus must not delay whoever comes next.
      jax.block_until_ready([output for output, _ in in_flight])

  def dispatch(self) -> types.StepOutput:
    """Enqueues one step for the rows at hand; does not wait for its output.

    `run` does this; alone it is for measuring steps without the host loop.
    """
    self._state, output = spec_step.decode_step(
      self._target.params,
      self._draft_params,
      self._state,
      config=self._target.config,
      drafter=self._drafter,
    )
    return output

  def warmup(
    self,
    max_total_tokens: int,
    sampling: SamplingParams = SamplingParams(),
  ) -> None:
    """Compiles all that requests of up to so many tokens can need.

    Args:
      max_total_tokens: prompt and output together.
      sampling: stands for the features that requests will use.
    """
    limit = min(max_total_tokens, self._target.config.max_context)
    capacity = _SMALLEST_CAPACITY
    while True:
      self._warmup_capacity(min(capacity, limit), sampling)
      if capacity >= limit:
        return
      capacity *= 2

  def _warmup_capacity(self, limit: int, sampling: SamplingParams) -> None:
    """Runs every program of the cache that requests of `limit` tokens get."""
    self._prepare(limit, [sampling])
    seen = set()
    for length in range(1, limit):
      programs = {
        (size, _context(start + size, self._capacity))
        for start, size, _ in plan_prefill(length - 1, self._capacity)
      }
      if length > 1 and programs <= seen:
        continue
      seen |= programs
      request = Request(token_ids=(0,) * length, sampling=sampling)
      row = _Row(0, request, limit, self._target, self._drafter)
      self._admit(row, 0, [sampling])
      jax.block_until_ready(self.dispatch())

  def _check(self, request: Request) -> int:
    """Returns the length at which the request must end."""
    max_context = self._target.config.max_context
    length = len(request.token_ids)
    if length == 0:
      raise errors.UserError('the prompt is empty; give at least one token')
    if length >= max_context:
      raise errors.UserError(
        f'the prompt has {length} tokens; {self._target.name} takes at most '
        f'{max_context} tokens, prompt and output together'
      )
    request.sampling.check_vocabulary(self._target.config.vocab_size)
    max_new_tokens = request.sampling.max_new_tokens or max_context
    return min(length + max_new_tokens, max_context)

  def _prepare(self, limit: int, features: Sequence[SamplingParams]) -> None:
    """Makes the states, unless those of the last call will do."""
    capacity = _SMALLEST_CAPACITY
    while capacity < limit:
      capacity *= 2
    num_scratch = self._drafter.num_speculative_tokens + 2
    capacity += math.ceil(num_scratch / 8) * 8
    if capacity != self._capacity:
      self._capacity = capacity
      self._state = self._row_state = None  # free them first
      self._state = self._init_state(self._batch_size)
      self._row_state = self._init_state(1)
    idle = [SamplingParams()] * self._batch_size
    self._state = self._state.replace(
      max_lengths=self._on_mesh(np.zeros(self._batch_size, np.int32)),
      sampling=self._sampling(idle, features),
    )

  def _init_state(self, batch_size: int) -> types.DecodeState:
    config, mesh = self._target.config, self._target.mesh
    cache = dense.KVCacheConfig.of_model(
      config, batch_size, self._capacity, self._target.dtype
    )

    def zeros(*shape):
      return self._on_mesh(np.zeros(shape, np.int32))

    return types.DecodeState(
      token_ids=zeros(batch_size, self._capacity),
      lengths=zeros(batch_size),
      prompt_lengths=zeros(batch_size),
      max_lengths=zeros(batch_size),
      target_cache=cache.init(mesh),
      draft_state=self._drafter.init(batch_size, self._capacity, mesh),
      sampling=self._sampling([SamplingParams()] * batch_size, ()),
    )

  def _on_mesh(self, tree: Any) -> Any:
    return jax.device_put(tree, sharding_lib.replicated(self._target.mesh))

  def _sampling(self, batch, features) -> sampling_lib.SamplingState:
    vocab_size = self._target.config.vocab_size
    return self._on_mesh(sampling_lib.make_state(batch, vocab_size, features))

  def _admit(
    self, row: '_Row', slot: int, features: Sequence[SamplingParams]
  ) -> None:
    """Prefills a request on its own and puts it into a row of the batch."""
    row.start()
    prompt = np.asarray(row.request.token_ids, np.int32)
    token_ids = np.zeros((1, self._capacity), np.int32)
    token_ids[0, : len(prompt)] = prompt
    counts = {
      'lengths': len(prompt),
      'prompt_lengths': len(prompt),
      'max_lengths': row.limit,
    }
    counts = {k: np.full(1, v, np.int32) for k, v in counts.items()}
    state = self._row_state.replace(
      sampling=self._sampling([row.request.sampling], features),
      **self._on_mesh({'token_ids': token_ids, **counts}),
    )
    # The last token of the prompt is the root of the first step.
    chunks = plan_prefill(len(prompt) - 1, self._capacity)
    state = state.replace(
      target_cache=state.target_cache.replace(
        kv_lengths=self._on_mesh(np.zeros(1, np.int32))
      )
    )
    for start, size, num_kept in chunks:
      state = spec_step.prefill_chunk(
        self._target.params,
        self._draft_params,
        state,
        self._on_mesh(np.full(1, start, np.int32)),
        self._on_mesh(np.full(1, num_kept, np.int32)),
        config=self._target.config,
        drafter=self._drafter,
        chunk_size=size,
        context=_context(start + size, self._capacity),
      )
    self._state = spec_step.insert_row(
      self._state, state, self._on_mesh(np.int32(slot))
    )
    self._row_state = state
    jax.block_until_ready(self._state)
    row.end_prefill()


def _drafter(
  target: Model,
  draft: Model | Drafter | None,
  num_speculative_tokens: int | None,
) -> Drafter:
  """Returns the drafter that `draft` stands for."""
  if not isinstance(draft, Model):
    if num_speculative_tokens is not None:
      raise errors.UserError(
        f'num_speculative_tokens={num_speculative_tokens} is for a draft '
        'model; other drafters have it as a field of their own'
      )
    return NoDraft() if draft is None else draft
  tokenizer_lib.check_same_vocabulary(
    target.name, target.tokenizer, draft.name, draft.tokenizer
  )
  if draft.mesh != target.mesh:
    raise errors.UserError(
      f'{draft.name} lies on other devices than {target.name}; load both with '
      'the same `devices`'
    )
  return DraftModel(
    config=draft.config,
    dtype_name=draft.dtype.name,
    num_speculative_tokens=(
      4 if num_speculative_tokens is None else num_speculative_tokens
    ),
  )


def plan_prefill(num_tokens: int, capacity: int) -> list[tuple[int, int, int]]:
  """Splits a prompt into chunks of the compiled sizes.

  Args:
    num_tokens: to take in.
    capacity: rows of the cache; no chunk reaches beyond them.

  Returns:
    For each chunk its first position, its size, and how many tokens are in
    the cache after it. The last chunk may begin earlier than the one before
    it ended, or be longer than what is left: surplus rows become scratch.
  """
  sizes = [size for size in _CHUNK_SIZES if size <= capacity]
  chunks, done = [], 0
  while done < num_tokens:
    left = num_tokens - done
    # One padded chunk, if at least half of it is used; else a full one.
    size = next((s for s in sizes if left <= s <= 2 * left), None)
    size = size or max([s for s in sizes if s <= left], default=sizes[0])
    start = min(done, capacity - size)
    done = min(start + size, num_tokens)
    chunks.append((start, size, done))
  return chunks


def _context(size: int, capacity: int) -> int:
  """The smallest compiled context that holds `size` rows."""
  context = _SMALLEST_CAPACITY
  while context < size:
    context *= 2
  return min(context, capacity)


class _Row:
  """What the host knows of one request."""

  def __init__(
    self,
    index: int,
    request: Request,
    limit: int,
    target: Model,
    drafter: Drafter,
  ):
    self.request = request
    self.limit = limit
    self.is_finished = False
    self._index = index
    self._eos_token_ids = (
      () if request.sampling.ignore_eos else target.config.eos_token_ids
    )
    self._stream = tokenizer_lib.TextStream(
      target.tokenizer, request.sampling.stop
    )
    self._token_ids: list[int] = []
    self._logprobs: list[float] = []
    num_tokens = drafter.num_speculative_tokens
    self._num_rounds = 0
    self._drafted = np.zeros(num_tokens, int)
    self._accepted = np.zeros(num_tokens, int)

  def start(self) -> None:
    self._start_time = time.perf_counter()

  def end_prefill(self) -> None:
    self._decode_time = time.perf_counter()

  def push(
    self, packed: np.ndarray, logprobs: np.ndarray | None
  ) -> Event | None:
    """Takes one step's output; returns news, if there are any."""
    num_emitted, num_drafted, num_accepted = packed[:3]
    if not self._token_ids:
      self._first_token_time = time.perf_counter()
    self._num_rounds += 1
    self._drafted[:num_drafted] += 1
    self._accepted[:num_accepted] += 1
    token_ids = packed[3 : 3 + num_emitted].tolist()
    finish_reason = None
    for i, token_id in enumerate(token_ids):
      if token_id in self._eos_token_ids:
        finish_reason, token_ids = 'stop', token_ids[: i + 1]
        break
    text = self._stream.push(token_ids)
    if self._stream.stopped is not None:
      finish_reason = 'stop'
      token_ids = token_ids[: self._stream.num_tokens - len(self._token_ids)]
    self._token_ids += token_ids
    if logprobs is not None:
      self._logprobs += logprobs[: len(token_ids)].tolist()
    num_known = len(self.request.token_ids) + len(self._token_ids)
    if finish_reason is None and num_known >= self.limit:
      finish_reason = 'length'
    if finish_reason is None:
      return Event(index=self._index, text=text) if text else None
    self.is_finished = True
    text += self._stream.finish()
    return Event(
      index=self._index, text=text, result=self._result(finish_reason)
    )

  def _result(self, finish_reason: str) -> results.GenerationResult:
    stats = results.GenerationStats(
      prompt_tokens=len(self.request.token_ids),
      new_tokens=len(self._token_ids),
      num_rounds=self._num_rounds,
      num_drafted=int(self._drafted.sum()),
      num_accepted=int(self._accepted.sum()),
      drafted_per_position=tuple(self._drafted.tolist()),
      accepted_per_position=tuple(self._accepted.tolist()),
      ttft_seconds=self._first_token_time - self._start_time,
      decode_seconds=time.perf_counter() - self._decode_time,
    )
    return results.GenerationResult(
      text=self._stream.text,
      token_ids=tuple(self._token_ids),
      finish_reason=finish_reason,
      logprobs=(
        tuple(self._logprobs) if self.request.sampling.logprobs else None
      ),
      stats=stats,
    )


def _read(
  output: types.StepOutput, rows: Sequence[_Row | None]
) -> Iterator[Event]:
  """Waits for a step and hands each row its part."""
  packed, logprobs = jax.device_get((output.packed, output.logprobs))
  for slot, row in enumerate(rows):
    if row is None or row.is_finished:
      continue
    event = row.push(packed[slot], None if logprobs is None else logprobs[slot])
    if event is not None:
      yield event
