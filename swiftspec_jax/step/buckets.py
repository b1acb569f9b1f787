"""The sizes that programs are compiled for.

Whatever the prompt, only these shapes occur, so nothing is compiled after
warm-up.
"""

# Rows of the smallest cache, and of the smallest context. With fewer of them
# XLA computes the softmax of few queries on CPUs in another way than that of
# many, so that steps of different sizes would differ in bfloat16.
SMALLEST = 512
# Tokens of a text that is not known yet, such as a prompt, in one step.
CHUNKS = 32, 64, 128, 512


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
