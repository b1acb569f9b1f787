"""Where the nodes of a drawn tree go: columns by depth, rows packed."""

from collections.abc import Collection, Mapping, Sequence

from experiments.pictures.tree_rounds import Node


def choose(nodes: Sequence[Node], max_nodes: int) -> set[int]:
  """Returns the nodes to be drawn; with a node, its parent is drawn, too.

  Those that were sent and those on the path of the verdict always are, then
  the most probable ones, up to `max_nodes`.
  """
  chosen = {
    i for i, node in enumerate(nodes) if node.is_sent or node.parent is None
  }
  for i, node in enumerate(nodes):
    if node.is_accepted or node.is_next:
      chosen.add(i)
  # No child is more probable than its parent, nor does it stand before it.
  for i in sorted(range(len(nodes)), key=lambda i: (-nodes[i].log_prob, i)):
    if len(chosen) >= max_nodes:
      break
    chosen.add(i)
  return chosen


def children_of(
  nodes: Sequence[Node], chosen: Collection[int]
) -> dict[int, list[int]]:
  """Returns the chosen children of each chosen node, in the order of drawing.

  The one that the verdict passes comes first, then the most probable ones.
  """

  def order(i):
    is_passed = nodes[i].is_accepted or nodes[i].is_next
    return not is_passed, -nodes[i].log_prob, i

  children = {i: [] for i in sorted(chosen)}
  for i in sorted(chosen, key=order):
    if nodes[i].parent is not None:
      children[nodes[i].parent].append(i)
  return children


def rows_of(
  children: Mapping[int, Sequence[int]], root: int = 0
) -> dict[int, int]:
  """Returns the row of each node.

  The first child is in its parent's row, so the path of the verdict is a
  straight line. A later one is as high up as its subtree has room below those
  before it.
  """
  return {
    node: row for node, (_, row) in _place(children, root, column=0).items()
  }


def _place(children, node, column):
  """Returns (column, row) of the nodes of a subtree, whose root has row 0."""
  places = {node: (column, 0)}
  bottoms = {}
  for child in children[node]:
    subtree = _place(children, child, column + 1)
    tops = {}
    for place_column, row in subtree.values():
      tops[place_column] = min(row, tops.get(place_column, row))
    shift = max(bottoms.get(c, -1) + 1 - top for c, top in tops.items())
    for i, (place_column, row) in subtree.items():
      places[i] = (place_column, row + max(shift, 0))
      bottoms[place_column] = max(
        row + max(shift, 0), bottoms.get(place_column, 0)
      )
  return places
