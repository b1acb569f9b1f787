"""The draft's trees round by round, read back to be looked at."""

import dataclasses
from collections.abc import Sequence

import jax

import swiftspec_jax as ss
from swiftspec_jax import errors
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.cli import references
from swiftspec_jax.engine.engine import StepRecord
from swiftspec_jax.engine.handles import Update
from swiftspec_jax.tokenizer import token_names

_NUM_CONTEXT = 16  # tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
  """A node of the tree, and what became of it."""

  token_id: int
  text: str
  parent: int | None  # index of a node before it; None for the root
  depth: int
  log_prob: float  # sum from the root: the weight
  is_expanded: bool  # has keys and values, else it is a candidate
  is_sent: bool  # verified by the target; the root always is
  is_accepted: bool  # a draft token that stands
  is_next: bool  # the token after them: the next root
  is_kept: bool  # part of the next round's tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
  """A tree as it was when the verdict came, and the verdict.

  Attributes:
    nodes: nodes of the tree, parents first.
    position: position of the root in the text, prompt included, from 0.
    context: end of the text that is known, the root's included.
    emitted: texts of the new tokens: the accepted ones, then the next one.
    outcome: `tree.HIT`, `LATE_HIT` or `MISS` for the last of them.
    num_forwards: forwards of the draft between the verdict before and the
      sending.
  """

  nodes: tuple[Node, ...]
  position: int
  context: str
  emitted: tuple[str, ...]
  outcome: int
  num_forwards: int


def collect(
  target: ss.Model,
  draft: ss.Model,
  request: ss.Request,
  tree_config: ss.TreeConfig,
  num_rounds: int,
) -> list[Round]:
  """Decodes the first rounds of a request in lock-step.

  Args:
    target: defines the output.
    draft: draft model on the target's devices (serial mode) or on others
      (asynchronous).
    request: request to decode. Where acceptance is forced and it names no
      reference, the target writes one first.
    tree_config: sizes of the tree.
    num_rounds: fewer are returned if the output ends before.

  Raises:
    UserError: the models, the sizes or the request do not fit.
  """
  if num_rounds < 1:
    raise errors.UserError(f'num_rounds must be at least 1, got {num_rounds}')
  decoder = ss.Decoder(target, draft, tree=tree_config, run_ahead=0)
  decoder.run([request])  # checks the request; nothing is decoded yet
  if tree_config.forced_acceptance and not request.reference_token_ids:
    request = references.References(target).add_to(request)
  known, rounds, num_seen = list(request.token_ids), [], 0
  with decoder.engine_for([request]) as engine:
    handle = engine.submit(request, shows_drafts=True)
    while len(rounds) < num_rounds and not handle.is_finished:
      record = engine.step()
      # Before the next step changes the trees.
      tree = jax.device_get(engine.drafter.rows.state.tree)
      if handle.num_updates == num_seen:
        continue  # a part of the prompt
      num_seen, update = handle.num_updates, handle.latest
      if record.lengths.any():
        rounds.append(
          _make_round(target.tokenizer, tree, known, update, record)
        )
      known += update.token_ids
  return rounds


def _make_round(
  tokenizer: tokenizer_lib.Tokenizer,
  tree: tree_lib.DraftTree,
  known: Sequence[int],
  update: Update,
  record: StepRecord,
) -> Round:
  """Returns row 0 of a tree with what the verdict does to it."""
  names = token_names.of(tokenizer)
  size, of_row = tree.size[0], tree.nodes
  token_ids = of_row.token_ids[0, :size].tolist()
  parents = of_row.parents[0, :size].tolist()
  is_expanded = (of_row.cache_slots[0, :size] != tree_lib.NO_SLOT).tolist()
  children = {
    pair: i for i, pair in enumerate(zip(parents, token_ids, strict=True))
  }
  path = _walk(children, update.token_ids)
  sent = [tree_lib.ROOT_INDEX]
  for node in update.draft_nodes:
    sent.append(children.get((sent[node.parent + 1], node.token_id)))
  new_root = path[-1] if len(path) == len(update.token_ids) else None
  outcome = tree_lib.MISS
  if new_root is not None:
    outcome = tree_lib.HIT if is_expanded[new_root] else tree_lib.LATE_HIT
  kept = {new_root} - {None}
  for node, parent in enumerate(parents):
    if parent in kept:
      kept.add(node)
  accepted = set(path[: len(update.token_ids) - 1])
  nodes = tuple(
    Node(
      token_id=token_ids[i],
      text=names[token_ids[i]].text,
      parent=None if parents[i] == tree_lib.NO_PARENT else parents[i],
      depth=int(of_row.depths[0, i]),
      log_prob=float(of_row.log_probs[0, i]),
      is_expanded=is_expanded[i],
      is_sent=i in sent,
      is_accepted=i in accepted,
      is_next=i == new_root,
      is_kept=i in kept,
    )
    for i in range(size)
  )
  return Round(
    nodes=nodes,
    position=len(known) - 1,
    context=tokenizer.decode(known[-_NUM_CONTEXT:]).lstrip('\ufffd'),
    emitted=tuple(names[t].text for t in update.token_ids),
    outcome=outcome,
    num_forwards=record.num_forwards,
  )


def _walk(
  children: dict[tuple[int, int], int], verdict: Sequence[int]
) -> list[int]:
  """Returns the nodes below the root that a verdict passes."""
  path = [tree_lib.ROOT_INDEX]
  for token_id in verdict:
    node = children.get((path[-1], token_id))
    if node is None:
      break
    path.append(node)
  return path[1:]
