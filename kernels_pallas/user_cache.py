"""Where downloads and what was learned about a machine are kept."""

import os
import pathlib

import platformdirs


def cache_dir() -> pathlib.Path:
  """Returns the directory for downloads and caches, which may not exist yet.

  It is `$SWIFTSPEC_CACHE` where that is set, else the platform's cache
  directory of the user, such as `~/.cache/swiftspec_jax`.
  """
  chosen = os.environ.get('SWIFTSPEC_CACHE')
  if chosen:
    return pathlib.Path(chosen).expanduser().absolute()
  return platformdirs.user_cache_path('swiftspec_jax')
