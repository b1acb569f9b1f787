"""Says what this machine has, and how fast a step of a small model is.

  swiftspec doctor

Prints versions, devices, the dtype of weights and cache, the cache folder,
whether the native kernels can be compiled, and the kernels that are chosen and
why. Then it measures the memory bandwidth and
plain steps of the built-in model. A step reads every weight once, so the
bandwidth bounds its rate. On a GPU a first run compares kernels, too, which
can take minutes. With --nostep nothing is loaded or measured.
"""

import os
import platform
import shutil

import jax
from absl import flags

import swiftspec_jax as ss
from kernels_pallas import user_cache
from kernels_pallas.native import library
from swiftspec_jax.cli import program, provenance, step_times
from swiftspec_jax.runtime import profiling

_STEP = flags.DEFINE_bool(
  'step', True, 'Measure the memory bandwidth and a step; some seconds.'
)
_MODEL = 'smollm2-135m-instruct'
_NUM_STEPS = 24
_LOW = 0.4  # share of the bandwidth, below which something is wrong
_PACKAGES = ('jax', 'jaxlib', 'flax', 'transformers', 'numpy')
_EXTRAS = {
  'experiments': 'matplotlib',
  'serve': 'fastapi',
  'peers': 'torch',
}


def main() -> None:
  """Runs the program."""
  for name, text in {**software(), **hardware()}.items():
    _print(name, text)
  if _STEP.value:
    _measure()
  for choice in provenance.kernels():
    _print(
      'kernel',
      f'{choice["kernel"]}: {choice["implementation"]} ({choice["reason"]})',
    )


def software() -> dict[str, str]:
  """Returns versions, and which extras are installed."""
  versions = [f'{name} {provenance.version(name)}' for name in _PACKAGES]
  extras = [
    f'{extra} {"yes" if provenance.version(package) else "no"}'
    for extra, package in _EXTRAS.items()
  ]
  return {
    'swiftspec_jax': f'{ss.__version__}, Python {platform.python_version()}',
    'packages': ', '.join(versions),
    'extras': ', '.join(extras),
  }


def hardware() -> dict[str, str]:
  """Returns the machine, JAX's devices and the folder of the cache."""
  devices = jax.devices()
  platform_name = devices[0].platform
  dtype = 'float32' if platform_name == 'cpu' else 'bfloat16'
  folder = user_cache.cache_dir()
  place = folder if folder.exists() else folder.home()
  free = shutil.disk_usage(place).free
  rows = {
    'machine': f'{provenance.cpu_model()}, {os.cpu_count()} cores, load '
    f'{os.getloadavg()[0]:.1f}',
    'devices': f'{len(devices)} x {devices[0].device_kind} ({platform_name})',
    'dtype': f'{dtype}, the default for weights and cache here',
    'cache': f'{folder}, {free / 1e9:,.0f} GB free',
  }
  if platform_name == 'cpu':
    rows['native'] = library.status()
  return rows


def step_seconds(model: ss.Model) -> float:
  """Returns the median time of a plain step alone."""
  decoder = ss.Decoder(model)
  sampling = ss.SamplingParams(max_new_tokens=2)
  request = ss.Request(token_ids=tuple(range(16)), sampling=sampling)
  for _ in decoder.run([request]):
    pass  # compiles
  return step_times.target_step_seconds(decoder, num_timings=_NUM_STEPS)


def verdict(share: float) -> str:
  """Returns what a share of the bandwidth means."""
  if share >= _LOW:
    return 'good'
  return 'low: is the machine busy? see docs/how_to/tune.md'


def _measure() -> None:
  """Measures the bandwidth and a step, and prints both."""
  model = ss.load(_MODEL)
  bandwidth = profiling.measure_read_bandwidth()
  seconds = step_seconds(model)
  bound = model.num_bytes / bandwidth
  _print('bandwidth', f'{bandwidth / 1e9:.1f} GB/s read')
  _print(
    'plain step',
    f'{seconds * 1e3:.1f} ms for {model.num_bytes / 1e6:.0f} MB of {_MODEL}; '
    f'the bandwidth bounds it to {bound * 1e3:.1f} ms',
  )
  share = bound / seconds
  _print('share', f'{share:.2f} of the rate of the bound, {verdict(share)}')


def _print(name: str, text: str) -> None:
  print(f'{name:<14} {text}', flush=True)


if __name__ == '__main__':
  program.run(main)
