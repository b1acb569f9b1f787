"""What the `arg_specs` of all kernels have in common."""

import abc
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

Arrays = tuple[Any, ...]  # pytree of the arguments of a call


# Rows of a batch that are compared at most: each is work of its own.
MOST_ROWS = 8


def next_power_of_2(size: int) -> int:
  """Returns the least power of two that is not below a positive size."""
  return 1 << (size - 1).bit_length()


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallSpec(abc.ABC):
  """The arguments of one call of a kernel, on one device.

  Attributes:
    name: name of the shape, for people.
    ROUNDED: names of the fields that count rows. Numbers with the same next
      power of two count as the same shape.
    DONATED: arguments whose place the last results take.
  """

  name: str
  ROUNDED: ClassVar[tuple[str, ...]] = ('batch_size', 'num_tokens')
  DONATED: ClassVar[tuple[int, ...]] = ()

  @property
  def package(self) -> str:
    """The name of the package of the kernel."""
    return type(self).__module__.rpartition('.')[0]

  @abc.abstractmethod
  def arrays(self) -> Arrays:
    """Returns the abstract arguments."""

  @property
  def num_bytes(self) -> int:
    """Bytes that a call reads and writes at least: here of the arguments."""
    leaves = jax.tree.leaves(self.arrays())
    return sum(x.size * x.dtype.itemsize for x in leaves)

  @property
  def num_flops(self) -> int:
    """Operations of the products."""
    return 0

  def options(self) -> dict[str, Any]:
    """Returns the keyword arguments."""
    return {}

  def shape_class(self) -> dict[str, Any]:
    """Returns what the code of kernels depends on, in a form JSON knows."""
    sizes = dataclasses.asdict(self)
    del sizes['name']
    for name in self.ROUNDED:
      if name in sizes:
        sizes[name] = next_power_of_2(sizes[name])
    return sizes

  def small(self) -> Self:
    """Returns a small call with the dtypes of this one.

    Kernels in C++ have the same code for all sizes.
    """
    return self

  @functools.partial(jax.jit, static_argnums=0)
  def make_arrays(self, key: jax.Array, **meaning: Any) -> Arrays:
    """Returns random arguments with such a meaning; the key is consumed."""
    abstract, treedef = jax.tree.flatten(self.arrays())
    keys = jax.random.split(key, len(abstract))
    leaves = [None] * len(abstract)
    for like in dict.fromkeys(abstract):
      # At once: for 64 caches one by one, XLA compiles for minutes on GPUs.
      places = [i for i, x in enumerate(abstract) if x == like]
      values = jax.vmap(functools.partial(_random, abstract=like))(
        keys[np.array(places)]
      )
      for place, value in zip(places, values, strict=True):
        leaves[place] = value
    return self.with_meaning(*treedef.unflatten(leaves), **meaning)

  def suits(self, implementation: str) -> bool:
    """Returns whether an implementation is made for such a shape."""
    del implementation
    return True

  def with_meaning(self, *arrays: Any) -> Arrays:
    """Returns random arguments with those replaced that have a meaning."""
    return arrays

  def draws(self, key: jax.Array) -> Iterator[Arrays]:
    """Yields arguments to compare implementations at; the key is consumed."""
    yield from map(self.make_arrays, jax.random.split(key))


def _random(key, abstract):
  if abstract.dtype == jnp.float8_e4m3fn:
    return jax.random.normal(key, abstract.shape).astype(abstract.dtype)
  if jnp.issubdtype(abstract.dtype, jnp.floating):
    return jax.random.normal(key, abstract.shape, abstract.dtype)
  if abstract.dtype == jnp.bool_:
    return jax.random.bernoulli(key, shape=abstract.shape)
  if abstract.dtype in (jnp.int8, jnp.int4):  # weights
    values = jax.random.randint(key, abstract.shape, -7, 8)
    return values.astype(abstract.dtype)
  return jax.random.randint(key, abstract.shape, 0, 1_000)
