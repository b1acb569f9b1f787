"""Flags of the drafts that read texts, or that the target makes for itself."""

import pathlib
from collections.abc import Mapping, Sequence

from absl import flags

import swiftspec_jax as ss
from experiments.flags import modes
from swiftspec_jax import errors
from swiftspec_jax.serving.drafters.make_drafter import PagedDraft
from swiftspec_jax.serving.drafters.texts.token_store import TokenStore

MODES = (modes.SUFFIX_LOOKUP, modes.DATASTORE, modes.PHRASES, modes.SELF)

_STORE = flags.DEFINE_string(
  'datastore',
  None,
  'Mode datastore: texts of experiments.build_store, besides that of the '
  'request itself.',
)
_PAST_TOKENS = flags.DEFINE_integer(
  'past_tokens',
  ss.Datastore().num_past_tokens,
  'Mode datastore: tokens of outputs of ended requests that drafts are looked '
  'up in, too. Requests may then tell by their speed what others wrote.',
)
_NUM_PHRASES = flags.DEFINE_integer(
  'num_phrases',
  ss.PhraseDraft().num_phrases,
  'Mode phrases: most phrases behind a draft of --num_speculative_tokens, by '
  f'default {ss.PhraseDraft().num_speculative_tokens}.',
)
_WINDOW = flags.DEFINE_integer(
  'window',
  ss.SelfDraft().window,
  'Mode self: latest tokens that a draft sees, besides the first '
  f'{ss.SelfDraft().num_sink_tokens}.',
)
_SNAPKV_BUDGET = flags.DEFINE_integer(
  'snapkv_budget',
  None,
  'Mode self: tokens that each kv head chooses by attention (SnapKV), for '
  'drafts to see in place of the first and the latest ones.',
)
HOLDERS = (_STORE, _PAST_TOKENS, _NUM_PHRASES, _WINDOW, _SNAPKV_BUDGET)
_USED = {
  modes.DATASTORE: (_STORE, _PAST_TOKENS),
  modes.PHRASES: (_NUM_PHRASES,),
  modes.SELF: (_WINDOW, _SNAPKV_BUDGET),
}


def check(names: Sequence[str]) -> None:
  """Raises UserError for flags that are of no use, in these modes or at all."""
  for mode, holders in _USED.items():
    for holder in holders:
      if mode not in names and flags.FLAGS[holder.name].present:
        raise errors.UserError(
          f'--{holder.name} has no effect in mode {", ".join(names)}; give '
          f'--mode={mode}'
        )
  if modes.SELF in names:
    _self_draft()


def files() -> list[str]:
  """Returns the paths of files that are read besides models."""
  return [] if _STORE.value is None else [_STORE.value]


def make(
  mode: str, lookup: ss.PromptLookup, lengths: Mapping[str, int]
) -> PagedDraft:
  """Returns the draft of one of `MODES`.

  Args:
    mode: mode.
    lookup: drafter of the chains of mode phrases.
    lengths: the argument that says how long these chains are, if it is given.
  """
  if mode == modes.SUFFIX_LOOKUP:
    return ss.SuffixLookup()
  if mode == modes.SELF:
    return _self_draft()
  if mode == modes.DATASTORE:
    store = None
    if _STORE.value is not None:
      store = TokenStore.open(pathlib.Path(_STORE.value))
    return ss.Datastore(store=store, num_past_tokens=_PAST_TOKENS.value)
  return ss.PhraseDraft(
    lookup=lookup, num_phrases=_NUM_PHRASES.value, **lengths
  )


def _self_draft() -> ss.SelfDraft | ss.SnapKVDraft:
  budget = _SNAPKV_BUDGET.value
  if budget is None:
    return ss.SelfDraft(window=_WINDOW.value)
  if flags.FLAGS[_WINDOW.name].present:
    raise errors.UserError(
      f'--window={_WINDOW.value} has no effect with --snapkv_budget={budget}, '
      'which chooses by attention; give one of the two'
    )
  return ss.SnapKVDraft(budget=budget)
