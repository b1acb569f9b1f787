"""Product of few rows, each summed as if it were alone, on CPUs."""
