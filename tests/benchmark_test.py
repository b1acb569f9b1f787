"""The benchmark: its figures, its files, and what can go wrong on the way."""

import itertools
import json
import resource
import signal
import time

import programs
import pytest

import swiftspec_jax as ss
from experiments.measuring import benchmark_report
from experiments.output import benchmark_output
from swiftspec_jax.cli import provenance

QUESTIONS = ('What is rain? ' * 3, 'Name a tree.', 'Add 2 and 3.', 'Hello!')
# Fewer programs than by default.
MODES = ('autoregressive', 'prompt_lookup', 'chain', 'serial')
NO_LOOKUP = '--tree_prompt_lookup=False'
TWO_MODES = '--modes=autoregressive,prompt_lookup'
FIELDS = {
  'tokens_per_second',
  'speedup',
  'mean_ttft',
  'mean_tpot',
  'acceptance_length',
  'acceptance_rate_per_position',
  'chosen_lengths',
  'hit_rate',
  'late_hit_rate',
  'miss_rate',
  'host_seconds_per_round',
  'forced_acceptance',
  'outputs_equal',
  'num_outputs_equal',
  'num_prompts',
}
NUM_TOKENS = 60


@pytest.fixture(scope='module')
def prompts(tmp_path_factory):
  folder = tmp_path_factory.mktemp('prompts')
  return programs.write_prompts(folder, *QUESTIONS)


@pytest.fixture(scope='module')
def flags(model, prompts):
  return [
    f'--target={model}',
    f'--prompts={prompts}',
    f'--max_new_tokens={NUM_TOKENS}',
  ]


@pytest.fixture(scope='module')
def finished(flags, model, tmp_path_factory):
  """A benchmark that ran to its end: its directory and what it printed."""
  directory = tmp_path_factory.mktemp('results')
  output = programs.output_of(
    'benchmark',
    *flags,
    f'--modes={",".join(MODES)}',
    f'--draft={model}',
    NO_LOOKUP,
    f'--output_dir={directory}',
  )
  return directory, output


def count_lines(directory):
  path = directory / 'results.jsonl'
  return path.read_bytes().count(b'\n') if path.exists() else 0


def test_results_have_a_line_for_each_prompt_and_mode(finished, model):
  lines = programs.read_lines(finished[0], 'results.jsonl')
  keys = [(line['question_id'], line['mode']) for line in lines]
  assert sorted(keys) == sorted(itertools.product(range(4), MODES))
  target = ss.load(model)
  expected = ss.generate(target, QUESTIONS, max_new_tokens=NUM_TOKENS)
  for line in lines:
    assert line['repeat'] == 0
    assert line['task'] == 'ab'[line['question_id'] % 2]
    result = expected[line['question_id']]
    assert tuple(line['token_ids']) == result.token_ids
    assert line['new_tokens'] == len(result.token_ids)
    assert line['prompt_tokens'] == result.stats.prompt_tokens
    assert line['finish_reason'] == result.finish_reason
    assert line['ttft_seconds'] > 0
    assert line['acceptance_length'] == pytest.approx(
      1 + line['num_accepted'] / line['num_rounds']
    )


def test_summary_is_what_the_results_say(finished):
  """`benchmark_report_test` computes it by hand."""
  records = [
    benchmark_output.Record(**line)
    for line in programs.read_lines(finished[0], 'results.jsonl')
  ]
  modes = programs.read_summary(finished[0])['modes']
  summary = benchmark_report.summarize(records, list(MODES), is_greedy=True)
  assert modes == json.loads(json.dumps(summary))
  assert tuple(modes) == MODES
  for figures in modes.values():
    assert set(figures) == {*FIELDS, 'tasks'}
    assert figures['num_outputs_equal'] == figures['num_prompts'] == 4
  # The target drafts perfectly for itself.
  assert modes['chain']['acceptance_length'] > 4
  # Its distribution is flat, so the best nodes are children of the root.
  assert modes['serial']['acceptance_length'] > 1.9


def test_summary_says_where_it_comes_from(finished):
  facts = programs.read_summary(finished[0])['provenance']
  assert 'experiments.benchmark' in ' '.join(facts['argv'])
  assert facts['git_sha'] == provenance.git_sha()
  assert facts['versions']['swiftspec_jax'] == ss.__version__
  assert facts['device_count'] == 1
  assert facts['dtype'] == 'float32'
  assert facts['target_config']['family'] == 'llama'
  assert facts['compile_count'] > 0
  # Nothing was compiled while the clock ran.
  assert facts['compile_count_measured'] == 0


def test_table_and_picture(finished):
  directory, output = finished
  assert (directory / 'results.png').read_bytes().startswith(b'\x89PNG')
  for mode in MODES:
    assert any(line.startswith(mode) for line in output.splitlines())
  assert output.count('4/4') == len(MODES)
  assert 'differs' not in output


def test_directory_with_results_is_refused(finished, flags, model):
  flags = [*flags, f'--output_dir={finished[0]}']
  before = {path: path.read_bytes() for path in finished[0].iterdir()}
  error = programs.error_of('benchmark', *flags)
  assert 'is not empty (it holds results.jsonl)' in error
  flags += [f'--draft={model}', f'--modes={",".join(MODES)}', NO_LOOKUP]
  error = programs.error_of(
    'benchmark', *flags, '--resume', '--temperature=0.5'
  )
  assert '--resume: temperature is 0.5, but the results in' in error
  assert 'were made with 0.0' in error
  assert {p: p.read_bytes() for p in finished[0].iterdir()} == before


@pytest.mark.ci
def test_kill_and_resume(flags, tmp_path):
  flags = [*flags, TWO_MODES, '--repeats=6', f'--output_dir={tmp_path}']
  with programs.running('benchmark', *flags):
    programs.wait_for(lambda: count_lines(tmp_path) >= 3)
  num_done = count_lines(tmp_path)
  assert num_done < 48
  with (tmp_path / 'results.jsonl').open('a') as file:
    file.write('{"question_id": 1, "ta')
  programs.output_of('benchmark', *flags, '--resume')
  lines = programs.read_lines(tmp_path, 'results.jsonl')
  keys = {(x['question_id'], x['mode'], x['repeat']) for x in lines}
  assert len(lines) == len(keys) == 48
  summary = programs.read_summary(tmp_path)
  assert summary['provenance']['num_resumed'] == num_done
  assert summary['modes']['prompt_lookup']['outputs_equal'] is True


def test_ctrl_c_keeps_what_is_done(flags, tmp_path):
  flags = [*flags, TWO_MODES, '--repeats=10000', f'--output_dir={tmp_path}']
  with programs.running('benchmark', *flags) as process:
    programs.wait_for(lambda: count_lines(tmp_path) >= 8)
    process.send(signal.SIGINT)
    status, output, complaints = process.finish()
  assert status == 130
  assert complaints.endswith('\ninterrupted\n')
  assert len(programs.read_lines(tmp_path, 'results.jsonl')) >= 8
  summary = programs.read_summary(tmp_path)['modes']
  assert summary['prompt_lookup']['speedup'] > 0
  assert summary['prompt_lookup']['outputs_equal'] is True
  assert 'autoregressive' in output


@pytest.mark.ci
def test_ctrl_c_while_compiling(flags, tmp_path, monkeypatch):
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', str(tmp_path / 'cache'))
  monkeypatch.setenv('JAX_DISABLE_MOST_OPTIMIZATIONS', '0')
  with programs.start(
    'benchmark',
    *flags,
    '--modes=prompt_lookup',
    f'--output_dir={tmp_path / "results"}',
  ) as process:
    while 'compiling for prompt_lookup' not in process.stderr.readline():
      assert process.poll() is None
    # Somewhere in the middle, where it used to crash.
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    status, output, complaints = programs.finish(process)
  assert status == 130
  assert complaints.endswith('\ninterrupted\n')
  assert not output
  assert not list((tmp_path / 'results').iterdir())


@pytest.mark.skipif(
  not hasattr(resource, 'prlimit'), reason='limits of other processes: Linux'
)
def test_full_disk_while_measuring(flags, tmp_path):
  flags = [*flags, '--modes=autoregressive', '--repeats=10000']
  flags.append(f'--output_dir={tmp_path}')
  with programs.running('benchmark', *flags) as process:
    programs.wait_for(lambda: count_lines(tmp_path) >= 1)
    size = (tmp_path / 'results.jsonl').stat().st_size + 10_000
    resource.prlimit(process.process_id, resource.RLIMIT_FSIZE, (size, size))
    status, _, complaints = process.finish()
  assert status == 1
  last = complaints.splitlines()[-1]
  assert last.startswith('error: cannot write ')
  assert 'results.jsonl: File too large; name a directory' in last


def test_samples_and_skipped_prompts(model, tmp_path):
  path = programs.write_prompts(tmp_path, 'Hello!', 'a' * 1000)
  directory = tmp_path / 'new' / 'results'
  status, output, complaints = programs.run(
    'benchmark',
    f'--target={model}',
    f'--prompts={path}',
    '--modes=prompt_lookup',
    '--max_new_tokens=60',
    '--temperature=1',
    '--repeats=2',
    f'--output_dir={directory}',
  )
  assert status == 0, complaints
  assert 'Skipping 1 prompts longer than the 1024 tokens' in complaints
  summary = programs.read_summary(directory)
  assert summary['provenance']['num_skipped'] == 1
  figures = summary['modes']['prompt_lookup']
  assert figures['num_prompts'] == 1
  assert figures['speedup'] is figures['outputs_equal'] is None
  first, second = (
    line['token_ids']
    for line in programs.read_lines(directory, 'results.jsonl')
  )
  assert first != second
  assert '60.0' not in output.split()


@pytest.mark.parametrize(
  ('flag', 'message'),
  [
    ('--modes=autoregressive,guess', "--modes: unknown name 'guess';"),
    ('--output_dir=/dev/null/x', 'cannot write /dev/null/x: Not a directory'),
    ('--max_new_tokens=2000', 'no prompt fits into the 1024 tokens'),
  ],
)
def test_bad_flags_get_one_line(flags, tmp_path, flag, message):
  directory = tmp_path / 'results'
  error = programs.error_of(
    'benchmark', *flags, f'--output_dir={directory}', flag
  )
  assert message in error
  assert not directory.exists() or not list(directory.iterdir())
