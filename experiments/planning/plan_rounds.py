"""Runs the real tree pipeline and keeps what does not depend on hardware."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

import swiftspec_jax as ss
from experiments.measuring import benchmark_run
from swiftspec_jax import testing
from swiftspec_jax.cli import references
from swiftspec_jax.simulator.planning.rounds import Rounds

_NUM_TOKENS = 192  # of an output
# As acceptance is forced, the weights are of no account.
_TINY = ss.ModelConfig(
  family='llama',
  vocab_size=272,
  num_layers=1,
  embed_dim=32,
  num_heads=2,
  num_kv_heads=1,
  head_dim=16,
  ffw_dim=32,
  max_context=256,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
  """The rounds of a mode at given sizes of the tree.

  Attributes:
    mode: 'serial' or 'async'.
    tree: the sizes, and the acceptance that the draft is forced to.
    rounds: the rounds that were run.
    outcomes: shares of verdicts that were misses, late hits and hits.
  """

  mode: str
  tree: ss.TreeConfig
  rounds: Rounds
  outcomes: tuple[float, float, float]

  def to_json(self) -> dict[str, Any]:
    """Returns a line of rounds.jsonl."""
    return {
      'mode': self.mode,
      'num_nodes': self.tree.num_nodes,
      'width': self.tree.num_leaves,
      'num_draft_steps': self.tree.num_draft_steps,
      'acceptance': self.tree.forced_acceptance,
      'acceptance_length': self.rounds.acceptance_length,
      'miss_rate': self.outcomes[0],
      'late_hit_rate': self.outcomes[1],
      'hit_rate': self.outcomes[2],
      'num_tokens': self.rounds.num_tokens.tolist(),
      'num_rounds': self.rounds.num_rounds.tolist(),
      'num_waits': self.rounds.num_waits.tolist(),
    }


def record(
  trees: Sequence[ss.TreeConfig], num_requests: int
) -> Iterator[Recording]:
  """Yields the rounds of each mode and each tree, on two CPU devices.

  Args:
    trees: sizes, with a forced acceptance.
    num_requests: requests to decode, one after the other.
  """
  first, second = jax.devices('cpu')[:2]
  target = testing.random_model(_TINY, devices=[first])
  # The draft is told the outputs.
  known = references.References(target)
  requests = [
    known.add_to(
      ss.Request(
        token_ids=(i % 256, i // 256),
        sampling=ss.SamplingParams(
          seed=i, max_new_tokens=_NUM_TOKENS, ignore_eos=True
        ),
      )
    )
    for i in range(num_requests)
  ]
  for mode, device in (('serial', first), ('async', second)):
    draft = testing.random_model(_TINY, seed=1, devices=[device])
    for tree in trees:
      yield _record(mode, target, draft, tree, requests)


def _record(
  mode: str,
  target: ss.Model,
  draft: ss.Model,
  tree: ss.TreeConfig,
  requests: Sequence[ss.Request],
) -> Recording:
  decode = benchmark_run.make_decode(ss.Decoder(target, draft, tree=tree))
  stats = [decode(request).stats for request in requests]
  verdicts = np.array(
    [[s.num_misses, s.num_late_hits, s.num_hits] for s in stats]
  ).sum(axis=0)
  return Recording(
    mode=mode,
    tree=tree,
    rounds=Rounds(
      num_tokens=np.array([s.decoded_tokens for s in stats]),
      num_rounds=np.array([s.num_rounds for s in stats]),
      num_waits=np.array([s.num_draft_forwards for s in stats]),
      num_growth_steps=tree.num_draft_steps if mode == 'async' else 0,
    ),
    outcomes=tuple((verdicts / verdicts.sum()).tolist()),
  )
