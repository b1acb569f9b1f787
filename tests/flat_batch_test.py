"""Steps as flat lists: the devices lay tokens out as the host does."""

import dataclasses

import jax
import numpy as np
import pytest

from swiftspec_jax.step import ragged_batch

SIZES = ragged_batch.StepSizes(
  num_rows=5, num_tokens=40, block_size=8, context=48
)
PAGE_SIZE, NUM_PAGES = 8, 60
pack_tokens = jax.jit(ragged_batch.pack_tokens, static_argnums=0)


@pytest.mark.parametrize('counts', [[1], [8, 3, 17, 2], [1, 29, 1, 2, 7]])
def test_devices_lay_tokens_out_as_the_host_does(counts):
  rng = np.random.default_rng(0)
  counts, num_rows = np.array(counts), len(counts)
  starts = rng.integers(0, 48 - counts)
  table = rng.permutation(NUM_PAGES)[:30].reshape(5, 6).astype(np.int32)
  want = ragged_batch.pack(
    SIZES, starts, counts, table[:num_rows], PAGE_SIZE, NUM_PAGES
  )
  starts, padded_counts = (ragged_batch.padded(x, 5) for x in (starts, counts))
  got, tokens, first = pack_tokens(SIZES, starts, padded_counts, table)
  total, is_block = counts.sum(), want.block_lengths > 0
  for name in ('positions', 'block_lengths', 'block_places', 'blocks_before'):
    np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
  np.testing.assert_array_equal(
    got.block_pages[is_block], want.block_pages[is_block]
  )
  is_token = np.arange(8) < want.block_lengths[:, None]
  np.testing.assert_array_equal(
    got.block_tokens[is_token], want.block_tokens[is_token]
  )
  np.testing.assert_array_equal(tokens.is_real, np.arange(40) < total)
  np.testing.assert_array_equal(first[:num_rows], counts.cumsum() - counts)


def test_blocks_are_those_of_the_slots_where_these_have_rows():
  """A chunk beside rows that decode, and a slot that rests."""
  starts, counts = np.array([[9, 0, 4, 7], [1, 0, 6, 2]], np.int32)
  in_order = dataclasses.replace(SIZES, num_rows=4, num_tokens=32)
  compact = dataclasses.replace(in_order, num_tokens=12)
  want, *_ = pack_tokens(in_order, starts, counts, None)
  got, *_ = pack_tokens(compact, starts, counts, None)
  assert want.block_tokens is None
  for batch in (got, want):
    np.testing.assert_array_equal(batch.block_lengths, counts)
  is_token = np.arange(8) < counts[:, None]
  np.testing.assert_array_equal(
    got.in_blocks(got.positions)[is_token],
    want.in_blocks(want.positions)[is_token],
  )
  np.testing.assert_array_equal(
    got.of_blocks(want.in_blocks(want.positions))[:9], got.positions[:9]
  )
