"""Keys and values of all layers in as few calls as there are shapes."""

import collections
from collections.abc import Callable, Sequence

import jax

Arrays = Sequence[jax.Array]


def apply(
  fn: Callable[[Arrays], Arrays], keys: Arrays, values: Arrays
) -> dict[str, list[jax.Array]]:
  """Returns `keys` and `values`, as fields of a cache, after a function.

  Args:
    fn: function of arrays of one shape; returns as many in their order.
    keys: keys of the layers.
    values: values of the layers.
  """
  arrays, by_shape = [*keys, *values], collections.defaultdict(list)
  for i, array in enumerate(arrays):
    by_shape[array.shape].append(i)
  for places in by_shape.values():
    for i, new in zip(places, fn([arrays[i] for i in places]), strict=True):
      arrays[i] = new
  return {'keys': arrays[: len(keys)], 'values': arrays[len(keys) :]}


def of_pairs(
  pairs: Sequence[Sequence[jax.Array]],
) -> dict[str, list[jax.Array]]:
  """Returns `keys` and `values`, as fields of a cache, of one pair a layer."""
  return {'keys': [k for k, _ in pairs], 'values': [v for _, v in pairs]}
