"""Thresholds of top-k and top-p as Pallas Triton kernels for NVIDIA GPUs.

A row of logits fits into no multiprocessor, so that all of them share it: each
program measures its tile for 16 candidates at once, and the one that ends last
adds these up and takes the next four bits of the threshold. A search has eight
such launches, which read the logits from the cache of the device.

Legend: N rows of all queries, V vocabulary, K block_vocab, P programs of a row
(L with padding), C candidates.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas import last_program, tiles
from kernels_pallas.thresholds import exact


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(tiles.Config):
  """Tiles of the kernel."""

  block_vocab: int = tiles.power((512, 1024, 2048), 1024)  # tokens of a program
  # Bits of the threshold that a launch finds up to 8.
  num_bits: int = tiles.power((2, 4), 4)
  num_warps: int = tiles.power((4, 8), 8)  # warps of a program

  def __post_init__(self):
    super().__post_init__()
    if self.num_bits > 8:
      raise ValueError(f'num_bits={self.num_bits} must be 8 at most')


check = exact.check


def find_thresholds(
  logits: jax.Array,
  top_ks: jax.Array | None,
  top_ps: jax.Array | None,
  *,
  config: Config = Config(),
  interpret: bool = False,
) -> jax.Array:
  """See `api.find_thresholds`; raises NotImplementedError as `check`."""
  check(logits)
  batch, num_queries, vocab_size = logits.shape
  num_rows = batch * num_queries
  rows = logits.reshape(num_rows, vocab_size)
  search = functools.partial(_search, rows, config=config, interpret=interpret)

  def of_queries(values):
    return jnp.repeat(values.astype(jnp.float32), num_queries)

  least = jnp.full((num_rows,), exact.LEAST, jnp.int32)
  if top_ks is not None:
    least = search(None, least, of_queries(top_ks))
  if top_ps is not None:
    found = search(rows.max(axis=1), least, of_queries(top_ps))
    least = jnp.maximum(least, found)
  return exact.logits_of(least).reshape(batch, num_queries)


def _search(rows, highest, least, goals, *, config, interpret):
  """Returns keys i32[N].

  Args:
    rows: f32[N, V].
    highest: f32[N] highest logits, for weights of tokens; None counts tokens.
    least: i32[N] least keys; tokens with lower keys do not count.
    goals: f32[N] numbers of tokens; with weights, shares of their sum.
    config: tiles.
    interpret: whether the interpreter runs it.
  """
  num_rows, vocab_size = rows.shape
  num_programs = pl.cdiv(vocab_size, config.block_vocab)
  has_weights = highest is not None
  of_row = pl.BlockSpec((None,), lambda n, p: (n,))
  counters, counter = last_program.counters(num_rows, lambda n, _: n)
  sums_shape = (
    1 + has_weights,
    pl.next_power_of_2(num_programs),
    2**config.num_bits,
  )
  keys = jnp.full((num_rows,), exact.LEAST, jnp.int32)
  inputs = [least, goals, *([highest] if has_weights else [])]
  # The launches differ in their arguments only, and are compiled once.
  for shift in reversed(range(0, 32, config.num_bits)):
    keys, _ = pl.pallas_call(
      functools.partial(_kernel, config=config, interpret=interpret),
      grid=(num_rows, num_programs),
      in_specs=[
        pl.BlockSpec((None,), lambda n, p: (0,)),
        of_row,
        counter,
        pl.BlockSpec((None, vocab_size), lambda n, p: (n, 0)),
        *[of_row] * len(inputs),
      ],
      out_specs=[
        of_row,
        pl.BlockSpec((None, *sums_shape), lambda n, p: (n, 0, 0, 0)),
      ],
      out_shape=[
        jax.ShapeDtypeStruct(keys.shape, jnp.int32),
        jax.ShapeDtypeStruct((num_rows, *sums_shape), jnp.int32),
      ],
      compiler_params=plgpu.CompilerParams(num_warps=config.num_warps),
      interpret=interpret,
      name='find_thresholds',
    )(jnp.full(1, shift, jnp.int32), keys, counters, rows, *inputs)
  return keys


def _kernel(
  # Inputs:
  shift,  # i32[] place of the bits that this launch finds
  key,  # i32[] the bits found so far
  num_done,  # i32[1]
  logits,  # f32[V]
  least,  # i32[]
  goal,  # f32[]
  *refs,  # highest f32[] where there are weights, then the outputs:
  # found i32[], sums i32[1 or 2, L, C] of each program
  config: Config,
  interpret: bool,
):
  *highest, found, sums = refs
  num_limbs, padded_programs, num_candidates = sums.shape
  num_programs = pl.cdiv(logits.shape[0], config.block_vocab)
  program = pl.program_id(1)
  token = program * config.block_vocab + jnp.arange(config.block_vocab)
  candidate = jnp.arange(num_candidates)
  # The first one is known to be enough; it measures all tokens instead.
  candidates = jnp.where(
    candidate == 0, exact.LEAST, key[()] + (candidate << shift[()])
  )
  values = plgpu.load(
    logits.at[token], mask=token < logits.shape[0], other=-jnp.inf
  )
  keys = exact.keys_of(values)
  counts = keys >= least[()]
  is_kept = counts[None] & (keys[None] >= candidates[:, None])
  limbs = [jnp.ones_like(token)]
  if num_limbs > 1:
    top = jnp.broadcast_to(highest[0][()], values.shape)
    limbs = exact.limbs_of(exact.weights_of(values, top))
  for i, limb in enumerate(limbs):
    sums[i, program] = jnp.where(is_kept, limb[None], 0).sum(axis=1)

  @pl.when(last_program.is_last(num_done, num_programs, interpret=interpret))
  def _():
    row = jnp.arange(padded_programs)
    is_program = jnp.broadcast_to(
      (row < num_programs)[:, None], (padded_programs, num_candidates)
    )
    parts = [
      plgpu.load(
        sums.at[i, row[:, None], candidate[None]], mask=is_program, other=0
      )
      for i in range(num_limbs)
    ]
    goal_sum = goal[()]
    if num_limbs > 1:
      measures = exact.add_up(*parts, (0,), keepdims=False)
      is_first = candidate == 0
      goal_sum *= jnp.where(is_first, measures, jnp.float32(0)).sum()
    else:
      measures = parts[0].sum(axis=0).astype(jnp.float32)
    is_enough = (measures >= goal_sum) & (candidate > 0)
    digit = is_enough.astype(jnp.int32).sum()
    found[()] = key[()] + (digit << shift[()])
