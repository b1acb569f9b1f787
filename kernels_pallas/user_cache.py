"""Where downloads and what was learned about a machine are kept."""

import os
import pathlib
import sys


def cache_dir() -> pathlib.Path:
  """Returns the directory for downloads and caches, which may not exist yet.

  It is `$SWIFTSPEC_CACHE` where that is set, else `swiftspec_jax` in the user's
  directory for caches: `$XDG_CACHE_HOME`, by default `~/.cache`, on a Mac
  `~/Library/Caches`.
  """
  chosen = os.environ.get('SWIFTSPEC_CACHE')
  if chosen:
    return pathlib.Path(chosen).expanduser().absolute()
  default = '~/Library/Caches' if sys.platform == 'darwin' else '~/.cache'
  root = os.environ.get('XDG_CACHE_HOME') or default
  return pathlib.Path(root).expanduser() / 'swiftspec_jax'
