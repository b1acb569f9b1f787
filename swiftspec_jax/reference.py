"""Both papers on one page, to be read: no cache, no batch, no compiled loop.

SwiftSpec (arXiv 2506.11309): a draft model grows a token tree while the target
verifies a part of it. SmartSpec (arXiv 2406.14066): how much to speculate is
chosen by predicted goodput. The engine does the same with caches, for many
requests, on meshes of devices; `tests/reference_test.py` holds it to this page.

Legend: V vocabulary.
"""

import dataclasses
import heapq
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from swiftspec_jax import tree as tree_lib
from swiftspec_jax.config import TreeConfig
from swiftspec_jax.models import decoder
from swiftspec_jax.models.cache import dense
from swiftspec_jax.models.model import Model

# Logits f32[V] after a text.
LogitsFn = Callable[[Sequence[int]], np.ndarray]


def logits_fn(model: Model, longest: int) -> LogitsFn:
  """Returns the logits after texts of up to `longest` tokens, read anew."""

  @jax.jit
  def run(params, token_ids, length):
    starts = jnp.zeros(1, jnp.int32)
    empty = dense.init(model.config, 1, longest, model.dtype, model.mesh)
    hidden, _ = decoder.forward(
      params, model.config, token_ids[None], empty, starts=starts
    )
    last = hidden[:, length - 1][:, None]
    return decoder.unembed(params, model.config, last)[0, 0]

  def logits(text):
    padded = np.zeros(longest, np.int32)
    padded[: len(text)] = text
    return np.asarray(run(model.params, padded, len(text)))

  return logits


@dataclasses.dataclass(eq=False)
class Node:
  """A token that may follow the text.

  Attributes:
    token_id: token.
    parent: node before it; None for the root, the last known token.
    weight: log-probability of the path from the root, by the draft.
    age: number of nodes that were there before it.
    children: nodes after it; None until the draft has expanded it.
  """

  token_id: int
  parent: 'Node | None' = None
  weight: float = 0.0
  age: int = 0
  children: 'list[Node] | None' = None

  @property
  def path(self) -> 'list[Node]':
    """The nodes from the root, which is left out, to this one."""
    return [*self.parent.path, self] if self.parent else []


class Tree:
  """The draft's guesses at what follows a text (SwiftSpec, section 3.1)."""

  def __init__(self, text: Sequence[int]):
    """Begins with the last known token alone."""
    self.text = list(text)
    self.root = Node(text[-1])
    self.nodes = [self.root]

  def expand(self, draft: LogitsFn, width: int, branching: int) -> None:
    """One draft forward: the best leaves get their best children."""
    leaves = [node for node in self.nodes if node.children is None]
    for leaf in sorted(leaves, key=_by_weight)[:width]:
      context = [*self.text, *(node.token_id for node in leaf.path)]
      log_probs = np.asarray(jax.nn.log_softmax(draft(context)))
      leaf.children = [
        Node(int(token_id), leaf, leaf.weight + log_probs[token_id], age)
        for age, token_id in enumerate(
          np.argsort(-log_probs, kind='stable')[:branching], len(self.nodes)
        )
      ]
      self.nodes += leaf.children

  def select(self, num_nodes: int) -> list[Node]:
    """Returns the most probable nodes, the root and parents first."""
    chosen: list[Node] = []
    frontier = [(*_by_weight(self.root), self.root)]
    while frontier and len(chosen) < num_nodes:
      chosen.append(heapq.heappop(frontier)[-1])
      for child in chosen[-1].children or ():
        heapq.heappush(frontier, (*_by_weight(child), child))
    return chosen

  def follow(self, token_ids: Sequence[int]) -> int:
    """Makes the last of the verified tokens the root; returns the outcome.

    What lies below it survives if the draft has expanded it already: a hit.
    After a late hit or a miss the tree begins again.
    """
    node: Node | None = self.root
    for token_id in token_ids:
      children = (node.children if node else None) or ()
      node = next((x for x in children if x.token_id == token_id), None)
    self.text += token_ids
    if node is None or node.children is None:
      outcome = tree_lib.MISS if node is None else tree_lib.LATE_HIT
      self.root = Node(token_ids[-1])
      self.nodes = [self.root]
      return outcome
    self.nodes = [x for x in self.nodes if x is node or node in x.path]
    self.root, node.parent = node, None
    for survivor in self.nodes[::-1]:
      survivor.weight -= node.weight
    return tree_lib.HIT


def _by_weight(node: Node) -> tuple[float, int]:
  return -node.weight, node.age


def verify(
  target: LogitsFn, text: Sequence[int], sent: Sequence[Node]
) -> list[int]:
  """Returns the tokens that the target approves, and its own after them.

  One forward gives the target's choice after all nodes; here they are asked for
  one by one. A node is accepted if it is the choice after its parent.
  """
  node, verified = sent[0], list[int]()
  while True:
    verified.append(int(target([*text, *verified]).argmax()))
    children = [x for x in sent if x.parent is node]
    found = [x for x in children if x.token_id == verified[-1]]
    if not found:
      return verified
    node = found[0]


@dataclasses.dataclass(frozen=True)
class Round:
  """What was sent, and what came of it.

  Attributes:
    sent: tokens of the nodes, the root first, and the indices of their parents.
    verified: accepted tokens, and the target's own after them.
    outcome: outcome of the verdict before; None for the first round.
  """

  sent: tuple[list[int], list[int]]
  verified: list[int]
  outcome: int | None


def swiftspec(
  target: LogitsFn,
  draft: LogitsFn,
  text: Sequence[int],
  config: TreeConfig,
  num_tokens: int,
  *,
  is_async: bool,
) -> Iterator[Round]:
  """Yields the rounds that decode greedily, until the text is long enough.

  Args:
    target: model that decides every token.
    draft: model that grows the tree.
    text: known tokens.
    config: sizes of the tree.
    num_tokens: new tokens.
    is_async: whether the draft grows the tree while the target verifies. Then
      nothing but a new tree holds the target up. Else the two take turns.
  """
  tree, outcome, end = Tree(text), None, len(text) + num_tokens
  while len(tree.text) < end:
    room = end - len(tree.text)  # the last token is the target's
    num_nodes = min(config.num_nodes, room)
    num_steps = 0 if is_async else config.num_turn_steps
    if tree.root.children is None:  # the target waits for a new tree
      tree.expand(draft, 1, config.branching)
      if is_async:
        num_steps = config.num_restart_steps
    while num_steps > 0 or (is_async and len(tree.nodes) < num_nodes):
      tree.expand(draft, config.num_leaves, config.branching)
      num_steps -= 1
    sent = tree.select(num_nodes)
    if is_async:  # on devices of its own
      for _ in range(config.num_draft_steps):
        tree.expand(draft, config.num_leaves, config.branching)
    verified = verify(target, tree.text, sent)[:room]
    parents = [sent.index(x.parent) if x.parent else -1 for x in sent]
    yield Round(([x.token_id for x in sent], parents), verified, outcome)
    outcome = tree.follow(verified)


def expected_tokens(acceptance: float, length: int) -> float:
  """Returns the tokens of a row that drafts `length` tokens, one included.

  Args:
    acceptance: probability that a draft token is right if those before it are.
    length: draft tokens.
  """
  return sum(acceptance**i for i in range(length + 1))


def smartspec(
  acceptance: float,
  seconds: Callable[[int], float],
  num_rows: int,
  lengths: Sequence[int],
) -> int:
  """Returns the length with the best goodput, the same for all rows.

  Goodput is what the requests get, not what is computed: tokens of the output
  per second of the step (SmartSpec, equation 2).

  Args:
    acceptance: same as in `expected_tokens`, for all rows.
    seconds: function of the length that predicts the seconds of a step with
      this batch: drafting, and one forward of the target over all tokens.
    num_rows: requests in the batch.
    lengths: lengths to choose from; 0 is plain decoding.
  """
  return max(
    lengths,
    key=lambda n: num_rows * expected_tokens(acceptance, n) / seconds(n),
  )
