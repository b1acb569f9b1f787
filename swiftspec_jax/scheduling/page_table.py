"""The pages of the rows in the slots of an engine.

A page that is full can be remembered under a key, which stands for its tokens
and all before them (`keys_of`). Requests that begin alike share such
pages. A page that nobody owns keeps its content until it is needed: pages
without a key are handed out first, then those that have been free for longest.
"""

import collections
import hashlib
from collections.abc import Sequence

import numpy as np

from swiftspec_jax.scheduling.scheduler_config import SchedulerConfig

NO_PAGE = -1


def keys_of(
  token_ids: Sequence[int], page_size: int, before: bytes = b''
) -> list[bytes]:
  """Returns the keys of the full pages of a text.

  Args:
    token_ids: tokens of the text, or of what follows some full pages.
    page_size: tokens of a page.
    before: key of the page before; empty at the start of the text.
  """
  keys = []
  for start in range(0, len(token_ids) - page_size + 1, page_size):
    tokens = np.array(token_ids[start : start + page_size], np.int32)
    before = hashlib.blake2b(before + tokens.tobytes(), digest_size=16).digest()
    keys.append(before)
  return keys


class PageTable:
  """Gives pages to slots, shares full ones, and takes them back.

  Attributes:
    pages: i32[slots, pages of the longest row], -1 where there is none.
    num_owned: i64[slots] pages.
  """

  def __init__(self, config: SchedulerConfig):
    num_slots, num_pages = config.buckets.max_rows, config.num_pages
    self._page_size = config.page_size
    # Of all pages; what is handed out next stands first among the free ones.
    self._free = collections.OrderedDict.fromkeys(range(num_pages))
    self._num_owners = np.zeros(num_pages, np.int64)
    self._held: list[bytes | None] = [None] * num_pages
    self._pages_of: dict[bytes, int] = {}
    shape = num_slots, self.count(config.max_context)
    self.pages = np.full(shape, NO_PAGE, np.int32)
    self.num_owned = np.zeros(num_slots, np.int64)
    self._keys: list[list[bytes]] = [[] for _ in range(num_slots)]
    self._num_keys = np.zeros(num_slots, np.int64)
    self._num_remembered = np.zeros(num_slots, np.int64)

  @property
  def num_free(self) -> int:
    """Pages without an owner, those included that still hold something."""
    return len(self._free)

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
    pages = []
    for key in keys[: (num_known - 1) // self._page_size]:
      if key not in self._pages_of:
        break
      pages.append(self._pages_of[key])
    return pages

  def forget(self) -> None:
    """Forgets what pages hold that no row owns; only without rows."""
    self._held = [None] * len(self._held)
    self._pages_of = {}

  def num_missing(self, num_known: int, shared: list[int]) -> int:
    """Returns how many free pages a text takes that begins with `shared`."""
    missing = self.count(num_known) - len(shared)
    return missing + int(np.count_nonzero(self._num_owners[shared] == 0))

  def begin(self, slot: int, keys: list[bytes], shared: list[int]) -> int:
    """Gives an empty slot to a row; returns its tokens in the cache.

    Args:
      slot: without pages.
      keys: keys of the full pages of its text.
      shared: pages that `find` returned.
    """
    for page in shared:
      self._free.pop(page, None)
    self._num_owners[shared] += 1
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
    pages = self._allocate(int(wanted.sum()))
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
        if key not in self._pages_of:  # of equal pages the first is shared
          self._pages_of[key] = page
          self._held[page] = key
      self._num_remembered[slot] += len(keys)

  def trim(self, slots: np.ndarray, num_tokens: np.ndarray) -> None:
    """Takes back the pages after the tokens that are kept."""
    kept = self.count(num_tokens)
    for i in np.flatnonzero(self.num_owned[slots] > kept).tolist():
      self.disown(int(slots[i]), int(kept[i]))

  def disown(self, slot: int, kept: int = 0) -> None:
    """Takes back all pages of a row but the first ones."""
    owned = int(self.num_owned[slot])
    pages = self.pages[slot, kept:owned].tolist()
    self._num_owners[pages] -= 1
    # The start of a text is worth more than its end.
    for page in reversed(pages):
      if not self._num_owners[page]:
        self._free[page] = None
        if self._held[page] is None:
          self._free.move_to_end(page, last=False)
    self.pages[slot, kept:owned] = NO_PAGE
    self.num_owned[slot] = kept

  def _allocate(self, count: int) -> list[int]:
    """Returns pages that nobody owns, and forgets what they held.

    Raises:
      ValueError: there are fewer; the caller has to ask `num_free`.
    """
    if count > len(self._free):
      raise ValueError(f'{count} pages wanted, {len(self._free)} are free')
    pages = [self._free.popitem(last=False)[0] for _ in range(count)]
    for page in pages:
      key, self._held[page] = self._held[page], None
      if key is not None:
        self._pages_of.pop(key, None)
    self._num_owners[pages] = 1
    return pages
