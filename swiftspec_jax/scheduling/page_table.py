"""The pages of the rows in the slots of an engine."""

from collections.abc import Sequence

import numpy as np

from swiftspec_jax.scheduling import pages as pages_lib

NO_PAGE = -1


class PageTable:
  """Gives pages to slots, shares full ones, and takes them back.

  Attributes:
    pages: i32[slots, pages of the longest row], -1 where there is none.
    num_owned: i64[slots] pages.
  """

  def __init__(
    self, num_slots: int, num_pages: int, page_size: int, max_context: int
  ):
    self._page_size = page_size
    self._allocator = pages_lib.PageAllocator(num_pages)
    self.pages = np.full(
      (num_slots, self.count(max_context)), NO_PAGE, np.int32
    )
    self.num_owned = np.zeros(num_slots, np.int64)
    self._keys: list[list[bytes]] = [[] for _ in range(num_slots)]
    self._num_keys = np.zeros(num_slots, np.int64)
    self._num_remembered = np.zeros(num_slots, np.int64)

  @property
  def num_free(self) -> int:
    return self._allocator.num_free

  def count(self, num_tokens):
    """Returns the number of pages of some tokens; also of an array."""
    return -(-num_tokens // self._page_size)

  def keys(self, slot: int) -> list[bytes]:
    """Returns the keys of the full pages of a row, as far as they are known."""
    return self._keys[slot]

  def add_keys(self, slot: int, keys: Sequence[bytes]) -> None:
    """Takes the keys of the next pages that a row has filled."""
    self._keys[slot] += keys
    self._num_keys[slot] += len(keys)

  def find(self, keys: Sequence[bytes], num_known: int) -> list[int]:
    """Returns pages that hold the start of a text of `num_known` tokens.

    At least the last token is left out: it has to be fed, for what follows it.
    """
    return self._allocator.find(keys[: (num_known - 1) // self._page_size])

  def forget(self) -> None:
    """Forgets what pages hold that no row owns; only without rows."""
    self._allocator.forget()

  def num_missing(self, num_known: int, shared: list[int]) -> int:
    """Returns how many free pages a text takes that begins with `shared`."""
    missing = self.count(num_known) - len(shared)
    return missing + self._allocator.num_idle(shared)

  def begin(self, slot: int, keys: list[bytes], shared: list[int]) -> int:
    """Gives an empty slot to a row; returns its tokens in the cache.

    Args:
      slot: without pages.
      keys: keys of the full pages of its text.
      shared: pages that `find` returned.
    """
    self._allocator.share(shared)
    self.pages[slot, : len(shared)] = shared
    self.num_owned[slot] = self._num_remembered[slot] = len(shared)
    self._keys[slot] = keys
    self._num_keys[slot] = len(keys)
    return len(shared) * self._page_size

  def own(self, slots: np.ndarray, num_tokens: np.ndarray) -> None:
    """Allocates the pages that rows lack for their tokens."""
    wanted = self.count(num_tokens) - self.num_owned[slots]
    lacks = wanted > 0
    if not lacks.any():
      return
    slots, wanted = slots[lacks], wanted[lacks]
    pages = self._allocator.allocate(int(wanted.sum()))
    ends = self.num_owned[slots] = self.num_owned[slots] + wanted
    # Each row's own pages are a run that ends with its last one.
    columns = np.repeat(ends - wanted.cumsum(), wanted) + np.arange(len(pages))
    self.pages[slots.repeat(wanted), columns] = pages

  def remember(self, slots: np.ndarray, num_cached: np.ndarray) -> None:
    """Notes what is in the pages that the tokens in the cache have filled.

    Args:
      slots: i64[R].
      num_cached: i64[R].
    """
    num_full = np.minimum(num_cached // self._page_size, self._num_keys[slots])
    for i in np.flatnonzero(num_full > self._num_remembered[slots]).tolist():
      slot, start = int(slots[i]), int(self._num_remembered[slots[i]])
      keys = self._keys[slot][start : int(num_full[i])]
      pages = self.pages[slot, start : start + len(keys)].tolist()
      for page, key in zip(pages, keys, strict=True):
        self._allocator.remember(page, key)
      self._num_remembered[slot] += len(keys)

  def trim(self, slots: np.ndarray, num_tokens: np.ndarray) -> None:
    """Takes back the pages after the tokens that are kept."""
    kept = self.count(num_tokens)
    for i in np.flatnonzero(self.num_owned[slots] > kept).tolist():
      self.disown(int(slots[i]), int(kept[i]))

  def disown(self, slot: int, kept: int = 0) -> None:
    """Takes back all pages of a row but the first ones."""
    owned = int(self.num_owned[slot])
    self._allocator.free(self.pages[slot, kept:owned].tolist())
    self.pages[slot, kept:owned] = NO_PAGE
    self.num_owned[slot] = kept
