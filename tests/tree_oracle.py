"""A token tree of Python objects and heaps, and a draft that reads its cache.

The draft is a table whose row is chosen by a sum over all visible rows of the
cache. So one wrong mask, slot, position or stale row gives other children than
the oracle's, which sums over the tokens of the path.
"""

import dataclasses
import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from kernels_pallas.tree_attention import reference
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.models.cache import dense


def compiled(function, **options):
  """Returns a function that runs as one program, and returns NumPy arrays."""
  program = jax.jit(function, **options)
  return lambda *args, **kwargs: jax.device_get(program(*args, **kwargs))


new_tree = compiled(
  tree_lib.new_tree,
  static_argnames=('capacity', 'num_cache_rows', 'chain_length'),
)


@struct.dataclass(frozen=True, kw_only=True)
class Table:
  """Children by hash of the context."""

  token_ids: np.ndarray  # i32[rows, K]
  log_probs: np.ndarray  # f32[rows, K]


def code(token_id, position):
  """What a token leaves in its row of the cache; ints or arrays."""
  return (token_id * 7919 + position * 104729) & 0xFFFF


def draft_fn(table: Table, cache: dense.KVCache, leaves: tree_lib.Leaves):
  """Writes the leaves' rows and looks their children up."""
  lengths = cache.kv_lengths
  codes = code(leaves.token_ids, lengths[:, None] + leaves.depths)
  rows = dense.write(
    cache.keys[0], codes[:, :, None, None], lengths + leaves.cache_slots[:, 0]
  )
  visible = reference.visible_rows(
    lengths, leaves.attention_mask, cache.capacity
  )
  sums = jnp.sum(jnp.where(visible, rows[:, 0, :, 0][:, None], 0), axis=2)
  row = sums % table.token_ids.shape[0]
  return (
    jnp.asarray(table.token_ids)[row],
    jnp.asarray(table.log_probs)[row],
    cache.replace(keys=[rows]),
  )


def forward_missing(cache, accepted, first, num_tokens):
  """Writes and commits accepted tokens i32[B, T] from `first` on."""
  steps = jnp.arange(accepted.shape[1])[None]
  num_missing = num_tokens - first
  places = jnp.minimum(first[:, None] + steps, accepted.shape[1] - 1)
  token_ids = jnp.take_along_axis(accepted, places, axis=1)
  lengths = cache.kv_lengths
  codes = code(token_ids, lengths[:, None] + steps)[:, :, None, None]
  # The rows of the others hold surviving nodes; the last rows are free.
  free = cache.capacity - accepted.shape[1] - 1
  starts = jnp.where(num_missing > 0, lengths, free)
  cache = cache.replace(keys=[dense.write(cache.keys[0], codes, starts)])
  return dense.extend(cache, num_missing)


# Of log-probabilities that are added and of gains: tree/insertion.py.
QUANTUM = 2.0**-10


@dataclasses.dataclass(eq=False)
class Node:
  token_id: int
  parent: 'Node | None'
  weight: np.float32
  order: int
  is_looked_up: bool = False
  slot: int = tree_lib.NO_SLOT
  children: list['Node'] = dataclasses.field(default_factory=list)

  @property
  def key(self):
    """Sorts by probability, then by age."""
    return -self.weight, self.order

  def gain(self, log_prob):
    """By how much a log-probability after the parent is better."""
    known = np.float32(self.weight - self.parent.weight)
    steps = np.floor((np.float32(log_prob) - known) / np.float32(QUANTUM) - 0.5)
    return max(float(steps), 0.0) * QUANTUM

  @property
  def path(self):
    """From the root down to the node."""
    return [*self.parent.path, self] if self.parent else [self]

  @property
  def depth(self):
    return len(self.path) - 1


class HeapTree:
  """One row's tree together with all tokens that were verified."""

  def __init__(self, token_id, capacity, num_rows, table):
    self.capacity, self.num_rows, self.table = capacity, num_rows, table
    self.verified = []  # before the root
    self._start(token_id)

  def _start(self, token_id):
    self.root = Node(token_id, None, np.float32(0), 0)
    self.nodes = {0: self.root}
    self.num_inserted = 1
    self.num_expanded = 0
    self.heap = [self.root.key]

  @property
  def can_grow(self):
    is_candidate = any(n.slot < 0 for n in self.nodes.values())
    return is_candidate and self.num_expanded < self.num_rows

  def expand(self, width):
    leaves = []
    room = min(width, self.num_rows - self.num_expanded)
    while self.heap and len(leaves) < room:
      key = heapq.heappop(self.heap)
      node = self.nodes.get(key[1])
      # Else it was dropped, or became more probable.
      if node and node.key == key and node not in leaves:
        leaves.append(node)
    gains = {}
    for leaf in leaves:
      leaf.slot = self.num_expanded
      self.num_expanded += 1
      known = {child.token_id: child for child in leaf.children}
      for token_id, log_prob in self._children(leaf):
        if log_prob > -np.inf and token_id in known:
          gains[known[token_id]] = known[token_id].gain(log_prob)
        elif log_prob > -np.inf:
          self._insert(token_id, leaf, np.float32(leaf.weight + log_prob))
    self._raise(gains)
    self._drop()

  def add_chain(self, chain):
    """Adds a continuation, a list of tokens and log-probabilities."""
    node, gains, base, total = self.root, {}, None, 0.0
    for token_id, log_prob in chain:
      if log_prob == -np.inf:
        break
      log_prob = np.floor(log_prob / QUANTUM) * QUANTUM
      twins = [n for n in node.children if n.token_id == token_id]
      if twins:
        (node,) = twins
        gains[node] = node.gain(log_prob)
        continue
      if base is None:
        self._raise(gains)
        base = node.weight
      total += log_prob
      weight = np.float32(base + np.float32(total))
      node = self._insert(token_id, node, weight, is_looked_up=True)
    if base is None:
      self._raise(gains)
    self._drop()

  def _insert(self, token_id, parent, weight, is_looked_up=False):
    node = Node(token_id, parent, weight, self.num_inserted, is_looked_up)
    self.num_inserted += 1
    parent.children.append(node)
    self.nodes[node.order] = node
    heapq.heappush(self.heap, node.key)
    return node

  def _raise(self, gains):
    """Raises weights, and those of all nodes below."""
    if any(gains.values()):
      for node in self.nodes.values():
        gain = sum(gains.get(above, 0.0) for above in node.path)
        node.weight = np.float32(node.weight + np.float32(gain))
        if gain and node.slot < 0:
          heapq.heappush(self.heap, node.key)

  def _drop(self):
    while len(self.nodes) > self.capacity:
      candidates = [n for n in self.nodes.values() if n.slot < 0]
      worst = max(candidates, key=lambda n: n.key)
      worst.parent.children.remove(worst)
      del self.nodes[worst.order]

  def _children(self, leaf):
    context = [*self.verified, *(n.token_id for n in leaf.path)]
    total = sum(code(t, i) for i, t in enumerate(context))
    row = total % len(self.table.token_ids)
    return zip(
      self.table.token_ids[row].tolist(), self.table.log_probs[row], strict=True
    )

  def select(self, num_nodes):
    """Best first from the root down."""
    selected, frontier = [], [self.root.key]
    while frontier and len(selected) < num_nodes:
      node = self.nodes[heapq.heappop(frontier)[1]]
      selected.append(node)
      for child in node.children:
        heapq.heappush(frontier, child.key)
    return selected

  def verdict(self, sent, choices, vocab_size):
    """Tokens that choices lead to: down the selection, at last anywhere.

    Each choice is one of the node's children, those of the selection first, or
    a token if there are not as many.
    """
    node, verdict = self.root, []
    for choice in choices:
      # What was sent may have been dropped from the tree meanwhile.
      children = [n for n in sent if n.parent is node]
      others = [n for n in node.children if n not in children]
      known = [n.token_id for n in [*children, *others]]
      token_id = known[choice] if choice < len(known) else choice % vocab_size
      verdict.append(token_id)
      node = next((n for n in children if n.token_id == token_id), None)
      if node is None:
        break
    return verdict

  def reroot(self, token_ids):
    """Returns the outcome, and the rows committed and surviving."""
    path, node = [], self.root
    for token_id in token_ids:
      path.append(node)
      matches = [n for n in node.children if n.token_id == token_id]
      node = matches[0] if matches else None
      if node is None:
        break
    committed = [n.slot for n in path if n.slot >= 0]
    if not token_ids:
      outcome = tree_lib.HIT if self.root.slot >= 0 else tree_lib.LATE_HIT
    elif node is None:
      outcome = tree_lib.MISS
    else:
      outcome = tree_lib.HIT if node.slot >= 0 else tree_lib.LATE_HIT
    self.verified += [self.root.token_id, *token_ids][:-1]
    if outcome == tree_lib.HIT:
      return outcome, committed, self._move_to(node)
    self._start(token_ids[-1] if token_ids else self.root.token_id)
    return outcome, committed, []

  def _move_to(self, root):
    base = root.weight
    self.nodes = {
      n.order: n for n in self.nodes.values() if n is root or root in n.path
    }
    self.root, root.parent = root, None
    expanded = [n for n in self.nodes.values() if n.slot >= 0]
    expanded.sort(key=lambda n: n.slot)
    rows = [n.slot for n in expanded]
    self.num_expanded = len(expanded)
    for slot, node in enumerate(expanded):
      node.slot = slot
    for node in self.nodes.values():
      node.weight = np.float32(node.weight - base)
    self.heap = [n.key for n in self.nodes.values() if n.slot < 0]
    heapq.heapify(self.heap)
    return rows

  def listing(self):
    """(token, parent's index, depth, weight, slot) of each node, in order."""
    nodes = list(self.nodes.values())
    index = {n.order: i for i, n in enumerate(nodes)}
    return [
      (
        n.token_id,
        index[n.parent.order] if n.parent else tree_lib.NO_PARENT,
        n.depth,
        float(n.weight),
        n.slot,
      )
      for n in nodes
    ]

  def cached_codes(self):
    """What the cache must hold: the prefix, then the rows of the tree."""
    expanded = [n for n in self.nodes.values() if n.slot >= 0]
    expanded.sort(key=lambda n: n.slot)
    start = len(self.verified)
    return [code(t, i) for i, t in enumerate(self.verified)] + [
      code(n.token_id, start + n.depth) for n in expanded
    ]


def listing(tree: tree_lib.DraftTree, row: int):
  """The same of one row of a batch."""
  size = int(tree.size[row])
  names = 'token_ids', 'parents', 'depths', 'log_probs', 'cache_slots'
  fields = (np.asarray(getattr(tree.nodes, name)) for name in names)
  return list(zip(*(x[row, :size].tolist() for x in fields), strict=True))


@functools.partial(
  compiled, static_argnames=('num_nodes', 'num_steps', 'width')
)
def play_round(
  tree,
  cache,
  table,
  token_ids,
  num_tokens,
  chains,
  *,
  num_nodes,
  num_steps,
  width,
):
  """A round of the draft: re-root, select, grow while the target verifies."""
  old_root = tree.nodes.token_ids[:, 0]
  tree, moved = tree_lib.reroot(tree, token_ids, num_tokens)
  cache = dense.commit(cache, moved.path, moved.num_committed)
  accepted = jnp.concatenate([old_root[:, None], token_ids], axis=1)
  cache = forward_missing(cache, accepted, moved.num_committed, num_tokens)
  if chains is not None:
    tree = tree_lib.add_chain(tree, *chains)
  draft = functools.partial(draft_fn, table)
  tree, cache = tree_lib.grow(
    tree, cache, draft, num_steps=0, num_nodes=num_nodes, width=width
  )
  selection = tree_lib.select(tree, num_nodes)
  tree, cache = tree_lib.grow(
    tree, cache, draft, num_steps=num_steps, width=width
  )
  return tree, cache, moved, selection
