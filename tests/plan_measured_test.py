"""Plans with what a report has measured on the chip."""

import dataclasses

import programs
import pytest
from plan_cases import CHIP, DRAFT, PAIR, TINY

from configs import hardware, launches, models
from experiments.accelerator import rows as rows_lib
from experiments.accelerator import sections, worker
from experiments.accelerator.rows import Row
from experiments.planning import plan_measured, plan_search, plan_validation
from swiftspec_jax import errors
from swiftspec_jax.config import TreeConfig
from swiftspec_jax.simulator.planning import forward as forward_lib
from swiftspec_jax.simulator.planning.forward import Efficiency, Forward

H100 = hardware.get('h100')


def measure(directory, name):
  """Returns the rows of a section, with the smallest sizes on this CPU."""
  (section,) = sections.choose([name])
  settings = sections.Settings(directory=directory, tiny=True)
  jobs = section.jobs(settings)
  rows = [row for job in jobs for row in worker.run(section, job)]
  rows_lib.append(directory, rows)
  return rows


def test_a_report_of_this_cpu_prices_a_forward(tmp_path):
  rows = measure(tmp_path, 'device')
  # A data sheet that promises more than any CPU has.
  sheet = dataclasses.replace(
    CHIP,
    device_kinds=('cpu',),
    memory_bandwidth=1e15,
    peak_flops={'bfloat16': 1e20},
  )
  deployment = dataclasses.replace(PAIR, chip=sheet)
  measured, points = plan_measured.apply(deployment, tmp_path)
  assert not points
  assert not measured.measured
  chip, figures = measured.chip, {row.name: row.figures for row in rows}
  read = figures['read']['bytes_per_second']
  product = figures['product bfloat16']['operations_per_second']
  forward = Forward(
    config=TINY, num_chips=1, num_tokens=4, context=10, launches=launches.VLLM
  )
  seconds = forward_lib.predict(forward, chip)
  # Matrices of two layers and of the logits, norms in float32.
  weights = 2 * (128 * 8 * 32 + 4 * 32 * 128 + 3 * 128 * 256) + 512 * 128
  num_bytes = 2 * weights + 5 * 128 * 4
  assert seconds.weights == pytest.approx(num_bytes / read)
  flops = 2 * 4 * (weights + 5 * 128)
  assert seconds.compute == pytest.approx(flops / product)
  sources = {
    row['number']: row['source'] for row in plan_measured.constants(chip)
  }
  assert sources['memory_bandwidth'] == 'measured'
  assert sources['peak_flops bfloat16'] == 'measured'
  assert sources['link_bandwidth'] == 'data sheet'


@pytest.mark.ci
def test_tiny_steps_are_left_out(tmp_path):
  rows = measure(tmp_path, 'large')
  steps = [row for row in rows if row.name in plan_measured.STEPS]
  assert len(steps) == len(plan_measured.STEPS)
  for row in steps:
    assert row.figures['num_tokens'] == 8
    assert row.figures['tiny']
  chip = dataclasses.replace(CHIP, device_kinds=('cpu',))
  deployment = dataclasses.replace(PAIR, chip=chip)
  assert plan_measured.apply(deployment, tmp_path) == (deployment, [])


# What the steps below were made with.
TRUE = dataclasses.replace(
  H100,
  memory_bandwidth=3e12,
  launch_seconds=3e-6,
  efficiency=Efficiency(wide=0.8, quantized=0.5),
)


def step(name, weight_dtype, kernels, *, tiny=False, factor=1.0):
  config, program = plan_measured.STEPS[name]
  dtype = None if weight_dtype == 'bfloat16' else weight_dtype
  forward = Forward(
    config=dataclasses.replace(config, weight_dtype=dtype),
    num_chips=1,
    num_tokens=8,
    context=512,
    launches=getattr(launches.counted(dtype, kernels == 'auto'), program),
  )
  return Row(
    section='large',
    name=name,
    shape=f'{weight_dtype}, kernels={kernels}',
    seconds=factor * forward_lib.predict(forward, TRUE).total,
    figures={
      'weight_dtype': weight_dtype,
      'kernels': kernels,
      'tiny': tiny,
      'num_tokens': 8,
      'context': 512,
    },
    device='NVIDIA H100 80GB HBM3',
  )


def write(directory, *rows):
  read = Row(
    section='device',
    name='read',
    figures={'bytes_per_second': TRUE.memory_bandwidth},
    device='NVIDIA H100 80GB HBM3',
  )
  rows_lib.append(directory, [read, *rows])
  deployment = dataclasses.replace(
    PAIR,
    target=models.LLAMA_8B,
    drafts=(dataclasses.replace(DRAFT, config=models.LLAMA_1B),),
    chip=H100,
    context=512,
    width=8,
  )
  return plan_measured.apply(deployment, directory)


def test_steps_are_fitted_and_replace_predictions(tmp_path):
  rows = [
    step('8B verify 8', dtype, kernels)
    for dtype in ('bfloat16', 'int4', 'int8')
    for kernels in ('auto', 'reference')
  ]
  # Tiny steps, and rows that have failed, say nothing.
  tiny = step('8B verify 8', 'bfloat16', 'auto', tiny=True, factor=99.0)
  failed = Row(name='8B verify 8', status=rows_lib.FAILED)
  draft = step('1B draft forward', 'bfloat16', 'auto')
  deployment, points = write(tmp_path, *rows, draft, tiny, failed)
  assert len(points) == len(deployment.measured) == 7
  errors_left_out = [
    row['left_out_error'] for row in plan_validation.validate(points)
  ]
  assert errors_left_out == pytest.approx([0.0] * 7, abs=1e-3)
  chip = deployment.chip
  assert chip.launch_seconds == pytest.approx(3e-6, rel=1e-3)
  assert chip.efficiency.wide == pytest.approx(0.8, rel=1e-3)
  assert chip.efficiency.quantized == pytest.approx(0.5, rel=1e-3)
  assert chip.sources['efficiency quantized'] == 'fitted to measured steps'
  choice = plan_search.Choice(
    mode='async',
    target_chips=1,
    draft_chips=1,
    kernels=True,
    draft=deployment.drafts[0],
    weight_dtypes=('int4', None),
  )
  tree = TreeConfig(num_nodes=8)
  price = plan_search.price_of(deployment, choice, tree)
  assert price.measured == ('target', 'draft')
  assert price.target.total == pytest.approx(rows[2].seconds)
  assert price.draft.total == pytest.approx(draft.seconds)
  small = plan_search.price_of(
    deployment, choice, dataclasses.replace(tree, num_nodes=4)
  )
  assert small.measured == ('draft',)


def test_one_step_fits_nothing(tmp_path):
  deployment, points = write(tmp_path, step('8B verify 8', 'bfloat16', 'auto'))
  assert not points
  assert len(deployment.measured) == 1
  assert deployment.chip.launch_seconds == H100.launch_seconds
  # The share of the data sheet, in bytes a second, is what it was.
  share = H100.efficiency.quantized * H100.memory_bandwidth / 3e12
  assert deployment.chip.efficiency.quantized == pytest.approx(share)


def test_reports_of_older_versions_are_refused(tmp_path):
  old = step('8B verify 8', 'int4', 'auto')
  del old.figures['num_tokens']
  with pytest.raises(
    errors.UserError,
    match="does not say 'num_tokens' of '8B verify 8': an older version",
  ):
    write(tmp_path, old)


def test_reports_of_other_chips_are_refused(tmp_path):
  with pytest.raises(errors.UserError, match='has no measurements; name the'):
    plan_measured.apply(PAIR, tmp_path)
  rows_lib.append(tmp_path, [step('8B verify 8', 'int4', 'auto')])
  h200 = dataclasses.replace(PAIR, chip=hardware.get('h200'))
  with pytest.raises(
    errors.UserError,
    match=r'was measured on NVIDIA H100 80GB HBM3, .* h200 \(NVIDIA H200\)',
  ):
    plan_measured.apply(h200, tmp_path)
  flags = f'--measured={tmp_path}', f'--output_dir={tmp_path / "out"}'
  config = '--config=configs/llama3_70b_3b_8xh800.py'
  error = programs.error_of('plan', config, *flags)
  assert 'the plan is for h800 (NVIDIA H800)' in error
