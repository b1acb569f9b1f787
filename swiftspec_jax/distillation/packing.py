"""Packs samples into rows of few sizes: several groups side by side.

A group may be split into pieces, each with the prefix and some of its
samples; the samples of a piece do not see each other. Legend: S row size, K
distribution entries, H width of the features.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.distillation import samples as samples_lib
from swiftspec_jax.distillation.samples import Group, Role, Sample

ROW_SIZES = (512, 1024, 2048)
_NOTHING = len(Role)  # in place of a role: there is no next token
NO_TOKEN = -1  # before the first one of a piece
_PREFIX = 0  # branch number of tokens that all samples of a piece see


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
  """A prefix with some of its samples."""

  group: Group
  samples: tuple[Sample, ...]
  is_first: bool  # of its group: the prefix counts once

  @property
  def size(self) -> int:
    sizes = [len(sample.token_ids) for sample in self.samples]
    return len(self.group.token_ids) + sum(sizes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
  """Rows of packed pieces, and what is learned at M places of each row.

  Host arrays. The distribution at a place is about the token after it in its
  branch.
  """

  token_ids: np.ndarray  # i32[B, S]
  positions: np.ndarray  # i32[B, S]
  pieces: np.ndarray  # i32[B, S], 0 is padding
  branches: np.ndarray  # i32[B, S] in the piece, 0 is the prefix
  # i32[B, S] where the token before stands, for the first one of a branch the
  # last one of its prefix; NO_TOKEN where there is none.
  previous: np.ndarray
  places: np.ndarray  # i32[B, M]
  top_token_ids: np.ndarray  # i32[B, M, K]
  top_log_probs: np.ndarray  # f32[B, M, K]
  weights: np.ndarray  # f32[B, M], 0 where a place is not used
  is_answer: np.ndarray  # bool[B, M] whether an answer's token is next


def split(
  groups: Sequence[Group],
) -> tuple[list[Group], list[Group]]:
  """Returns the groups' samples for training and those held out.

  Samples that occur a second time are dropped. Where there is so little data
  that the share for evaluation is empty, it gets the sample with the lowest
  lot.
  """
  lots = [
    samples_lib.lot(group, sample)
    for group in groups
    for sample in group.samples
  ]
  limit = max(samples_lib.HELD_OUT_SHARE, min(lots, default=0))
  seen: set[tuple[int, float]] = set()
  parts: tuple[list[Group], list[Group]] = ([], [])
  for group in groups:
    chosen: tuple[list[Sample], list[Sample]] = ([], [])
    for sample in group.samples:
      key = samples_lib.prompt_hash(group, sample), sample.temperature
      if key not in seen:
        seen.add(key)
        chosen[samples_lib.lot(group, sample) <= limit].append(sample)
    for part, found in zip(parts, chosen, strict=True):
      if found:
        part.append(dataclasses.replace(group, samples=tuple(found)))
  return parts


def make_pieces(groups: Sequence[Group]) -> dict[int, list[Piece]]:
  """Returns pieces by the row size that suits them."""
  pieces: dict[int, list[Piece]] = {size: [] for size in ROW_SIZES}
  for group in groups:
    prefix = len(group.token_ids)
    longest = max(len(sample.token_ids) for sample in group.samples)
    # Long prefixes deserve long rows: they are repeated in each piece.
    wanted = max(prefix + longest, 2 * prefix)
    row_size = next((s for s in ROW_SIZES if s >= wanted), ROW_SIZES[-1])
    part: list[Sample] = []
    is_first, used = True, prefix
    for sample in group.samples:
      size = len(sample.token_ids)
      if prefix + size > row_size:
        continue
      if used + size > row_size:
        pieces[row_size].append(
          Piece(group=group, samples=tuple(part), is_first=is_first)
        )
        part, is_first, used = [], False, prefix
      part.append(sample)
      used += size
    if part:
      pieces[row_size].append(
        Piece(group=group, samples=tuple(part), is_first=is_first)
      )
  return pieces


def plan_batches(
  pieces: dict[int, list[Piece]],
  tokens_per_batch: int,
  rng: np.random.Generator | None,
) -> list[list[list[Piece]]]:
  """Returns the batches of one pass over all pieces, as pieces of each row.

  Args:
    pieces: result of `make_pieces`.
    tokens_per_batch: a multiple of the largest row size.
    rng: generator of the order; None keeps that of the pieces.

  Raises:
    UserError: `tokens_per_batch` is less than a row.
  """
  if tokens_per_batch < ROW_SIZES[-1]:
    raise errors.UserError(
      f'tokens_per_batch={tokens_per_batch} must be at least {ROW_SIZES[-1]}, '
      'the longest row'
    )
  batches = []
  for row_size, all_pieces in pieces.items():
    order = np.arange(len(all_pieces))
    if rng is not None:
      rng.shuffle(order)
    rows = _fill_rows([all_pieces[i] for i in order], row_size)
    num_rows = tokens_per_batch // row_size
    batches += [rows[i : i + num_rows] for i in range(0, len(rows), num_rows)]
  if rng is not None:
    order = rng.permutation(len(batches))
    batches = [batches[i] for i in order]
  return batches


def _fill_rows(pieces: Sequence[Piece], row_size: int) -> list[list[Piece]]:
  """First fit, among the rows that were opened last."""
  rows: list[list[Piece]] = []
  room: list[int] = []
  for piece in pieces:
    size = piece.size
    first = max(len(rows) - 32, 0)
    fit = next((i for i in range(first, len(rows)) if room[i] >= size), None)
    if fit is None:
      rows.append([])
      room.append(row_size)
      fit = len(rows) - 1
    rows[fit].append(piece)
    room[fit] -= size
  return rows


def make_batch(
  rows: Sequence[Sequence[Piece]],
  tokens_per_batch: int,
  role_weights: Sequence[float],
  rng: np.random.Generator,
) -> Batch:
  """Returns the arrays of a planned batch; missing rows are padding.

  Most of a row may be a prompt. So if half of the places are enough for
  all that was written, the others are left out, and those prompt tokens that
  fill the rest stand for all.

  Args:
    rows: pieces of each row.
    tokens_per_batch: same as in `plan_batches`.
    role_weights: weights of tokens of each `Role`.
    rng: chooses among prompt tokens.
  """
  largest = max(sum(piece.size for piece in row) for row in rows)
  # All rows of a batch were filled for the same size.
  row_size = next(
    size
    for size in ROW_SIZES
    if size >= largest and tokens_per_batch // size >= len(rows)
  )
  shape = (tokens_per_batch // row_size, row_size)
  num_stored = rows[0][0].group.top_token_ids.shape[1]
  token_ids, positions, pieces, branches = np.zeros((4, *shape), np.int32)
  previous = np.full(shape, NO_TOKEN, np.int32)
  top_token_ids = np.zeros((*shape, num_stored), np.int32)
  top_log_probs = np.zeros((*shape, num_stored), np.float32)
  roles = np.full(shape, _NOTHING, np.int32)  # of the token after
  begin = 0  # of the piece
  for i, row in enumerate(rows):
    for number, place, part, branch in walk(row):
      piece = row[number - 1]
      size = len(part.token_ids)
      after = slice(place.start, place.stop - 1)
      if branch != _PREFIX:
        roles[i, after] = part.roles[1:]
      elif piece.is_first:
        roles[i, after] = Role.GIVEN
      start = 0 if branch == _PREFIX else len(piece.group.token_ids)
      token_ids[i, place] = part.token_ids
      positions[i, place] = start + np.arange(size)
      if branch == _PREFIX:
        begin = place.start
      previous[i, place] = np.arange(place.start, place.stop) - 1
      previous[i, place.start] = begin + start - 1 if start else NO_TOKEN
      pieces[i, place] = number
      branches[i, place] = branch
      top_token_ids[i, place] = part.top_token_ids
      top_log_probs[i, place] = part.top_log_probs
  places, weights = _choose_places(roles, np.asarray(role_weights), rng)
  chosen = np.arange(shape[0])[:, None], places
  return Batch(
    token_ids=token_ids,
    positions=positions,
    pieces=pieces,
    branches=branches,
    previous=previous,
    places=places,
    top_token_ids=top_token_ids[chosen],
    top_log_probs=top_log_probs[chosen],
    weights=weights,
    is_answer=roles[chosen] == Role.ANSWER,
  )


def features_of(rows: Sequence[Sequence[Piece]], batch: Batch) -> np.ndarray:
  """Returns the features f16[B, S, H] of the tokens of a batch.

  Args:
    rows: pieces of each row, with features.
    batch: `make_batch` of them.
  """
  width = rows[0][0].group.features.shape[1]
  features = np.zeros((*batch.token_ids.shape, width), np.float16)
  for i, row in enumerate(rows):
    for _, place, part, _ in walk(row):
      features[i, place] = part.features
  return features


def _choose_places(roles, role_weights, rng):
  """Returns the places [B, M] to learn at, and their weights."""
  num_rows, row_size = roles.shape
  is_given = roles == Role.GIVEN
  is_written = (roles == Role.USER) | (roles == Role.ANSWER)
  is_enough = is_written.sum(1).max() <= row_size // 2
  num_places = row_size // 2 if is_enough else row_size
  # Written tokens first, prompts in random order, then what does not count.
  order = np.where(is_written, 0, np.where(is_given, 1, 2))
  order = order + rng.random(roles.shape)
  places = np.sort(np.argsort(order, axis=1)[:, :num_places], axis=1)
  chosen = roles[np.arange(num_rows)[:, None], places]
  weights = np.append(role_weights, 0.0)[chosen]
  share = (chosen == Role.GIVEN).sum() / max(is_given.sum(), 1)
  weights[chosen == Role.GIVEN] /= max(share, 1e-6)
  return places.astype(np.int32), weights.astype(np.float32)


def walk(
  row: Sequence[Piece],
) -> Iterator[tuple[int, slice, Group | Sample, int]]:
  """Yields piece number from 1, place, part and branch of what is not empty.

  Branch 0 is the prefix.
  """
  place = 0
  for number, piece in enumerate(row, 1):
    for branch, part in enumerate((piece.group, *piece.samples)):
      size = len(part.token_ids)
      if size:
        yield number, slice(place, place + size), part, branch
      place += size
