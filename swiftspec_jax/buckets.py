"""The sizes that programs are compiled for.

Whatever the prompt, only these shapes occur, so nothing is compiled after
warm-up.
"""

# Rows of the smallest cache, and of the smallest context. With fewer of them
# XLA computes the softmax of few queries on CPUs in another way than that of
# many, so that steps of different sizes would differ in bfloat16.
SMALLEST = 512
_CHUNK_SIZES = (32, 128, 512)

# First position, size, and tokens in the cache afterwards.
Chunk = tuple[int, int, int]


def plan_prefill(num_tokens: int, capacity: int) -> list[Chunk]:
  """Splits a prompt into chunks of the compiled sizes.

  Args:
    num_tokens: number of tokens to read.
    capacity: rows of the cache; no chunk reaches beyond them.

  Returns:
    For each chunk its first position, its size, and how many tokens are in
    the cache after it. The last chunk may begin earlier than the one before
    it ended, or be longer than what is left: surplus rows become scratch.
  """
  sizes = [size for size in _CHUNK_SIZES if size <= capacity]
  chunks, done = [], 0
  while done < num_tokens:
    left = num_tokens - done
    # One padded chunk, if at least half of it is used; else a full one.
    size = next((s for s in sizes if left <= s <= 2 * left), None)
    size = size or max([s for s in sizes if s <= left], default=sizes[0])
    start = min(done, capacity - size)
    done = min(start + size, num_tokens)
    chunks.append((start, size, done))
  return chunks


def context_of(size: int, capacity: int) -> int:
  """Returns the context that is compiled for `size` rows of a cache."""
  return min(power_of_two(size), capacity)


def text_lengths(capacity: int) -> list[int]:
  """Returns ascending lengths of texts that warm-up runs programs with.

  Attention on CPUs chooses a part of the cache by the longest text, and XLA
  prepares the products of a part when they first run: for a round over 30
  layers that takes 100 ms. Each part holds one of these lengths.

  Args:
    capacity: rows of the cache; half of them is the last length.
  """
  lengths = [capacity // 2]
  while lengths[0] > SMALLEST // 4:
    lengths.insert(0, lengths[0] // 2)
  return lengths


def power_of_two(size: int, smallest: int = SMALLEST) -> int:
  """Returns the smallest declared power of two that is at least `size`.

  Args:
    size: number to reach.
    smallest: power of two; no smaller one is declared.
  """
  power = smallest
  while power < size:
    power *= 2
  return power
