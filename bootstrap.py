"""Makes or updates the virtual environment that the Makefile's targets use.

  python3 bootstrap.py --venv .venv [EXTRA ...]

installs the checkout in editable form with the named extras of
pyproject.toml, and what --requirements FILE lists. With --uv=PATH uv installs,
which takes less time than pip and does not read its configuration. A stamp in
the environment records what is there, so that a second call returns at once.
Standard library only, and no syntax newer than Python 3.6, so that an old
Python gets the message below, not a SyntaxError.
"""

import argparse
import hashlib
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent
MIN_PYTHON = (3, 11)
STAMP = 'bootstrap.stamp'
# What pip says when it cannot get something from the index.
INDEX_SIGNS = ('onnection', 'No matching distribution')


def python_problem(version_info):
  """Returns why this Python cannot be used, or an empty string."""
  if tuple(version_info[:2]) < MIN_PYTHON:
    return (
      'swiftspec_jax needs Python >= {}.{}, but {} is Python {}.{}; install a '
      'newer one or name it: make PYTHON=/path/to/python3.13 TARGET'.format(
        *MIN_PYTHON, sys.executable, *version_info[:2]
      )
    )
  try:
    import ensurepip  # noqa: F401
    import venv  # noqa: F401
  except ImportError as error:
    return (
      '{} has no module {}, which comes in a package of its own on some '
      'systems (Debian, Ubuntu: apt install python{}.{}-venv); install it or '
      'name another Python: make PYTHON=/path/to/python3.13 TARGET'.format(
        sys.executable, error.name, *version_info[:2]
      )
    )
  return ''


def fingerprint(requirements):
  """Returns a hash of what decides, apart from the extras, what to install."""
  digest = hashlib.sha256(str(ROOT).encode())
  for name in ['pyproject.toml', 'requirements.txt', *requirements]:
    digest.update((ROOT / name).read_bytes())
  return digest.hexdigest()


def read_stamp(folder):
  """Returns what the last complete installation wrote, None without one."""
  stamp = folder / STAMP
  # The Python that the environment links to may have been removed.
  if stamp.exists() and (folder / 'bin' / 'python').exists():
    return json.loads(stamp.read_text())
  return None


def write_stamp(folder, stamp):
  """Replaces the stamp in one step."""
  partial = folder / (STAMP + '.partial')
  partial.write_text(json.dumps(stamp))
  os.replace(str(partial), str(folder / STAMP))


def make_venv(folder):
  """Makes an empty environment with pip in `folder`, replacing any other."""
  print('bootstrap: making the environment {}'.format(folder), flush=True)
  command = [sys.executable, '-m', 'venv', '--clear', str(folder)]
  if subprocess.call(command):
    sys.exit(
      'bootstrap: {} could not make the environment {}; its message is '
      'above'.format(sys.executable, folder)
    )


def install(folder, extras, requirements, uv):
  """Installs the checkout; returns the status, and what went to stderr."""
  target = '.[{}]'.format(','.join(extras)) if extras else '.'
  python = str(folder / 'bin' / 'python')
  # Without its log, unless PIP_VERBOSE=1 asks for it. Most modules are never
  # imported, so they are compiled when they are.
  command = [python, '-m', 'pip', 'install', '--no-compile']
  if uv:
    command = [uv, 'pip', 'install', '--python', python]
  command += ['--quiet', '--editable', target]
  for name in requirements:
    command += ['--requirement', name]
  print(
    'bootstrap: installing {} and what it needs; PIP_VERBOSE=1 shows the log '
    'of pip'.format(target),
    flush=True,
  )
  with subprocess.Popen(
    command, cwd=str(ROOT), stderr=subprocess.PIPE, universal_newlines=True
  ) as process:
    complaints = []
    for line in process.stderr:
      sys.stderr.write(line)
      complaints.append(line)
  return process.returncode, ''.join(complaints)


def update(folder, extras, requirements, uv):
  """Brings the environment in `folder` up to date, or exits with 1.

  Without a stamp it is made from scratch: nobody knows what an interrupted
  installation left there.
  """
  stamp = read_stamp(folder)
  if stamp is not None:
    extras = extras | set(stamp['extras'])
  wanted = {
    'extras': sorted(extras),
    'fingerprint': fingerprint(requirements),
    'python': '{}.{}'.format(*sys.version_info[:2]),
  }
  if stamp == wanted:
    return
  if stamp is None or stamp['python'] != wanted['python']:
    stamp = None
    make_venv(folder)
  else:
    (folder / STAMP).unlink()
  returncode, complaints = install(folder, wanted['extras'], requirements, uv)
  if returncode == 0:
    write_stamp(folder, wanted)
    return
  if uv or not any(sign in complaints for sign in INDEX_SIGNS):
    name = 'uv' if uv else 'pip'
    sys.exit('bootstrap: {} failed; its message is above'.format(name))
  if stamp is not None:
    # Pip fetches everything before it changes anything.
    write_stamp(folder, stamp)
  sys.exit(
    'bootstrap: the package index cannot be reached or lacks what pip names '
    'above; check the network and the index and proxy in `{} -m pip config '
    'list`, then repeat the command'.format(folder / 'bin' / 'python')
  )


def main():
  """Reads the command line."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--venv', type=pathlib.Path, required=True)
  parser.add_argument('--requirements', action='append', default=[])
  parser.add_argument('--uv')
  parser.add_argument('extras', nargs='*')
  args = parser.parse_args()
  problem = python_problem(sys.version_info)
  if problem:
    sys.exit('bootstrap: ' + problem)
  try:
    extras = set(args.extras)
    update(ROOT / args.venv, extras, args.requirements, args.uv)
  except KeyboardInterrupt:
    sys.exit('bootstrap: interrupted; the next call starts afresh')


if __name__ == '__main__':
  main()
