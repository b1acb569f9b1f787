"""The modes: ways to draft, and the programs that have them.

docs/how_to/modes.md has the same list for users.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

import swiftspec_jax as ss
from swiftspec_jax import errors
from swiftspec_jax.cli.flags import draft_flags

AUTO = 'auto'  # prompt_lookup, or serial with --draft, by goodput
PLAIN = 'autoregressive'
SUFFIX_LOOKUP = 'suffix_lookup'
DATASTORE = 'datastore'
GRAMMAR = 'grammar'
SELF = 'self'
TREE = 'tree'
FORCED = 'forced'
PERSISTENT_TREES = 'serial', 'async'  # kept across rounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode:
  """What a mode is, and who has it.

  Attributes:
    decodes: whether `generate`, its chat and `benchmark` have it.
    takes_draft: whether --draft names its draft model.
    has_builtin: whether it takes the built-in draft without --draft.
    is_paged: whether it decodes over pages; others do so with a policy.
    takes_policy: whether `generate` and `benchmark` take a --policy in it.
    makes_trees: whether a policy sees its drafts as trees.
    drafts_by_model: whether its drafts take time, other than lookups.
    make: maker of what drafts, where that is no model of --draft.
  """

  decodes: bool = True
  takes_draft: bool = False
  has_builtin: bool = False
  is_paged: bool = False
  takes_policy: bool = True
  makes_trees: bool = False
  drafts_by_model: bool = False
  make: Callable[[], Any] | None = None


# By a draft model.
_TREES = Mode(
  takes_draft=True, has_builtin=True, makes_trees=True, drafts_by_model=True
)
MODES = {
  PLAIN: Mode(takes_policy=False),
  'prompt_lookup': Mode(make=draft_flags.prompt_lookup),
  AUTO: Mode(takes_draft=True, takes_policy=False),
  SUFFIX_LOOKUP: Mode(is_paged=True, make=ss.SuffixLookup),
  DATASTORE: Mode(is_paged=True, makes_trees=True, make=draft_flags.datastore),
  GRAMMAR: Mode(is_paged=True, makes_trees=True, make=ss.GrammarDraft),
  SELF: Mode(is_paged=True, drafts_by_model=True, make=draft_flags.self_draft),
  'chain': Mode(takes_draft=True, drafts_by_model=True),
  TREE: dataclasses.replace(_TREES, is_paged=True),
  FORCED: Mode(decodes=False, is_paged=True),
  **dict.fromkeys(PERSISTENT_TREES, _TREES),
}


def where(is_so: Callable[[Mode], bool]) -> tuple[str, ...]:
  """Returns the names of modes, in the order of the list."""
  return tuple(name for name, mode in MODES.items() if is_so(mode))


DECODING = where(lambda mode: mode.decodes)
SERVING = tuple(MODES)
OF_DRAFTS = where(lambda mode: mode.takes_draft)


_LIVING = *PERSISTENT_TREES, AUTO
_OF_A_DRAFT = (
  'draft',
  'draft_layers',
  'draft_rope_scaling',
  'draft_weight_dtype',
)
# The modes of flags that not all have, by flag.
_USERS = {
  **dict.fromkeys(('datastore', 'past_tokens'), (DATASTORE,)),
  'window': (SELF,),
  **dict.fromkeys(('num_restart_steps', 'waits_for_misses'), _LIVING),
  **dict.fromkeys(('branching', 'min_leaf_mass'), (TREE, *_LIVING)),
  **dict.fromkeys(_OF_A_DRAFT, OF_DRAFTS),
  **dict.fromkeys(('draft_devices', 'draft_processes'), ('async',)),
  'forced_acceptance': (*PERSISTENT_TREES, FORCED),
}


def check_flags(names: Sequence[str]) -> None:
  """Raises UserError for a flag that has no effect in any of these modes."""
  for flag, users in _USERS.items():
    holder = flags.FLAGS[flag]
    # A draft may also come from --config.
    is_given = holder.present or (
      flag in _OF_A_DRAFT and holder.value is not None
    )
    if is_given and not {*users} & {*names}:
      raise errors.UserError(
        f'--{flag} has no effect in mode {", ".join(names)}; give '
        f'--mode={"|".join(users)}'
      )
