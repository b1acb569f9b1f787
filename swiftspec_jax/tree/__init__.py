"""The draft's token tree: grown, selected from and re-rooted on the device.

Every function is pure, has static shapes and treats the rows of a batch on
their own. None loops over nodes, only a verdict over its tokens. None is read
by the host.

Nodes stand in the order of their insertion, so a parent stands before its
children. Of two nodes the *more probable* is the one with the higher weight
and, between equal weights, the one with the lower index. A parent is thus
always more probable than its children, and the most probable nodes of a tree
are connected. A *candidate* has a weight; an *expanded* node has the draft's
children, as far as they were kept, and its keys and values in the draft's
cache, too. What is above an expanded node is expanded.

Candidates may have children that a text suggested (`add_chain`). As a parent
is more probable than its children, the best candidates of a tree include all
candidates above them: one forward takes the whole chain. And what a full tree
drops first has no children.

The cache holds the verified prefix and right after it one row for each
expanded node, in the order of expansion. The root is a node like any other:
it gets its row when it is expanded, and that row becomes part of the prefix
with the next verdict. `docs/how_it_works/token_tree.md` follows an example.

Legend: B rows of the batch, N nodes of a tree, M rows of the cache for them,
W leaves of one expansion, K children of a leaf, T tokens sent or verified.
"""

from swiftspec_jax.tree.chains import add_chain
from swiftspec_jax.tree.growth import (
  DraftFn,
  Leaves,
  best_candidates,
  expand,
  expand_best,
  grow,
  leaf_mass,
  root_leaves,
)
from swiftspec_jax.tree.rerooting import (
  HIT,
  LATE_HIT,
  MISS,
  NUM_OUTCOMES,
  Reroot,
  reroot,
)
from swiftspec_jax.tree.selection import select
from swiftspec_jax.tree.state import (
  CANDIDATE,
  EMPTY,
  EXPANDED,
  NO_NODE,
  NO_SLOT,
  ROOT_INDEX,
  DraftTree,
  ancestor_mask,
  new_tree,
)
from swiftspec_jax.tree.types import NO_PARENT
