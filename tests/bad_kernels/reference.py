"""Twice the argument."""

TOLERANCES = {'float32': 2**-20}


def right(x):
  return 2 * x


wrong = crashing = hanging = refused = right
