"""Declared sizes of an engine's programs."""

import numpy as np
import pytest
from decoding_cases import sizes_of


def make_sizes(num_pages):
  buckets = {'rows': (1, 4), 'query_tokens': (8,), 'lengths': (0, 1)}
  return sizes_of(num_pages, 60, 4, (16, 64), **buckets)


def test_every_number_of_positions_is_in_the_range_of_its_context():
  sizes = make_sizes(64)
  for context in sizes.contexts:
    fewest, most = sizes.range_of(context)
    for positions in range(1, 61):
      is_inside = fewest <= positions <= most
      assert is_inside == (sizes.context_of(positions) == context)


@pytest.mark.parametrize('num_pages', [64, 20])
def test_made_up_rows_have_pages_of_their_own_while_there_are_any(num_pages):
  pages = make_sizes(num_pages).made_up_pages()
  assert pages.shape == (4, 16)
  assert len(np.unique(pages)) == num_pages
  assert pages.max() < num_pages
