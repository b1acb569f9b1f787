"""Flags of the token tree, modes serial and async; some also of new trees."""

import dataclasses

from absl import flags

import swiftspec_jax as ss
from swiftspec_jax.cli.flags import flag_values
from swiftspec_jax.drafters.models.draft_tree import TreeDraft

_FIELDS = flag_values.define_fields(
  ss.TreeConfig,
  {
    'num_nodes': 'Nodes of the tree that the target verifies in a round, the '
    'last known token included.',
    'width': 'Leaves that a forward of the draft expands; by default 8, or 4 '
    'on CPUs.',
    'num_draft_steps': 'Forwards of the draft in a round.',
    'branching': 'Children of a leaf that enter the tree.',
    'num_restart_steps': 'Mode async: forwards after the first before a new '
    'tree is sent, when the last verified token was not in the old one.',
    'waits_for_misses': 'Mode async, several requests at once: the target '
    'waits until all of them have a tree again after a miss. Otherwise such a '
    'request sends one token alone.',
    'min_leaf_mass': 'Dynamic Depth Decoding: a tree that is large enough '
    'stops growing when the leaves of the next forward are less probable than '
    'this together, as the draft sees it; 0 is off. Default: 0, or 0.7 on CPUs '
    'in mode serial.',
    'forced_acceptance': 'For studies of speed: probability that the best '
    'child is right. The draft is told the output of plain decoding, which '
    'runs first.',
  },
) | flag_values.define_fields(
  ss.TreeConfig,
  {
    'prompt_lookup': 'Put what followed the longest earlier match of the last '
    'tokens into the tree, too.',
  },
  prefix='tree_',
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
  values = {name: holder.value for name, holder in _FIELDS.items()}
  return ss.TreeConfig(**values)


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
  )


def is_given(name: str) -> bool:
  """Returns whether the command line or a --config has a flag."""
  return not flags.FLAGS[name].using_default_value


def run_ahead() -> int:
  """Returns how many rounds are dispatched before one is read."""
  return _RUN_AHEAD.value
