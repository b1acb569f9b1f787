"""The host loop: rows of a batch, dispatched ahead and read late.

`Decoder` owns what lives on the devices between steps. A step is dispatched
before the one before it has been read, so the devices never wait for Python;
a row that turns out to have ended is cut, and its surplus is never emitted.
"""

import collections
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from swiftspec_jax import buckets, errors, spec_step, types
from swiftspec_jax import sampling as sampling_lib
from swiftspec_jax import sharding as sharding_lib
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.cache import dense
from swiftspec_jax.config import SamplingParams
from swiftspec_jax.drafting import Drafter
from swiftspec_jax.drafting.draft_model import DraftModel
from swiftspec_jax.drafting.no_draft import NoDraft
from swiftspec_jax.model import Model
from swiftspec_jax.requests import Event, Request, Row


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
    self._num_tokens = drafter.num_speculative_tokens
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
      Row(i, request, self._check(request), self._target, self._num_tokens)
      for i, request in enumerate(requests)
    )
    return self._run(waiting) if waiting else iter(())

  def _run(self, waiting: collections.deque[Row]) -> Iterator[Event]:
    features = [row.request.sampling for row in waiting]
    self._prepare(max(row.limit for row in waiting), features)
    rows: list[Row | None] = [None] * self._batch_size
    in_flight = collections.deque()
    try:
      while waiting or any(rows):
        for slot in range(self._batch_size):
          if rows[slot] is None and waiting:
            rows[slot] = waiting.popleft()
            self._admit(rows[slot], slot, features, self._plan(rows[slot]))
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
    capacity = buckets.SMALLEST
    while capacity < limit:
      self._warmup_capacity(capacity, sampling)
      capacity *= 2
    self._warmup_capacity(limit, sampling)

  def _warmup_capacity(self, limit: int, sampling: SamplingParams) -> None:
    """Runs every program of the cache that requests of `limit` tokens get."""
    self._prepare(limit, [sampling])
    chunks = {}  # one for each program
    for length in range(1, limit):
      for chunk in buckets.plan_prefill(length - 1, self._capacity):
        start, size, _ = chunk
        context = buckets.context_of(start + size, self._capacity)
        chunks.setdefault((size, context), chunk)
    request = Request(token_ids=(0,), sampling=sampling)
    row = Row(0, request, limit, self._target, self._num_tokens)
    self._admit(row, 0, [sampling], chunks.values())
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
    num_scratch = self._num_tokens + 2
    capacity = buckets.power_of_two(limit) + math.ceil(num_scratch / 8) * 8
    states = (self._state, self._row_state)
    # Ctrl-C may have come between a donation and the new state.
    is_lost = any(x.is_deleted() for x in jax.tree.leaves(states))
    if capacity != self._capacity or is_lost:
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

  def _plan(self, row: Row) -> list[buckets.Chunk]:
    # The last token of the prompt is the root of the first step.
    num_tokens = len(row.request.token_ids) - 1
    return buckets.plan_prefill(num_tokens, self._capacity)

  def _admit(
    self,
    row: Row,
    slot: int,
    features: Sequence[SamplingParams],
    chunks: Iterable[buckets.Chunk],
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
        context=buckets.context_of(start + size, self._capacity),
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


def _read(
  output: types.StepOutput, rows: Sequence[Row | None]
) -> Iterator[Event]:
  """Waits for a step and hands each row its part."""
  packed, logprobs = jax.device_get((output.packed, output.logprobs))
  for slot, row in enumerate(rows):
    if row is None or row.is_finished:
      continue
    event = row.push(packed[slot], None if logprobs is None else logprobs[slot])
    if event is not None:
      yield event
