"""From what the rows wrote to samples: cuts, filters, and the stored form."""

import collections
import dataclasses
import enum
import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from swiftspec_jax.distillation.writing import rollout, scripts, top_tokens

KINDS = (
  'chat',
  'math',
  'own',
  'summarize',
  'translate',
  'answer',
  'extract',
  'rewrite',
  'continue',
  'code',
)
_MIN_ANSWER = 3
_MIN_TURN = 3
_LONGEST_PERIOD = 48
_MIN_REPEATED = 64  # tokens that repeat what stands before them
HELD_OUT_SHARE = 1 / 40


class Role(enum.IntEnum):
  """Who wrote a token."""

  GIVEN = 0
  USER = 1  # the target in the role of the user
  ANSWER = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
  """One branch: what follows a prefix.

  n tokens; the distribution at a token is that of the token after it. The
  features at a token are outputs of the target's layers there, side by side.
  """

  kind: str
  temperature: float  # of the first answer
  token_ids: np.ndarray  # i32[n]
  roles: np.ndarray  # u8[n]
  top_token_ids: np.ndarray  # i32[n, K]
  top_log_probs: np.ndarray  # f32[n, K]
  features: np.ndarray | None = None  # f16[n, H]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
  """A prefix of p tokens and the samples that go on from it."""

  has_document: bool
  token_ids: np.ndarray  # i32[p]
  top_token_ids: np.ndarray  # i32[p, K]
  top_log_probs: np.ndarray  # f32[p, K]
  samples: tuple[Sample, ...]
  features: np.ndarray | None = None  # f16[p, H]

  @property
  def num_tokens(self) -> int:
    return len(self.token_ids) + sum(len(s.token_ids) for s in self.samples)


def answer_tokens(groups: Iterable[Group]) -> collections.Counter[str]:
  """Returns how many tokens the target wrote as itself, by kind."""
  counts: collections.Counter[str] = collections.Counter()
  for group in groups:
    for sample in group.samples:
      counts[sample.kind] += int((sample.roles == Role.ANSWER).sum())
  return counts


def harvest(
  plans: Sequence[scripts.Plan],
  prefix_top: top_tokens.TopTokens,
  prefix_features: np.ndarray | None,
  written: rollout.Rollout,
) -> list[Group]:
  """Returns the usable samples of a batch.

  Args:
    plans: plans of the prefixes.
    prefix_top: host arrays [F, P, K].
    prefix_features: f16[F, P, H].
    written: text of the rows, in the plans' order.
  """
  groups, row = [], 0
  for i, plan in enumerate(plans):
    found = []
    for branches in plan.rows:
      found += _samples_of_row(branches, written, row)
      row += 1
    size = len(plan.prefix)
    if found:
      groups.append(
        Group(
          has_document=plan.has_document,
          token_ids=np.asarray(plan.prefix, np.int32),
          top_token_ids=prefix_top.token_ids[i, :size],
          top_log_probs=prefix_top.log_probs[i, :size],
          samples=tuple(found),
          features=None
          if prefix_features is None
          else prefix_features[i, :size],
        )
      )
  return groups


def _samples_of_row(
  branches: Sequence[scripts.Branch], written: rollout.Rollout, row: int
) -> Iterator[Sample]:
  op_index = written.op_index[row]
  start = 0
  for branch in branches:
    ops = branch.ops()
    places = np.flatnonzero((op_index >= start) & (op_index < start + len(ops)))
    sample = _sample(branch, ops, written, row, places, start)
    if sample is not None:
      yield sample
    start += len(ops)


def _sample(branch, ops, written, row, places, start) -> Sample | None:
  """Cuts a branch where it goes wrong; None if nothing is left of it."""
  token_ids = written.token_ids[row, places]
  op_index = written.op_index[row, places] - start
  roles = np.array([_role_of(ops[op]) for op in op_index], np.uint8)
  size = _usable_size(token_ids, roles, op_index, ops)
  answers = roles[:size] == Role.ANSWER
  if answers.sum() < _MIN_ANSWER:
    return None
  first_answer = ops[op_index[np.argmax(answers)]]
  places = places[:size]
  return Sample(
    kind=branch.kind,
    temperature=first_answer.temperature,
    token_ids=token_ids[:size],
    roles=roles[:size],
    top_token_ids=written.top.token_ids[row, places],
    top_log_probs=written.top.log_probs[row, places],
    features=None
    if written.features is None
    else written.features[row, places],
  )


def _role_of(op: int | scripts.Passage) -> Role:
  if not isinstance(op, scripts.Passage):
    return Role.GIVEN
  return Role.ANSWER if op.is_answer else Role.USER


def _usable_size(token_ids, roles, op_index, ops) -> int:
  """Returns how many tokens of a branch to keep."""
  ends = np.flatnonzero(np.diff(op_index, append=-1))
  begin = 0
  for end in ends:
    role, passage = roles[end], token_ids[begin : end + 1]
    if role != Role.GIVEN:
      is_last_written = end == len(token_ids) - 1
      # It stopped by itself, unless it reached its limit or the row its end.
      was_cut = is_last_written or len(passage) >= ops[op_index[end]].limit
      loop = loop_start(passage)
      if role == Role.USER and (
        was_cut or loop is not None or len(passage) < _MIN_TURN
      ):
        return begin
      if role == Role.ANSWER and loop is not None:
        return begin + loop
      if role == Role.ANSWER and was_cut:
        return int(end) + 1
    begin = int(end) + 1
  return begin


def loop_start(token_ids: np.ndarray) -> int | None:
  """Returns where a text begins only to repeat itself, up to its end.

  The first repetition still counts as text.

  Args:
    token_ids: i32[n].
  """
  size = len(token_ids)
  for period in range(1, _LONGEST_PERIOD + 1):
    if size < period + _MIN_REPEATED:
      break
    is_same = token_ids[period:] == token_ids[:-period]
    if not is_same[-_MIN_REPEATED:].all():
      continue
    others = np.flatnonzero(~is_same)
    first = int(others[-1]) + 1 if len(others) else 0
    return min(first + 2 * period, size)
  return None


def prompt_hash(group: Group, sample: Sample) -> int:
  """Returns 63 bits that depend on all before the first answer."""
  first = int(np.argmax(sample.roles == Role.ANSWER))
  return _hash(group.token_ids, sample.token_ids[:first])


def lot(group: Group, sample: Sample) -> float:
  """Returns a number from 0 to 1; samples with low ones are for evaluation.

  What is asked about one document has one number, so it is either all for
  training or all for evaluation.
  """
  if group.has_document:
    number = _hash(group.token_ids)
  else:
    number = prompt_hash(group, sample)
  return number / 2**63


def _hash(*parts: np.ndarray) -> int:
  digest = hashlib.blake2b(digest_size=8)
  for part in parts:
    digest.update(np.asarray(part, np.int32).tobytes())
  return int.from_bytes(digest.digest()) >> 1
