"""Plans what a batch of rows writes: prefixes, and branches after them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from swiftspec_jax import errors
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.distillation.writing import documents, instructions, rollout
from swiftspec_jax.distillation.writing.chat_format import (
  ChatFormat,
  chat_format,
)

_MAX_OPS = 320  # of one row
_ANSWER_LIMIT = 160
_GREEDY_SHARE = 0.75
_SUM_SHARE = 0.12  # of chats: word problems
_SHORT_TEXT_SHARE = 0.25  # of chats: tasks over a few sentences
_INVENTED_SHARE = 0.55  # of documents, as soon as there are enough


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passage:
  """The model writes here."""

  temperature: float
  limit: int
  is_answer: bool  # else the model plays the user


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branch:
  """What follows a prefix: forced tokens and passages in turn."""

  kind: str
  parts: tuple[tuple[int, ...] | Passage, ...]

  def ops(self) -> list[int | Passage]:
    """Returns forced tokens and passages one by one."""
    ops = []
    for part in self.parts:
      ops += [part] if isinstance(part, Passage) else part
    return ops


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """A prefix and the rows that go on from it."""

  prefix: tuple[int, ...]
  # Whether the prefix holds a text of its own, which then decides the split.
  has_document: bool
  rows: tuple[tuple[Branch, ...], ...]


@dataclasses.dataclass(frozen=True)
class BatchShape:
  """Sizes of one batch: prefixes, rows for each, longest prefix."""

  num_prefixes: int
  rows_per_prefix: int
  capacity: int


CHAT_SHAPE = BatchShape(16, 8, 64)
DOCUMENT_SHAPES = (
  BatchShape(32, 4, 256),
  BatchShape(32, 4, 512),
  BatchShape(16, 8, 1024),
  BatchShape(8, 16, 1792),
)
_CHAT_SHARE = 0.4
_DOCUMENT_SHARES = (0.35, 0.3, 0.22, 0.13)


class Planner:
  """Plans batches.

  The same seed, number and texts learned before give the same batch.
  """

  def __init__(
    self,
    tokenizer: tokenizer_lib.Tokenizer,
    library: documents.Library,
    *,
    seed: int,
    num_steps: int,
    own_prompts: Sequence[str] = (),
  ):
    """Keeps what all batches share.

    Args:
      tokenizer: tokenizer of the target.
      library: source of the documents.
      seed: seed of all choices.
      num_steps: T, length of a row.
      own_prompts: user turns that are answered first.

    Raises:
      UserError: a prompt is too long; or see `chat_format`.
    """
    self._tokenizer = tokenizer
    self._library = library
    self._seed = seed
    self._num_steps = num_steps
    self._format = chat_format(tokenizer)
    self._own_prompts = tuple(
      self._own_prompt(number, text)
      for number, text in enumerate(own_prompts, 1)
    )

  def learn(self, texts: Sequence[str]) -> None:
    """Takes texts that the target wrote as documents of later batches."""
    self._library.add(texts)

  @property
  def end_of_turn(self) -> tuple[int, int]:
    """Returns the tokens that end the turns of user and model."""
    return self._format.closing[0], self._format.between[0]

  def batch(self, number: int) -> tuple[BatchShape, list[Plan]]:
    """Returns the plans of batch `number`, one for each prefix."""
    rng = np.random.default_rng([self._seed, number])
    first = number * DOCUMENT_SHAPES[1].num_prefixes
    if first < len(self._own_prompts):
      return self._own_batch(rng, first)
    if rng.random() < _CHAT_SHARE:
      return CHAT_SHAPE, [
        self._chat_plan(rng) for _ in range(CHAT_SHAPE.num_prefixes)
      ]
    shape = DOCUMENT_SHAPES[
      rng.choice(len(DOCUMENT_SHAPES), p=_DOCUMENT_SHARES)
    ]
    return shape, [
      self._document_plan(rng, shape) for _ in range(shape.num_prefixes)
    ]

  def _encode(self, text: str) -> tuple[int, ...]:
    return tuple(self._tokenizer.encode(text, add_special_tokens=False))

  def _own_prompt(self, number: int, text: str) -> tuple[int, ...]:
    token_ids = (*self._format.opening, *self._encode(text))
    most = DOCUMENT_SHAPES[-1].capacity
    if len(token_ids) > most:
      raise errors.UserError(
        f'own prompt {number} has {len(token_ids)} tokens with the chat '
        f'template, at most {most} are supported; shorten it'
      )
    return token_ids

  def _chat_plan(self, rng: np.random.Generator) -> Plan:
    form = self._format
    if rng.random() < 0.3:
      system = instructions.pick(rng, instructions.SYSTEM_PROMPTS)
      form = chat_format(self._tokenizer, system)
    if len(form.opening) > CHAT_SHAPE.capacity:
      raise errors.UserError(
        f"the target's chat template puts {len(form.opening)} tokens before "
        f'the first turn; at most {CHAT_SHAPE.capacity} are supported'
      )

    def branch():
      # The first token of a branch is forced: the last one of the opening.
      first = form.opening[-1:]
      choice = rng.random()
      if choice < _SUM_SHARE:
        return self._task_branch(
          rng, form, 'math', first, instructions.word_problem(rng)
        )
      if choice < _SUM_SHARE + _SHORT_TEXT_SHARE:
        return self._short_text_branch(rng, form, first)
      return self._invented_branch(rng, form, first)

    return Plan(
      prefix=form.opening[:-1],
      has_document=False,
      rows=self._rows(CHAT_SHAPE, branch),
    )

  def _task_branch(self, rng, form: ChatFormat, kind, first, text) -> Branch:
    """A given user turn."""
    turn = (*first, *self._encode(text), *form.closing)
    return self._branch(rng, kind, turn, share=0.2)

  def _short_text_branch(self, rng, form: ChatFormat, first) -> Branch:
    """A task over some sentences, which no prefix has to hold."""
    passage = self._library.passage(rng, int(rng.integers(80, 400)))
    task = instructions.draw_task(rng)
    wording = instructions.pick(rng, task.wordings).replace(' above', '')
    word = documents.word_in(passage, rng) or self._library.word(rng)
    parts = [instructions.fill(wording, rng, word), passage]
    text = '\n\n'.join(parts if rng.random() < 0.7 else reversed(parts))
    return self._task_branch(rng, form, task.kind, first, text)

  def _invented_branch(self, rng, form: ChatFormat, first) -> Branch:
    """A user turn of which a few words are given."""
    opening = instructions.pick(rng, instructions.OPENINGS)
    word = self._library.word(rng) if '{word}' in opening else ''
    is_long = 'rticle' in opening or 'Context' in opening
    return self._branch(
      rng,
      'chat',
      (*first, *self._encode(instructions.fill(opening, rng, word))),
      self._user_turn(rng, 160 if is_long else 70),
      form.closing[1:],
      share=0.35,
    )

  def _document_plan(self, rng: np.random.Generator, shape: BatchShape) -> Plan:
    room = shape.capacity - len(self._format.opening) - 24
    wanted = int(room * rng.uniform(0.5, 1))
    passage = ''
    if rng.random() < _INVENTED_SHARE:
      passage = self._library.invented(rng, round(wanted * 4.2))
    passage = passage or self._library.passage(rng, round(wanted * 4.2))
    task = instructions.draw_task(rng)
    word = self._library.word(rng)
    lead = ''
    if rng.random() < 0.6:
      lead = instructions.pick(rng, instructions.LEAD_INS)
      wording = instructions.pick(rng, task.wordings)
      lead = instructions.fill(lead.replace('{task}', wording), rng, word)
      lead = lead.replace(' above', '')
    has_task = bool(lead) and 'Context' not in lead and 'Here' not in lead
    document = self._encode(passage)[:room]
    prefix = (*self._format.opening, *self._encode(lead), *document)
    prefix = prefix[: shape.capacity]

    def branch():
      if has_task and rng.random() < 0.4:
        chosen, text = task, instructions.pick(rng, instructions.ADDENDA)
      else:
        chosen = instructions.draw_task(rng)
        text = '\n\n' + instructions.pick(rng, chosen.wordings)
      inside = documents.word_in(passage, rng) or word
      text = instructions.fill(text, rng, inside)
      turn = (*self._encode(text), *self._format.closing)
      return self._branch(rng, chosen.kind, turn, share=0.2, limit=chosen.limit)

    return Plan(
      prefix=prefix, has_document=True, rows=self._rows(shape, branch)
    )

  def _own_batch(
    self, rng: np.random.Generator, first: int
  ) -> tuple[BatchShape, list[Plan]]:
    encoded = self._own_prompts[first:][: DOCUMENT_SHAPES[1].num_prefixes]
    longest = max(len(ids) for ids in encoded)
    capacity = -(-longest // 64) * 64
    shape = BatchShape(len(encoded), 4, capacity)

    def branch():
      return self._branch(rng, 'own', self._format.closing, share=0.5)

    return shape, [
      Plan(prefix=ids, has_document=True, rows=self._rows(shape, branch))
      for ids in encoded
    ]

  def _branch(self, rng, kind, *turn, share, limit=_ANSWER_LIMIT) -> Branch:
    """A user turn, its answer, and with probability `share` another turn."""
    answer = self._answer(rng, limit)
    return Branch(
      kind=kind, parts=(*turn, answer, *self._follow_up(rng, share))
    )

  def _answer(self, rng, limit: int = _ANSWER_LIMIT) -> Passage:
    is_greedy = rng.random() < _GREEDY_SHARE
    temperature = 0.0 if is_greedy else float(rng.uniform(0.7, 1.0))
    return Passage(temperature=temperature, limit=limit, is_answer=True)

  def _user_turn(self, rng, limit: int) -> Passage:
    temperature = float(rng.uniform(0.7, 1.0))
    return Passage(temperature=temperature, limit=limit, is_answer=False)

  def _follow_up(self, rng, share: float) -> tuple:
    """Another turn of user and model, or none."""
    if rng.random() >= share:
      return ()
    answer = self._answer(rng)
    if rng.random() < 0.5:
      text = instructions.pick(rng, instructions.FOLLOW_UPS)
      word = self._library.word(rng) if '{word}' in text else ''
      turn = self._encode(instructions.fill(text, rng, word))
      return ((*self._format.between[1:], *turn, *self._format.closing), answer)
    return (
      self._format.between[1:],
      self._user_turn(rng, 60),
      self._format.closing[1:],
      answer,
    )

  def _rows(self, shape: BatchShape, branch) -> tuple[tuple[Branch, ...], ...]:
    """Fills each row with branches that are more than it can write."""
    rows = []
    for _ in range(shape.rows_per_prefix):
      row, num_ops, num_answers = [], 0, 0
      # Short answers have some 30 tokens.
      while num_ops + 30 * num_answers < self._num_steps:
        new = branch()
        size = len(new.ops())
        if num_ops + size > _MAX_OPS:
          break
        row.append(new)
        num_ops += size
        num_answers += 1
      rows.append(tuple(row))
    return tuple(rows)


def compile_script(
  plans: Sequence[Plan], stop_token_ids: Sequence[int]
) -> rollout.Script:
  """Returns the arrays of the plans' rows, in their order."""
  rows = [row for plan in plans for row in plan.rows]
  shape = (len(rows), _MAX_OPS)
  ops = np.full(shape, rollout.GENERATE, np.int32)
  begins = np.zeros(shape, bool)
  temperatures = np.zeros(shape, np.float32)
  limits = np.full(shape, np.iinfo(np.int32).max, np.int32)
  for i, row in enumerate(rows):
    start = 0
    for branch in row:
      begins[i, start] = True
      for j, op in enumerate(branch.ops(), start):
        if isinstance(op, Passage):
          temperatures[i, j], limits[i, j] = op.temperature, op.limit
        else:
          ops[i, j] = op
      start += len(branch.ops())
  return rollout.Script(
    ops=ops,
    begins_branch=begins,
    temperatures=temperatures,
    limits=limits,
    stop_token_ids=np.asarray(stop_token_ids, np.int32),
  )
