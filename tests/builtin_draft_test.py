"""The draft that comes with the package, with the real target."""

import model_cases
import pytest
from absl import flags as absl_flags
from absl.testing import flagsaver

import swiftspec_jax as ss
from swiftspec_jax.checkpoint import builtin
from swiftspec_jax.cli.flags import modes, shared_flags
from swiftspec_jax.requests import results

NAME = 'smollm2-135m-draft'
MAX_BYTES = 32 * 10**6

absl_flags.FLAGS.mark_as_parsed()


@pytest.fixture(scope='module')
def target():
  return ss.load('smollm2-135m-instruct')


def test_it_is_small():
  files = list(builtin.draft_directory(NAME).iterdir())
  assert {path.name for path in files} == {
    'README.md',
    'config.json',
    'draft.safetensors',
  }
  assert sum(path.stat().st_size for path in files) < MAX_BYTES


@pytest.mark.optimised
def test_trees_of_it_write_what_the_target_writes(target):
  draft = ss.load(NAME, draft_of=target)
  options = {'max_new_tokens': 48}
  prompts = model_cases.CHAT_PROMPTS[:6]
  plain = ss.generate(target, prompts, **options)
  serial = ss.generate(
    target, prompts, draft=draft, tree=ss.TreeConfig(), **options
  )
  assert [r.token_ids for r in serial] == [r.token_ids for r in plain]
  assert results.total_acceptance_length([r.stats for r in serial]) > 1.5


def test_modes_with_trees_take_it_by_default():
  names = {mode: shared_flags.draft_name(mode) for mode in modes.DECODING}
  assert names == {
    **dict.fromkeys(names),
    **dict.fromkeys(('tree', 'serial', 'async'), NAME),
  }
  with flagsaver.flagsaver(target='gemma-3-270m'):
    assert shared_flags.draft_name('serial') is None
  with flagsaver.flagsaver(draft='mine'):
    assert shared_flags.draft_name('async') == 'mine'
