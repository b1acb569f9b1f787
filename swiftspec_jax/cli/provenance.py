"""Where a result comes from: code, versions and machine."""

import dataclasses
import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

import jax

import swiftspec_jax as ss
from kernels_pallas import dispatch
from swiftspec_jax.cli import extras

_PACKAGES = ('jax', 'jaxlib', 'numpy', 'torch', 'transformers')


def collect() -> dict[str, Any]:
  """Returns what has to be known about this process to repeat a result."""
  devices = jax.devices()
  return {
    'argv': sys.orig_argv,
    'git_sha': git_sha(),
    'versions': {
      'python': platform.python_version(),
      'swiftspec_jax': ss.__version__,
      **{name: version(name) for name in _PACKAGES},
    },
    'platform': platform.platform(),
    'cpu': cpu_model(),
    'cpu_count': os.cpu_count(),
    'load_average': os.getloadavg()[0],
    'device_kind': devices[0].device_kind,
    'device_count': len(devices),
    'kernels': kernels(),
    'date': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
  }


def kernels() -> list[dict[str, str]]:
  """Returns what the programs that are compiled so far run on, and why."""
  return [dataclasses.asdict(choice) for choice in dispatch.choices()]


def git_sha() -> str | None:
  """Returns the commit of the code, None if it is in no git checkout.

  '+dirty' is added where tracked files have been changed.
  """
  sha = _git('rev-parse', 'HEAD')
  if sha is None:
    return None
  changes = _git('status', '--porcelain', '--untracked-files=no')
  return f'{sha}+dirty' if changes else sha


def version(package: str) -> str | None:
  """Returns the version of a package, None if it is not installed."""
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def cpu_model() -> str:
  """Returns the name of the processor, as well as it can be had."""
  cpuinfo = pathlib.Path('/proc/cpuinfo')
  if cpuinfo.exists():
    for line in cpuinfo.read_text().splitlines():
      if line.startswith('model name'):
        return line.partition(':')[2].strip()
  return platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
  try:
    process = subprocess.run(
      ['git', '-C', str(extras.CHECKOUT), *arguments],
      capture_output=True,
      text=True,
      check=True,
    )
  except (FileNotFoundError, subprocess.CalledProcessError):
    return None
  return process.stdout.strip()
