"""The report of an accelerator, on a CPU."""

import dataclasses
import functools
import itertools
import math
import time
import xml.etree.ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from accelerator_cases import SECTION

import swiftspec_jax as ss
from experiments.accelerator import page, rows, runner, sections, shapes, worker
from experiments.accelerator.jobs import correctness_jobs, first_jobs
from experiments.kernels import kernel_timing
from experiments.kernels.kernel_cases import KERNELS
from kernels_pallas import registry, tuning


def work(section, settings):
  """Returns the rows of a section, measured in this process."""
  jobs = section.jobs(settings)
  return [row for job in jobs for row in worker.run(section, job)]


def settings_of(directory, jobs=None):
  return sections.Settings(directory=directory, model=jobs, tiny=True)


@pytest.fixture
def bare_host(tmp_path, monkeypatch):
  """A host without packages that are pure Python, for new processes."""
  directory = tmp_path / 'missing'
  directory.mkdir()
  for name in ('gguf', 'platformdirs', 'qwix'):
    text = f'raise ModuleNotFoundError({name!r}, name={name!r})\n'
    (directory / f'{name}.py').write_text(text)
  monkeypatch.syspath_prepend(directory)


def test_a_child_says_what_it_does(tmp_path):
  found = work(SECTION, settings_of(tmp_path, 'measure,refuse,fail,after'))
  assert [(row.section, *row.key, row.status) for row in found] == [
    ('cases', 'measure', 'small', 'ok'),
    ('cases', 'more', 'other', 'ok'),
    # What a library cannot do is no fault.
    ('cases', 'refuse', 'small', 'refused'),
    # The device still adds, so the child goes on.
    ('cases', 'fail', 'small', 'failed'),
    ('cases', 'after', 'small', 'ok'),
    ('cases', 'more', 'other', 'ok'),
  ]
  assert found[0].seconds == 2.0
  assert found[2].reason == 'ValueError: no such shape'
  assert found[3].reason == 'RuntimeError: out of memory'


def test_crashes_hangs_and_missing_packages_are_rows(tmp_path, bare_host):
  settings = settings_of(tmp_path, 'crash,read_gguf,quantize,measure,hang')
  found = []
  end = time.monotonic() + 100
  assert runner.run_section(SECTION, settings, found, end, end)
  assert [(row.name, row.status) for row in found] == [
    ('crash', 'crashed'),
    ('read_gguf', 'no package'),
    ('quantize', 'no package'),
    ('measure', 'ok'),
    ('more', 'ok'),
    ('hang', 'timed out'),
  ]
  assert found[0].reason.startswith('SIGSEGV')
  assert 'cannot be read without the package gguf' in found[1].reason
  assert rows.read(tmp_path) == found
  # There is nothing left to do when the time is over, and no row says so.
  settings = dataclasses.replace(settings, model='after')
  now = time.monotonic()
  assert not runner.run_section(SECTION, settings, found, now, now)
  assert rows.read(tmp_path) == found


def test_first_each_section_has_its_time():
  chosen = sections.choose(['tiles', 'device'])
  assert [section.name for section in chosen] == ['device', 'tiles']
  device, tiles = chosen
  planned = sections.plan(chosen, {'device': 500.0, 'tiles': 10.0})
  assert planned == [
    (tiles, tiles.seconds - 10),
    (device, math.inf),
    (tiles, math.inf),
  ]
  with pytest.raises(ss.UserError, match="unknown name 'tile'"):
    sections.choose(['tile'])


def test_loops_leave_no_work_out():
  def product(times):
    def call(x, weight):
      for _ in range(times):
        x = jnp.tanh(x @ weight)
      return x, x.argmax(1)

    return call

  sets = [(jnp.ones((8, 256)), jnp.full((256, 256), i)) for i in (0.1, 0.2)]
  one, many = (
    kernel_timing.loop_seconds(product(times), sets, 10) for times in (1, 16)
  )
  assert many > 2 * one > 0


def test_results_take_the_place_of_what_they_were_given():
  def call(x, caches, row):
    return x + row, [cache.at[0].set(x) for cache in caches]

  def make_sets():
    return [(jnp.float32(i), [jnp.zeros(8)], jnp.float32(1)) for i in range(2)]

  sets, donated = make_sets(), (1,)
  program = jax.jit(call, donate_argnums=donated)
  assert kernel_timing.seconds_of(program, sets, 2, donated) > 0
  assert all(arrays[1][0].is_deleted() for arrays in sets)
  assert kernel_timing.loop_seconds(call, make_sets(), 2, donated) > 0
  # A result may also be all that there is.
  alone = kernel_timing.loop_seconds(
    lambda x, row: jnp.sin(x) + row, [(jnp.ones(8), jnp.float32(1))], 2, (0,)
  )
  assert alone > 0
  assert kernel_timing.taken_back(('a', 'b', 'c'), ('x', 'B'), (1,)) == (
    ('a', 'B', 'c')
  )


@pytest.mark.parametrize('kernel', KERNELS)
def test_what_is_donated_has_the_shape_of_results(kernel):
  spec = KERNELS[kernel][0][0]
  call = functools.partial(
    registry.function(kernel, 'reference'), **spec.options()
  )
  arrays = spec.arrays()
  results = jax.eval_shape(call, *arrays)
  after = kernel_timing.taken_back(arrays, results, spec.DONATED)
  assert tuning.shapes_of(after) == tuning.shapes_of(arrays)
  writes = kernel.endswith('commit') or kernel.startswith('fused')
  assert bool(spec.DONATED) == writes


def test_runs_that_differ_are_counted():
  count = itertools.count()
  shape = jax.ShapeDtypeStruct((), jnp.float32)

  def call(x):
    return jax.pure_callback(lambda _: np.float32(next(count) // 3), shape, x)

  assert first_jobs._num_odd(call, (jnp.zeros(3),), 5) == 3
  nan = (jnp.asarray([jnp.nan, 1.0], jnp.bfloat16),)
  assert first_jobs._num_odd(jnp.sin, nan, 5) == 0


def test_all_kinds_of_models_come_early():
  cases = shapes.chosen_cases(tiny=False)
  assert [case.kernel for case in cases[: len(shapes.KERNELS)]] == list(
    shapes.KERNELS
  )
  early = ' '.join(case.spec.name for case in cases[: 3 * len(shapes.KERNELS)])
  for what in ('sinks', 'window 128', 'mxfp4', 'int4', 'float8', 'gemma3-4b'):
    assert what in early
  attention = [
    case.spec.context
    for case in shapes.chosen_cases(tiny=False, long_first=True)
    if case.kernel == 'tree_attention' and 'llama-8b' in case.spec.name
  ]
  assert attention[0] == max(attention) == 32_768


def test_what_agreed_at_first_is_not_compared_again(tmp_path):
  settings = dataclasses.replace(settings_of(tmp_path), tiny=False)
  before = correctness_jobs.jobs(settings)
  for job, status in zip(before, ('ok', 'differs'), strict=False):
    row = rows.Row(
      section='first', name=job.name, shape=job.shape, status=status
    )
    rows.append(tmp_path, [row])
  keys = [job.key for job in correctness_jobs.jobs(settings)]
  assert keys == [job.key for job in before[1:]]


def test_small_sections_and_their_page(tmp_path, model, monkeypatch):
  settings = settings_of(tmp_path, str(model))
  found = []
  names = {'first', 'device', 'correctness', 'kernels'}
  for section in sections.SECTIONS:
    if section.name in {*names, 'tiles'}:
      found += work(section, settings)
  assert {row.section for row in found} == names
  assert {row.status for row in found} == {'ok'}
  assert {row.device for row in found} == {jax.devices()[0].device_kind}
  assert all(row.seconds > 0 for row in found if row.section == 'kernels')
  monkeypatch.setenv('SWIFTSPEC_CACHE', str(tmp_path))
  settings = dataclasses.replace(settings, model=None)
  (row,) = work(*sections.choose(['small']), settings)
  assert row.status == 'no weights'
  found.append(row)
  text = page.write(tmp_path, found).read_text()
  root = xml.etree.ElementTree.fromstring(text)
  assert len(root.findall('.//img')) == 1
  assert len(root.findall('.//tbody/tr')) == len(found)
  assert text.count('not measured yet') == 3


@pytest.mark.slow
def test_the_whole_report(model, tmp_path):
  flags = (
    f'--output_dir={tmp_path / "report"}',
    f'--model={model}',
    '--budget_seconds=600',
  )
  status, output, complaints = programs.run('accelerator_report', *flags)
  assert status == 0, complaints
  assert 'report.html' in output
  found = rows.read(tmp_path / 'report')
  names = {section.name for section in sections.SECTIONS}
  assert {row.section for row in found} == names - {'tiles'}
  bad = [row for row in found if row.status != 'ok']
  # The built-in draft is made for another vocabulary.
  assert {row.name for row in bad} <= {'serial'}, bad
  error = programs.error_of('accelerator_report', *flags)
  assert 'is not empty' in error
