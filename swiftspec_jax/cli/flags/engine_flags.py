"""Flags of the serving engine, and the engine that they describe."""

import dataclasses
from typing import Any

import jax
from absl import flags

import swiftspec_jax as ss
from swiftspec_jax import errors
from swiftspec_jax.cli.flags import (
  device_flags,
  flag_values,
  modes,
  shared_flags,
  tree_flags,
)
from swiftspec_jax.drafters import make_drafter
from swiftspec_jax.drafters.forced_draft import ForcedDraft
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.models import attention
from swiftspec_jax.policies.cost_model.measured import CostKey
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.scheduling.scheduler_config import SchedulerConfig
from swiftspec_jax.step.program_sizes import ProgramSizes

_MODE = flags.DEFINE_enum(
  'mode',
  modes.AUTO,
  modes.SERVING,
  'What drafts; auto is prompt_lookup, with --draft serial, too. '
  'Modes chain, tree, serial and async take --draft; DFlash drafts and '
  'P-EAGLE heads are for chain and tree. --width, --branching, '
  '--num_draft_steps and --tree_prompt_lookup say how trees grow. In mode tree '
  'a new one grows for each step. In modes serial and async they live on, and '
  'in async they grow on --draft_devices while the target verifies. datastore '
  'makes trees of what followed the last tokens in the text and in those of '
  '--datastore. grammar drafts what the grammars of requests force, as all '
  'modes do, and nothing else. In mode self the target drafts for itself over '
  'the latest tokens. forced, for studies of policies, drafts what equal '
  'requests wrote before, and is right with probability --forced_acceptance.',
)
_ROWS = flags.DEFINE_list(
  'rows', ['1', '2', '4', '8'], 'Compiled numbers of requests in a step.'
)
_QUERY_TOKENS = flags.DEFINE_list(
  'query_tokens',
  ['8', '16', '32', '64'],
  'Compiled numbers of tokens that a step feeds; the last is its budget.',
)
_MAX_LENGTH = flags.DEFINE_integer(
  'max_length',
  5,
  'Longest draft; in mode tree its nodes, the last known token left '
  'out. Modes serial and async have --num_nodes.',
  lower_bound=0,
)
_CONTEXTS = flags.DEFINE_list(
  'contexts',
  ['256', '1024'],
  'Compiled contexts; a request has at most the last of them, prompt and '
  'output together.',
)
_KV_TOKENS = flags.DEFINE_integer(
  'kv_tokens',
  None,
  'Tokens that the cache has room for. By default all rows fit.',
  lower_bound=16,
)
_SHARE_PREFIXES = flags.DEFINE_bool(
  'share_prefixes',
  False,
  'Requests that begin alike share what is in the cache. Not so by default, as '
  'the runs of a sweep have the same prompts.',
)
_PAGE_SIZE = 16  # of each device that shares the tokens
_RUN_AHEAD_MODES = modes.PLAIN, 'prompt_lookup', *modes.PERSISTENT_TREES


def mode() -> str:
  """Returns what drafts, with a choice made for mode auto."""
  if _MODE.value != modes.AUTO:
    return _MODE.value
  has_draft = shared_flags.draft_name(modes.AUTO) is not None
  return 'serial' if has_draft else 'prompt_lookup'


def is_tree() -> bool:
  """Returns whether drafts are trees."""
  return modes.MODES[mode()].makes_trees


def _refuse(name: str, remedy: str) -> None:
  if flags.FLAGS[name].present:
    raise errors.UserError(f'--{name} has no effect in mode {mode()}; {remedy}')


def sizes() -> ProgramSizes:
  """Returns the declared sizes; loads nothing.

  Raises:
    UserError: they are no sizes, or the flags do not fit together.
  """
  shared_flags.check([mode()])
  rows, query_tokens, contexts = map(
    flag_values.sizes, (_ROWS, _QUERY_TOKENS, _CONTEXTS)
  )
  longest = _MAX_LENGTH.value
  if mode() in modes.PERSISTENT_TREES:
    _refuse('max_length', 'give --num_nodes')
    _refuse('forced_acceptance', 'leave it out')
    longest = tree_flags.config().num_nodes - 1
  elif mode() == modes.TREE:
    _refuse('num_nodes', 'give --max_length')
  if mode() not in _RUN_AHEAD_MODES:
    _refuse('run_ahead', 'its drafts need the text of the round before')
  lengths = tuple(range(longest + 1))
  # A lookup takes the same time whatever it finds.
  most_steps = {
    'chain': lengths[-1],
    modes.SELF: lengths[-1],
    modes.TREE: tree_flags.config().num_draft_steps,
  }.get(mode(), 1)
  draft_steps = tuple(min(length, most_steps) for length in lengths)
  kv_tokens = _KV_TOKENS.value or rows[-1] * contexts[-1]
  page_size = _PAGE_SIZE * device_flags.sequence_devices()
  return ProgramSizes(
    scheduler=SchedulerConfig(
      buckets=StepBuckets(
        rows=rows,
        query_tokens=query_tokens,
        lengths=lengths,
        draft_steps=draft_steps,
      ),
      num_pages=-(-kv_tokens // page_size),
      max_context=contexts[-1],
      page_size=page_size,
      shares_prefixes=_SHARE_PREFIXES.value,
    ),
    contexts=contexts,
  )


def make_engine(
  declared: ProgramSizes, *, looks_up: bool = False, runs_ahead: bool = True
) -> tuple[Engine, ss.Model]:
  """Loads the models; returns an engine, not compiled yet, and its target.

  Args:
    declared: result of `sizes`.
    looks_up: same as in `Engine`.
    runs_ahead: whether --run_ahead has a meaning.
  """
  target = shared_flags.load_target()
  if attention.is_native(target.config, target.mesh):
    # Shorter contexts take no less time there, but further programs.
    declared = dataclasses.replace(declared, contexts=declared.contexts[-1:])
  if mode() == modes.FORCED:
    acceptance = tree_flags.config().forced_acceptance
    if acceptance is None:
      raise errors.UserError(f'mode {modes.FORCED} needs --forced_acceptance')
    draft = ForcedDraft(acceptance=acceptance)
  else:
    model = shared_flags.load_drafts(target, [mode()]).get(mode())
    found = shared_flags.speculation(mode(), model)
    draft = make_drafter.spec_of(found.get('draft'), found.get('tree'))
  engine = Engine(
    target,
    draft,
    sizes=declared,
    looks_up=looks_up,
    run_ahead=_run_ahead() if runs_ahead else 0,
  )
  return engine, target


def _run_ahead() -> int:
  """Returns the steps to enqueue ahead."""
  if mode() not in _RUN_AHEAD_MODES:
    return 0
  # Lookups of the host are free where nothing is found, those that are ahead
  # are not.
  if mode() == 'prompt_lookup' and not flags.FLAGS['run_ahead'].present:
    return 0
  return tree_flags.run_ahead()


def cost_key(
  engine: Engine, target: ss.Model, declared: ProgramSizes
) -> CostKey:
  """Returns what costs depend on."""
  return CostKey(
    target=target.name,
    draft=engine.drafter.name,
    dtype=target.dtype.name,
    device_kind=jax.devices()[0].device_kind,
    num_devices=target.mesh.devices.size,
    buckets=declared.scheduler.buckets,
    num_sequence_devices=target.config.num_sequence_shards,
  )


def to_json() -> dict[str, Any]:
  """Returns the values of these flags and of the shared ones, by name."""
  return flag_values.of(__name__) | shared_flags.to_json()
