"""The systems that `experiments.compare` sets side by side.

A new one is an entry here. Prompts are decoded one at a time by `ss.Decoder`,
with a policy where the system has one; load is served in virtual time, by a
policy.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import swiftspec_jax as ss
from swiftspec_jax import policies
from swiftspec_jax.cli.flags import modes as modes_lib
from swiftspec_jax.cli.flags import shared_flags
from swiftspec_jax.drafters.models.self_draft import SelfDraft
from swiftspec_jax.drafters.texts.datastore import Datastore
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.policies.goodput import Goodput
from swiftspec_jax.policies.prediction.live_costs import LiveCosts


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
  """How a system decodes prompts, and what it does under load.

  Attributes:
    mode: one of `modes_lib.DECODING`, for prompts; None if none fits.
    tree: changes of the tree that the flags describe.
    engine_draft: makes the drafter of the serving engine, for prompts, in place
      of a mode.
    engine_policy: makes the policy of that engine, for its declared sizes.
    policy: name of its policy under load; None if it has none.
  """

  mode: str | None = None
  tree: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  engine_draft: Callable[[], Any] | None = None
  engine_policy: policies.PolicyFn | None = None
  policy: str | None = None

  @property
  def decodes(self) -> bool:
    """Whether it takes part in decoding prompts."""
    return self.mode is not None or self.engine_draft is not None


PLAIN = 'autoregressive'
SYSTEMS = {
  PLAIN: System(mode='autoregressive', policy='none'),
  'prompt_lookup': System(mode='prompt_lookup'),  # Saxena 2023
  'chain': System(mode='chain'),  # arXiv 2211.17192
  'tree': System(mode='serial', policy='fixed_7'),  # arXiv 2406.16858
  'ddd': System(  # arXiv 2409.00142
    mode='serial', tree={'num_draft_steps': 8, 'min_leaf_mass': 0.2}
  ),
  'swiftspec': System(mode='async'),  # arXiv 2506.11309
  'su': System(policy='table'),  # arXiv 2310.18813
  'smartspec': System(  # arXiv 2406.14066
    engine_draft=ss.PromptLookup,
    # It learns the costs while it decodes.
    engine_policy=lambda b: Goodput(LiveCosts(b, drafts_by_model=False)),
    policy='goodput',
  ),
  'sssd': System(  # arXiv 2411.05894
    engine_draft=Datastore,
    # All there is: one row leaves much room.
    engine_policy=lambda b: FixedLength(b.max_length),
  ),
  'magicdec': System(  # arXiv 2408.11049
    # Drafts take forwards of the target, so they are short.
    engine_draft=SelfDraft,
    engine_policy=lambda _: FixedLength(2),
  ),
}


def modes(names: list[str]) -> list[str]:
  """Returns the modes that systems decode with, each once."""
  found = [SYSTEMS[name].mode for name in names]
  return list(dict.fromkeys(mode for mode in found if mode is not None))


def is_default(name: str) -> bool:
  """Returns whether a system needs no further devices, nor a missing draft."""
  mode = SYSTEMS[name].mode
  takes_draft = mode in modes_lib.OF_DRAFTS
  lacks_draft = takes_draft and shared_flags.draft_name(mode) is None
  return mode != 'async' and not lacks_draft


def make_decoder(
  name: str, target: ss.Model, draft: ss.Model | None
) -> ss.Decoder:
  """Returns what decodes prompts as a system does, with its mode's draft."""
  system = SYSTEMS[name]
  if system.engine_draft is not None:
    options = {'draft': system.engine_draft(), 'policy': system.engine_policy}
  else:
    options = shared_flags.speculation(system.mode, draft)
  if system.tree:
    options['tree'] = dataclasses.replace(options['tree'], **system.tree)
  return ss.Decoder(target, **options)
