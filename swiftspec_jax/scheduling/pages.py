"""Pages of the KV cache: fixed runs of tokens, handed out, shared, taken back.

A page that is full can be remembered under a key, which stands for its tokens
and all before them. Requests that begin alike share such pages. A page that
nobody owns keeps its content until it is needed: pages without a key are handed
out first, then those that have been free for longest.
"""

import collections
import hashlib
from collections.abc import Sequence

import numpy as np


def keys_of(
  token_ids: Sequence[int] | np.ndarray, page_size: int, before: bytes = b''
) -> list[bytes]:
  """Returns the keys of the full pages of a text.

  Args:
    token_ids: tokens of the text, or of what follows some full pages; i32[n, m]
      where a token alone does not say what it stands for.
    page_size: tokens of a page.
    before: key of the page before; empty at the start of the text.
  """
  keys = []
  for start in range(0, len(token_ids) - page_size + 1, page_size):
    tokens = np.array(token_ids[start : start + page_size], np.int32)
    before = hashlib.blake2b(before + tokens.tobytes(), digest_size=16).digest()
    keys.append(before)
  return keys


class PageAllocator:
  """Knows who owns which pages, and what full ones hold."""

  def __init__(self, num_pages: int):
    # What is handed out next stands first.
    self._free = collections.OrderedDict.fromkeys(range(num_pages))
    self._num_owners = np.zeros(num_pages, np.int64)
    self._keys: list[bytes | None] = [None] * num_pages
    self._pages: dict[bytes, int] = {}

  @property
  def num_pages(self) -> int:
    return len(self._keys)

  @property
  def num_free(self) -> int:
    """Pages without an owner, those included that still hold something."""
    return len(self._free)

  def allocate(self, count: int) -> list[int]:
    """Returns pages that nobody owns, and forgets what they held.

    Raises:
      ValueError: there are fewer; the caller has to ask `num_free`.
    """
    if not 0 <= count <= len(self._free):
      raise ValueError(f'{count} pages wanted, {len(self._free)} are free')
    pages = [self._free.popitem(last=False)[0] for _ in range(count)]
    for page in pages:
      if self._keys[page] is not None:
        self._pages.pop(self._keys[page], None)
        self._keys[page] = None
    self._num_owners[pages] = 1
    return pages

  def free(self, pages: list[int]) -> None:
    """Takes pages back from one owner.

    Raises:
      ValueError: one of them is free already.
    """
    if not self._num_owners[pages].all():
      raise ValueError(f'freed twice, among pages {pages}')
    self._num_owners[pages] -= 1
    # The start of a text is worth more than its end.
    for page in reversed(pages):
      if not self._num_owners[page]:
        self._free[page] = None
        if self._keys[page] is None:
          self._free.move_to_end(page, last=False)

  def remember(self, page: int, key: bytes) -> None:
    """Notes what an owned page holds; of equal pages the first is shared."""
    if key not in self._pages:
      self._pages[key] = page
      self._keys[page] = key

  def find(self, keys: Sequence[bytes]) -> list[int]:
    """Returns the pages of the longest known start of a text."""
    pages = []
    for key in keys:
      if key not in self._pages:
        break
      pages.append(self._pages[key])
    return pages

  def forget(self) -> None:
    """Forgets what pages hold."""
    self._keys = [None] * self.num_pages
    self._pages = {}

  def num_idle(self, pages: list[int]) -> int:
    """Returns how many of the pages have no owner."""
    return int(np.count_nonzero(self._num_owners[pages] == 0))

  def share(self, pages: list[int]) -> None:
    """Gives pages that `find` returned one more owner."""
    for page in pages:
      self._free.pop(page, None)
    self._num_owners[pages] += 1
