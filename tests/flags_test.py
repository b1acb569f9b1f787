"""The flags of trees, devices and --config: what fits, and what does not."""

import collections
import contextlib
import dataclasses
import json
import math
import pathlib
import re

import jax
import programs
import pytest
from absl import flags as absl_flags
from absl.testing import flagsaver

import swiftspec_jax as ss
from configs import models
from configs.hardware import google, nvidia
from swiftspec_jax import errors
from swiftspec_jax.cli.flags import (
  config_file,
  device_flags,
  engine_flags,
  modes,
  policy_flags,
  shared_flags,
  tree_flags,
)
from swiftspec_jax.drafters import make_drafter
from swiftspec_jax.simulator.planning import forward

absl_flags.FLAGS.mark_as_parsed()


@contextlib.contextmanager
def given(**values):
  """Sets flags as if they stood on the command line."""
  with flagsaver.flagsaver(**values):
    for name in values:
      absl_flags.FLAGS[name].present = 1
    yield


@contextlib.contextmanager
def refused(message, **values):
  """Sets flags with which the block must be refused."""
  with given(**values), pytest.raises(errors.UserError, match=message):
    yield


def test_defaults_are_those_of_the_library():
  assert tree_flags.config() == ss.TreeConfig()


def test_flags_become_a_tree():
  with given(num_nodes=4, width=2, num_draft_steps=3):
    assert tree_flags.config() == ss.TreeConfig(
      num_nodes=4, width=2, num_draft_steps=3
    )
  with given(tree_prompt_lookup=False, min_leaf_mass=0.2):
    assert tree_flags.config() == ss.TreeConfig(
      prompt_lookup=False, min_leaf_mass=0.2
    )


def test_modes_that_are_compared_by_default():
  own = ('autoregressive', 'prompt_lookup', 'auto')
  with given(target='x'):
    assert shared_flags.default_modes() == own
  with given(target='x', draft='x'):
    assert shared_flags.default_modes() == (*own, 'chain', 'serial')


def test_draft_lies_right_behind_the_target():
  with given(target_devices=2, draft_devices=3):
    assert device_flags.target_devices() == jax.devices()[:2]
    assert device_flags.draft_devices() == jax.devices()[2:5]


def test_devices_share_the_tokens_of_long_pages(model):
  """A page has as many rows on each device as without."""
  names = {'target': str(model), 'draft': str(model)}
  with given(**names, target_devices=4, sequence_devices=2):
    target = shared_flags.load_target()
    assert target.mesh.shape == {'data': 1, 'sequence': 2, 'model': 2}
    (draft,) = shared_flags.load_drafts(target, ['chain']).values()
    assert draft.mesh == target.mesh
    assert engine_flags.sizes().scheduler.page_size == 32
  message = '=2 does not divide the 3 devices'
  with refused(message, **names, target_devices=3, sequence_devices=2):
    shared_flags.load_target()


@pytest.mark.parametrize(
  ('values', 'names', 'message'),
  [
    ({'branching': 2}, ['chain'], '--branching has no effect in mode chain'),
    ({'window': 64}, ['grammar'], '--window has no effect in mode grammar'),
  ],
)
def test_flags_of_other_modes_are_refused(values, names, message):
  with given(draft='x', **values):
    with pytest.raises(errors.UserError, match=message):
      shared_flags.check(names)
    # Of several modes one may have it.
    shared_flags.check([*names, 'serial', 'self'])


@pytest.mark.parametrize(
  ('policy', 'names', 'message'),
  [
    ('goodput', ['autoregressive', 'auto', 'chain'], 'no effect in mode auto;'),
    ('goodput', ['autoregressive'], 'no effect in mode autoregressive;'),
    ('goodputt', ['chain'], 'goodputt is none of none'),
    ('fixed_x', ['chain'], 'fixed_x is none of none'),
  ],
)
def test_policies_are_checked_before_anything_is_loaded(policy, names, message):
  with refused(message, policy=policy):
    policy_flags.check(names)
  with given(policy='fixed_3'):
    policy_flags.check(['autoregressive', 'chain'])


def test_splits_use_all_devices_or_those_given():
  assert device_flags.splits() == [(2, 6), (4, 4), (6, 2)]
  with given(target_devices=3):
    assert device_flags.splits() == [(3, 1)]


@pytest.mark.parametrize('mode', modes.DECODING)
def test_every_mode_is_what_the_list_says(model, mode):
  """`closed_batch_test` decodes with all drafters."""
  drafts = {'draft': str(model), 'draft_layers': 1}
  drafts = drafts if mode in modes.OF_DRAFTS else {}
  with given(target=str(model), **drafts):
    shared_flags.check([mode])
    target = shared_flags.load_target()
    draft = shared_flags.load_drafts(target, [mode]).get(mode)
    options = shared_flags.speculation(mode, draft)
    ss.Decoder(target, **options)
  spec = make_drafter.spec_of(options.get('draft'), options.get('tree'))
  if mode != modes.AUTO:
    assert spec.makes_trees == modes.MODES[mode].makes_trees


def test_the_page_of_modes_has_all_of_them():
  page = pathlib.Path(__file__).parents[1] / 'docs' / 'how_to' / 'modes.md'
  table = page.read_text().split('\n## ')[1]
  found = {
    cells[0].strip('`'): tuple(cell == 'yes' for cell in cells[1:5])
    for cells in re.findall(r'^\| (`\w+`)' + 4 * r' \| (\w*)', table, re.M)
  }
  assert found == {
    name: (
      mode.decodes,
      True,
      mode.takes_draft,
      mode.decodes and mode.takes_policy,
    )
    for name, mode in modes.MODES.items()
  }


def test_auto_looks_up_where_there_is_no_draft(model):
  with given(target=str(model)):
    target = shared_flags.load_target()
    assert shared_flags.load_drafts(target, [modes.AUTO]) == {}
    decoder = shared_flags.make_decoder(modes.AUTO, target, None)
  request = ss.Request(token_ids=(1, 2) * 9, sampling=ss.SamplingParams())
  *_, last = decoder.run([request])
  assert len(last.result.stats.chosen_lengths) == 7 + 1


def test_modes_on_the_same_devices_share_the_draft(model):
  with given(target=str(model), draft=str(model), draft_layers=1):
    target = shared_flags.load_target()
    drafts = shared_flags.load_drafts(
      target, ['auto', 'chain', 'serial', 'async']
    )
  assert drafts['chain'] is drafts['serial'] is drafts['auto']
  assert drafts['chain'].config.num_layers == 1
  assert drafts['chain'].mesh == target.mesh
  assert list(drafts['async'].mesh.devices.flat) == jax.devices()[1:2]


def test_target_and_draft_are_stretched(model):
  entries = '{"rope_type": "linear", "factor": 2}'
  with given(target=str(model), draft=str(model), rope_scaling=entries):
    shared_flags.check(['chain'])
    target = shared_flags.load_target()
    assert target.config.rope_scaling.factor == 2
    assert shared_flags.to_json()['rope_scaling'] == entries
    draft = shared_flags.load_draft(target, 'chain')
    assert draft.config.rope_scaling == target.config.rope_scaling
    with given(draft_rope_scaling='null'):
      draft = shared_flags.load_draft(target, 'chain')
    assert draft.config.rope_scaling is None


@pytest.mark.parametrize(
  ('mode', 'flags', 'message'),
  [
    *(
      (
        'autoregressive',
        {'rope_scaling': text},
        f'--rope_scaling={text} must be a JSON object such as {{"rope_type"',
      )
      for text in ('yarn', '4.0')
    ),
    ('serial', {'target': 'x'}, 'mode serial needs a draft model: give --dra'),
    ('async', {'target': 'x'}, 'mode async needs a draft model: give --draft'),
    ('chain', {'target': 'x'}, 'mode chain needs a draft model: give --draft'),
    (
      'async',
      {'draft': 'x', 'target_devices': 6, 'draft_devices': 3},
      '--target_devices=6 and --draft_devices=3 of mode async need 9 devices, '
      'but there are only 8 (cpu); --simulated_devices=9',
    ),
    (
      'serial',
      {'draft': 'x', 'draft_devices': 2},
      '--draft_devices has no effect in mode serial; give --mode=async',
    ),
    (
      'autoregressive',
      {'draft_layers': 2},
      '--draft_layers has no effect in mode autoregressive; give',
    ),
    (
      'prompt_lookup',
      {'draft_weight_dtype': 'int8_dynamic'},
      '--draft_weight_dtype has no effect in mode prompt_lookup; give',
    ),
    (
      'chain',
      {'draft': 'x', 'forced_acceptance': 0.5},
      '--forced_acceptance has no effect in mode chain; give '
      '--mode=serial|async|forced',
    ),
    ('serial', {'forced_acceptance': 1.5}, 'forced_acceptance must be in (0'),
    ('serial', {'num_nodes': 0}, 'num_nodes must be from 1 to'),
    ('serial', {'width': 999}, 'width must be from 1 to'),
    ('async', {'num_draft_steps': -1}, 'num_draft_steps must be >= 0'),
    *(
      ('prompt_lookup', values, message)
      for values, message in (
        (
          {'temperature': -1.0},
          'temperature must be finite and >= 0, got -1.0',
        ),
        ({'temperature': math.nan}, 'must be finite and >= 0, got nan'),
        ({'top_k': -1}, 'top_k must be >= 0'),
        ({'top_p': math.nan}, 'top_p must be in (0, 1], got nan'),
        ({'max_new_tokens': 0}, 'max_new_tokens must be >= 1'),
        ({'seed': -1}, 'seed must be in'),
        ({'prompt_lookup_min': 5}, 'needs 1 <= prompt_lookup_min'),
        (
          {'target_devices': 99},
          '--target_devices=99 need 99 devices, but the',
        ),
      )
    ),
  ],
)
def test_what_does_not_fit_is_refused(mode, flags, message):
  with refused(re.escape(message), **flags):
    shared_flags.check([mode])


SETTINGS = {
  'target': 'big',
  'draft': 'small',
  'target_devices': 2,
  'num_nodes': 4,
  'width': 16,
  'dtype': None,
}


def write_config(path, settings=SETTINGS, **entries):
  values = {'flags': settings, 'device_kind': 'cpu', **entries}
  path.write_text(json.dumps(values))
  return str(path)


def test_config_stands_in_for_what_is_not_given(tmp_path):
  path = write_config(tmp_path / 'tuned.json')
  with given(config=path, num_nodes=6, target='big'):
    config_file.apply()
    config_file.check_device()
    tree = tree_flags.config()
    assert (tree.num_nodes, tree.width) == (6, 16)
    values = shared_flags.to_json()
  assert (values['draft'], values['target_devices']) == ('small', 2)
  assert shared_flags.to_json()['draft'] is None


@pytest.mark.parametrize(
  ('changes', 'flags', 'message'),
  [
    ({}, {'target': 'other'}, '--target=other, but .* was made for '),
    ({}, {'target_devices': 3}, '--target_devices=3, but .* made for'),
    ({'speed': 1}, {}, "unknown key 'speed'; there are target, dtype"),
    ({'width': 'wide'}, {}, "tuned.json: width: .*'wide'"),
    ({'target_devices': 0}, {}, 'tuned.json: target_devices: 0 is not'),
  ],
)
def test_wrong_settings_of_a_config(tmp_path, changes, flags, message):
  path = write_config(tmp_path / 'tuned.json', {**SETTINGS, **changes})
  with refused(message, config=path, **flags):
    config_file.apply()


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    (None, 'cannot read --config from .*: No such file'),
    ('{"flags": ', 'not valid JSON: Expecting value'),
    ('[]', r'must be a JSON object, got \[\]'),
    ('{}', "no configuration: 'flags' is missing"),
    ('{"flags": {}, "x": 1}', "unknown key 'x'; there are flags"),
  ],
)
def test_files_that_are_no_config(tmp_path, text, message):
  path = tmp_path / 'tuned.json'
  if text is not None:
    path.write_text(text)
  with refused(message, config=str(path)):
    config_file.apply()


def test_config_that_was_measured_nowhere(tmp_path):
  """A plan's split is the only one to tune."""
  path = write_config(tmp_path / 'config.json', device_kind=None)
  with given(config=path):
    config_file.apply()
    config_file.check_device()
    assert device_flags.splits() == [(2, 1)]


def test_config_of_another_machine(tmp_path):
  path = write_config(tmp_path / 'tuned.json', device_kind='TPU v5e')
  with refused('tuned on TPU v5e devices, here', config=path):
    config_file.check_device()


@pytest.mark.parametrize(
  ('name', 'chip', 'num_hosts', 'num_chips'),
  [('two_gpu_hosts', nvidia.H100, 2, 8), ('tpu_v5e_16', google.V5E, 4, 4)],
)
def test_configs_of_several_hosts(name, chip, num_hosts, num_chips):
  """All hosts have a part, the heads divide evenly, and the weights fit."""
  taken = collections.Counter()
  with given(config=str(programs.ROOT / 'configs' / f'{name}.json')):
    config_file.apply()
    values = shared_flags.to_json()
    weight_dtypes = {'target': values['weight_dtype'], 'draft': None}
    for kind, config in (
      ('target', models.LLAMA_70B),
      ('draft', models.LLAMA_3B),
    ):
      is_all = absl_flags.FLAGS[f'{kind}_devices'].using_default_value
      number = num_chips if is_all else values[f'{kind}_devices']
      processes = values[f'{kind}_processes']
      taken.update(dict.fromkeys(processes, number))
      config = dataclasses.replace(
        config,
        num_shards=number * len(processes),
        weight_dtype=weight_dtypes[kind],
      )
      assert config.num_kv_heads % config.num_shards == 0
      assert forward.weights_of(config).held < 0.7 * chip.memory_bytes
  assert taken.keys() == {*map(str, range(num_hosts))}
  assert max(taken.values()) <= num_chips


def test_async_splits_the_cpu_and_traces(model, tmp_path):
  status, output, complaints = programs.run(
    'generate',
    f'--target={model}',
    f'--draft={model}',
    '--draft_layers=1',
    '--mode=async',
    '--forced_acceptance=0.7',
    f'--trace_dir={tmp_path / "trace"}',
    '--max_new_tokens=24',
    '--prompt=hello',
  )
  assert status == 0, complaints
  (expected,) = ss.generate(ss.load(model), 'hello', max_new_tokens=24)
  assert output == f'{expected.text}\n'
  assert 'decoding plainly first, for --forced_acceptance' in complaints
  assert 'forced acceptance 0.7: 24 tokens in' in complaints
  assert 'overlap fraction' in complaints
  trace = json.loads((tmp_path / 'trace' / 'timeline.json').read_text())
  names = {event['name'] for event in trace['traceEvents']}
  assert {'verify', 'grow', 'advance', 'dispatch', 'wait'} <= names
  summary = tmp_path / 'trace' / 'timeline_summary.json'
  figures = json.loads(summary.read_text())
  rates = figures['hit_rate'] + figures['late_hit_rate'] + figures['miss_rate']
  assert rates == pytest.approx(1)
  assert figures['draft_step_seconds'] > 0
  assert list((tmp_path / 'trace' / 'plugins').rglob('*.xplane.pb'))


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--trace_dir=x', '--prompt=hello'], '--trace_dir=x is for modes serial'),
    (
      ['--mode=serial', '--draft=x', '--forced_acceptance=0.5'],
      '--forced_acceptance are not for a conversation: give --prompt',
    ),
  ],
)
def test_studies_that_cannot_be(flags, message):
  assert message in programs.error_of('generate', *flags)
