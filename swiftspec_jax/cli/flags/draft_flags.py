"""Flags of the drafts that read texts, or that the target makes for itself."""

import pathlib

from absl import flags

import swiftspec_jax as ss
from swiftspec_jax.cli.flags import flag_values
from swiftspec_jax.drafters.texts.token_store import TokenStore

_NUM_SPECULATIVE_TOKENS = flags.DEFINE_integer(
  'num_speculative_tokens',
  None,
  'Tokens drafted in a round. By default that '
  f'of the drafter: {ss.PromptLookup().num_speculative_tokens} for '
  'prompt_lookup, 4 for chain.',
  lower_bound=1,
)
_LOOKUP = flag_values.define_fields(
  ss.PromptLookup,
  {
    'prompt_lookup_min': 'Shortest n-gram that prompt_lookup takes for a '
    'match.',
    'prompt_lookup_max': 'Longest n-gram that prompt_lookup compares.',
  },
)
_STORE = flags.DEFINE_string(
  'datastore',
  None,
  'Mode datastore: texts of swiftspec build_store, besides that of the '
  'request itself.',
)
_PAST_TOKENS = flags.DEFINE_integer(
  'past_tokens',
  ss.Datastore().num_past_tokens,
  'Mode datastore: tokens of outputs of ended requests that drafts are looked '
  'up in, too. Requests may then tell by their speed what others wrote.',
)
_WINDOW = flags.DEFINE_integer(
  'window',
  ss.SelfDraft().window,
  'Mode self: latest tokens that a draft sees, besides the first '
  f'{ss.SelfDraft().num_sink_tokens}.',
)


def files() -> list[str]:
  """Returns the paths of files that are read besides models."""
  return [] if _STORE.value is None else [_STORE.value]


def num_speculative_tokens() -> dict[str, int]:
  """Returns the argument of a drafter, nothing where it has its own."""
  value = _NUM_SPECULATIVE_TOKENS.value
  return {} if value is None else {'num_speculative_tokens': value}


def prompt_lookup() -> ss.PromptLookup:
  """Returns the drafter of mode prompt_lookup, checked."""
  lengths = {name: holder.value for name, holder in _LOOKUP.items()}
  return ss.PromptLookup(**lengths, **num_speculative_tokens())


def datastore() -> ss.Datastore:
  """Returns the draft of mode datastore; reads the store."""
  store = None
  if _STORE.value is not None:
    store = TokenStore.open(pathlib.Path(_STORE.value))
  return ss.Datastore(store=store, num_past_tokens=_PAST_TOKENS.value)


def self_draft() -> ss.SelfDraft:
  """Returns the draft of mode self."""
  return ss.SelfDraft(window=_WINDOW.value)
