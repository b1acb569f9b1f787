"""Pages of the KV cache: fixed runs of tokens, handed out and taken back."""

import numpy as np


class PageAllocator:
  """Knows which pages are free; a page has one owner."""

  def __init__(self, num_pages: int):
    # Popped from the end: low pages first.
    self._free = list(range(num_pages - 1, -1, -1))
    self._is_used = np.zeros(num_pages, bool)

  @property
  def num_pages(self) -> int:
    return len(self._is_used)

  @property
  def num_free(self) -> int:
    return len(self._free)

  def allocate(self, count: int) -> list[int]:
    """Returns pages that nobody owns.

    Raises:
      ValueError: there are not so many; the caller has to ask `num_free`.
    """
    if not 0 <= count <= len(self._free):
      raise ValueError(f'{count} pages wanted, {len(self._free)} are free')
    start = len(self._free) - count
    pages = self._free[start:][::-1]
    del self._free[start:]
    self._is_used[pages] = True
    return pages

  def free(self, pages: list[int]) -> None:
    """Takes pages back.

    Raises:
      ValueError: one of them is free already.
    """
    if not self._is_used[pages].all():
      raise ValueError(f'freed twice, among pages {pages}')
    self._is_used[pages] = False
    self._free += reversed(pages)
