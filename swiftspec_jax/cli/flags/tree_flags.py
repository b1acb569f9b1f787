"""Flags of the token tree, modes serial and async; some also of new trees."""

import dataclasses

from absl import flags

import swiftspec_jax as ss
from swiftspec_jax.drafters.models.draft_tree import TreeDraft

_DEFAULTS = ss.TreeConfig()

_NUM_NODES = flags.DEFINE_integer(
  'num_nodes',
  _DEFAULTS.num_nodes,
  'Nodes of the tree that the target verifies in a round, the last known '
  'token included.',
)
_WIDTH = flags.DEFINE_integer(
  'width',
  _DEFAULTS.width,
  'Leaves that a forward of the draft expands; by default 8, or 4 on CPUs.',
)
_NUM_DRAFT_STEPS = flags.DEFINE_integer(
  'num_draft_steps',
  _DEFAULTS.num_draft_steps,
  'Forwards of the draft in a round.',
)
_BRANCHING = flags.DEFINE_integer(
  'branching', _DEFAULTS.branching, 'Children of a leaf that enter the tree.'
)
_NUM_RESTART_STEPS = flags.DEFINE_integer(
  'num_restart_steps',
  _DEFAULTS.num_restart_steps,
  'Mode async: forwards after the first before a new tree is sent, when the '
  'last verified token was not in the old one.',
)
_WAITS_FOR_MISSES = flags.DEFINE_bool(
  'waits_for_misses',
  _DEFAULTS.waits_for_misses,
  'Mode async, several requests at once: the target waits until all of them '
  'have a tree again after a miss. Otherwise such a request sends one token '
  'alone.',
)
_MIN_LEAF_MASS = flags.DEFINE_float(
  'min_leaf_mass',
  _DEFAULTS.min_leaf_mass,
  'Dynamic Depth Decoding: a tree that is large enough stops growing when the '
  'leaves of the next forward are less probable than this together, as the '
  'draft sees it; 0 is off. Default: 0, or 0.7 on CPUs in mode serial.',
)
_TREE_PROMPT_LOOKUP = flags.DEFINE_bool(
  'tree_prompt_lookup',
  _DEFAULTS.prompt_lookup,
  'Put what followed the longest earlier match of the last tokens into the '
  'tree, too.',
)
_TREE_SUFFIX_LOOKUP = flags.DEFINE_bool(
  'tree_suffix_lookup',
  _DEFAULTS.suffix_lookup,
  'Put what followed several earlier matches into the tree, too.',
)
_FORCED_ACCEPTANCE = flags.DEFINE_float(
  'forced_acceptance',
  None,
  'For studies of speed: probability that the best child is right. The draft '
  'is told the output of plain decoding, which runs first.',
)
_RUN_AHEAD = flags.DEFINE_integer(
  'run_ahead',
  1,
  'Rounds that are dispatched before one is read; 0 waits for each, and so do '
  'drafts that need the text. Where requests come at any time it is for modes '
  'serial, async and autoregressive, and for prompt_lookup if it is given: '
  'lookups then run on the devices.',
)


def config() -> ss.TreeConfig:
  """Returns what the flags say about the tree, checked."""
  return ss.TreeConfig(
    num_nodes=_NUM_NODES.value,
    width=_WIDTH.value,
    num_draft_steps=_NUM_DRAFT_STEPS.value,
    branching=_BRANCHING.value,
    num_restart_steps=_NUM_RESTART_STEPS.value,
    waits_for_misses=_WAITS_FOR_MISSES.value,
    min_leaf_mass=_MIN_LEAF_MASS.value,
    prompt_lookup=_TREE_PROMPT_LOOKUP.value,
    suffix_lookup=_TREE_SUFFIX_LOOKUP.value,
    forced_acceptance=_FORCED_ACCEPTANCE.value,
  )


def config_with_width() -> ss.TreeConfig:
  """Returns the same for programs that vary or report the width."""
  tree = config()
  return dataclasses.replace(tree, width=tree.num_leaves)


def config_without_defaults() -> ss.TreeConfig:
  """Returns the same for trees that are alike in all modes, on any device."""
  tree = config_with_width()
  return dataclasses.replace(tree, min_leaf_mass=tree.min_leaf_mass or 0.0)


def new_trees(model: ss.Model) -> TreeDraft:
  """Returns the draft of mode tree."""
  tree = config_without_defaults()
  return TreeDraft(
    model=model,
    width=tree.width,
    branching=tree.branching,
    num_draft_steps=tree.num_draft_steps,
    min_leaf_mass=tree.min_leaf_mass,
    prompt_lookup=tree.prompt_lookup,
    suffix_lookup=tree.suffix_lookup,
  )


def is_given(name: str) -> bool:
  """Returns whether the command line or a --config has a flag."""
  return not flags.FLAGS[name].using_default_value


def run_ahead() -> int:
  """Returns how many rounds are dispatched before one is read."""
  return _RUN_AHEAD.value
