"""Kernels that `experiments.kernels` times, and what else does the same.

Legend as in the kernels: B rows, T tokens, S cache capacity, G kv heads, Q
query heads for each, E head_dim.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import paged_attention

from experiments.aot.kernels import KERNELS
from experiments.kernels import kernel_timing
from kernels_pallas import dispatch, registry, tuning
from kernels_pallas.call_spec import Arrays, CallSpec
from kernels_pallas.tree_attention import reference as attention_reference


def _same(*arrays):
  return arrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
  """One way to do a call.

  Attributes:
    name: name for the table.
    call: function of the arrays that `prepare` returns.
    prepare: gives the arguments the form that suits this one; not timed.
    is_baseline: whether it is of a library, and not of this project.
  """

  name: str
  call: Callable[..., Any]
  prepare: Callable[..., Arrays] = _same
  is_baseline: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A kernel at a shape.

  Attributes:
    kernel: name of the kernel.
    spec: one of the kernel's `arg_specs`.
  """

  kernel: str
  spec: CallSpec

  def make_sets(self, prepare: Callable[..., Arrays] = _same) -> list[Arrays]:
    """Returns sets of random arguments, too large for caches but on CPUs."""
    num_sets = 2
    if jax.default_backend() != 'cpu':
      leaves = jax.tree.leaves(self.spec.arrays())
      set_bytes = sum(x.size * x.dtype.itemsize for x in leaves)
      num_sets = kernel_timing.num_sets(self.spec.num_bytes, set_bytes)
    keys = jax.random.split(jax.random.key(0), num_sets)
    return [prepare(*self.spec.make_arrays(key)) for key in keys]

  def seconds_of(self, contender: Contender, repeats: int) -> float:
    """Returns the seconds of a call by a contender."""
    donated = self.spec.DONATED
    program = jax.jit(contender.call, donate_argnums=donated)
    sets = self.make_sets(contender.prepare)
    return kernel_timing.seconds_of(program, sets, repeats, donated)

  def kernels(self, platform: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields the implementations for the platform that the shape suits."""
    for name, call in KERNELS[self.kernel][1].items():
      is_of_platform = name in dispatch.implementations_of(platform)
      if is_of_platform and self.spec.suits(name):
        yield name, call

  def contenders(self, platform: str) -> Iterator[Contender]:
    """Yields the reference, the kernel for the platform and the baselines."""
    options = self.spec.options()
    yield Contender(
      name='reference',
      call=functools.partial(
        registry.function(self.kernel, 'reference'), **options
      ),
    )
    for name, call in self.kernels(platform):
      call = functools.partial(call, **options)
      yield Contender(name=name, call=tuning.tuned(self.kernel, name, call))
    # The baselines have no attention sinks.
    if getattr(self.spec, 'has_sinks', False):
      return
    if self.kernel == 'tree_attention':
      yield from _attention_baselines(self.spec, platform)
    if self.kernel == 'paged_attention':
      yield from _paged_baselines(self.spec, platform)
    if self.kernel in _PRODUCTS:
      yield Contender(
        name='jnp.dot bfloat16',
        call=jnp.dot,
        prepare=_PRODUCTS[self.kernel],
        is_baseline=True,
      )


def cases(kernel: str) -> Iterator[Case]:
  """Yields the cases of a kernel."""
  return (Case(kernel=kernel, spec=spec) for spec in KERNELS[kernel][0])


def _attention_baselines(spec, platform):
  """Yields what JAX itself has for attention, in the form that it wants."""
  on_gpu = 'pallas_gpu' in dispatch.implementations_of(platform)
  is_one = spec.num_tokens == spec.tree_size == 1 and spec.window is None
  for implementation in ('xla', *(['cudnn'] if on_gpu else [])):
    yield Contender(
      name=f'jax.nn {implementation}',
      call=functools.partial(
        _attend_to_lengths if is_one else jax.nn.dot_product_attention,
        scale=spec.head_dim**-0.5,
        implementation=implementation,
      ),
      prepare=_with_lengths
      if is_one
      else functools.partial(_heads_last, window=spec.window),
      is_baseline=True,
    )


def _paged_baselines(spec, platform):
  """Yields the kernel that JAX ships, of one token and without a window."""
  if platform == 'tpu' and spec.num_tokens == 1 and spec.window is None:
    yield Contender(
      name='jax pallas paged',
      call=_paged,
      prepare=functools.partial(_heads_first, spec.num_kv_heads),
      is_baseline=True,
    )


def _heads_first(num_kv_heads, queries, keys, values, table, lengths, *rest):
  """Returns scaled queries [X, H, E], pages [G, P, Z, E], lengths and table."""
  del rest
  head_dim = queries.shape[4]

  def apart(pages):
    pages = pages.reshape(*pages.shape[:2], num_kv_heads, head_dim)
    return jnp.moveaxis(pages, 2, 0)

  queries = queries[:, 0].reshape(len(queries), -1, head_dim)
  return (
    queries * head_dim**-0.5,
    apart(keys),
    apart(values),
    lengths + 1,
    table,
  )


def _heads_last(
  queries, keys, values, lengths, mask, positions, *, window=None
):
  """Returns [B, T, H, E], twice [B, S, G, E], None and bool[B, 1, T, S]."""
  visible = attention_reference.visible_rows(lengths, mask, keys.shape[2])
  if window is not None:
    rows = jnp.arange(keys.shape[2])[None, None]
    visible &= positions[:, :, None] - rows < window
  return (
    queries.reshape(*queries.shape[:2], -1, queries.shape[4]),
    jnp.swapaxes(keys, 1, 2),
    jnp.swapaxes(values, 1, 2),
    None,
    visible[:, None],
  )


def _with_lengths(queries, keys, values, lengths, mask, positions):
  """Returns [B, 1, H, E], twice [B, S, G, E] and i32[B]: no mask for one."""
  *heads, _, _ = _heads_last(queries, keys, values, lengths, mask, positions)
  return *heads, lengths + 1


def _attend_to_lengths(queries, keys, values, lengths, **options):
  return jax.nn.dot_product_attention(
    queries, keys, values, key_value_seq_lengths=lengths, **options
  )


def _paged(queries, keys, values, lengths, table):
  num_pages = table.shape[1]
  block = max(n for n in (1, 2, 4, 8) if num_pages % n == 0)
  return paged_attention.paged_attention(
    queries, keys, values, lengths, table, pages_per_compute_block=block
  )


def _dequantized(x, *others):
  """Returns rows [T, K] and a weight [K, P * N] in bfloat16."""
  *_, values, _ = others  # [P, K, N] and scales
  matrix = jnp.moveaxis(values, 0, 1).reshape(x.shape[1], -1)
  return x.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16)


def _gate_beside_up(x, gate_up):
  """Returns rows [N, D] and a weight [D, 2 * F] in bfloat16."""
  matrix = gate_up.reshape(x.shape[1], -1)
  return x.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16)


_PRODUCTS = {
  'quantized_matmul': _dequantized,
  'swiglu': _gate_beside_up,
}
