"""Phrases that lengthen the drafts of a lookup.

Ouroboros (arXiv 2402.13720). A draft is a chain of a lookup and, after its
end, some phrases, which the target verifies together as a tree. The phrases
are what the target wrote, and what it would have written after tokens that it
rejected.

Legend: B rows of a view, U slots, K longest draft, T = K + 1 nodes, G tokens of
a phrase.
"""

import dataclasses

import numpy as np

from swiftspec_jax import errors, policies
from swiftspec_jax.drafters.engine_drafter import (
  HostDrafter,
  SlotTexts,
  trees_of,
)
from swiftspec_jax.drafters.spec import DraftSpec, Setup
from swiftspec_jax.drafters.texts import continuations, phrase_pool
from swiftspec_jax.drafters.texts.continuations import MergedTree
from swiftspec_jax.drafters.texts.phrase_pool import Phrase, PhrasePool
from swiftspec_jax.drafters.texts.prompt_lookup import PromptLookup
from swiftspec_jax.drafters.texts.suffix_lookup import SuffixLookup
from swiftspec_jax.step.slot_drafts import SlotDrafts
from swiftspec_jax.step.verdicts import Verdicts

# What nodes are worth until policies know better: tokens of a lookup that says
# nothing of its own, all phrases together, and further tokens of a phrase.
_CHAIN_SHARE = 0.7
_PHRASE_SHARE = 0.6
_PHRASE_FACTOR = 0.8

# Phrases that are kept after each token, for all requests. The vocabulary
# bounds the number of such tokens.
_POOL_SIZE = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhraseDraft(DraftSpec):
  """Drafter of an engine.

  Attributes:
    lookup: drafter of the chains.
    num_speculative_tokens: most tokens of a chain.
    num_phrases: most phrases after it.
    phrase_length: G.
  """

  makes_trees = True

  lookup: PromptLookup | SuffixLookup = dataclasses.field(
    default_factory=PromptLookup
  )
  num_speculative_tokens: int = 4
  num_phrases: int = 3
  phrase_length: int = 6

  def __post_init__(self):
    checks = {
      'num_speculative_tokens': (self.num_speculative_tokens >= 0, '0 or more'),
      'num_phrases': (
        1 <= self.num_phrases <= _POOL_SIZE,
        f'1 to {_POOL_SIZE}',
      ),
      'phrase_length': (self.phrase_length >= 2, 'at least 2'),
    }
    errors.check_fields(self, checks)

  def make(self, setup: Setup) -> 'PhraseDrafter':
    on_host = dataclasses.replace(setup, run_ahead=0)
    return PhraseDrafter(self, self.lookup.make(on_host))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Drafted:
  """The draft of a row.

  Attributes:
    tree: chain of the lookup, and phrases after its end.
    end: index of the end of the chain; -1 if that is the last known token.
    end_token_id: token there.
    phrases: phrases after it, the newest first.
  """

  tree: MergedTree
  end: int
  end_token_id: int
  phrases: list[Phrase]


class PhraseDrafter(HostDrafter):
  """Chains of a lookup that phrases lengthen.

  Attributes:
    pool: phrases of all requests.
  """

  def __init__(self, draft: PhraseDraft, lookup: HostDrafter):
    """Starts with an empty pool.

    Args:
      draft: options.
      lookup: drafter that `draft.lookup` stands for.
    """
    self._draft = draft
    self._lookup = lookup
    self._drafted: dict[int, _Drafted] = {}
    self._num_pooled: dict[int, int] = {}
    self.reset()

  @property
  def name(self) -> str:
    draft = self._draft
    return (
      f'{self._lookup.name}_phrases_{draft.num_speculative_tokens}'
      f'_{draft.num_phrases}_{draft.phrase_length}'
    )

  def draft(
    self, view: policies.StepView, lengths: np.ndarray, texts: SlotTexts
  ) -> SlotDrafts:
    most = np.minimum(lengths, self._draft.num_speculative_tokens)
    chains = self._lookup.draft(view, most, texts)
    for row in np.flatnonzero(lengths).tolist():
      self._pool_output(view, row, texts)
      slot, count = view.slots[row], chains.drafts.lengths[row]
      probs = np.full(count, _CHAIN_SHARE)
      if chains.drafts.confidences is not None:
        probs = chains.drafts.confidences[:count, row]
      self._drafted[int(view.request_ids[row])] = self._lengthened(
        texts.token_ids[slot, view.kv_lengths[row]].item(),
        chains.chains[slot, :count].tolist(),
        probs.cumprod().tolist(),
        int(lengths[row]),
      )
    found = {
      row: self._drafted[int(view.request_ids[row])].tree
      for row in np.flatnonzero(lengths).tolist()
    }
    return trees_of(view, texts, found)

  def learn(
    self, view: policies.StepView, lengths: np.ndarray, verdicts: Verdicts
  ) -> None:
    for row in np.flatnonzero(lengths).tolist():
      drafted = self._drafted[int(view.request_ids[row])]
      count, num_accepted = int(lengths[row]), int(verdicts.num_accepted[row])
      verified = (
        drafted.tree.token_ids[:count],
        drafted.tree.parents[:count],
        verdicts.tree.choices[row, : count + 1].tolist(),
      )
      if num_accepted <= drafted.end:
        length = self._draft.phrase_length
        for mined in phrase_pool.mine(*verified, length, first=num_accepted):
          self.pool.add(*mined)
        continue
      # The newest one comes last.
      for phrase in reversed(drafted.phrases):
        better = phrase_pool.corrected(phrase, *verified, drafted.end)
        if better is not None:
          self.pool.remove(drafted.end_token_id, phrase)
          self.pool.add(drafted.end_token_id, better)

  def forget(self, request_id: int) -> None:
    self._lookup.forget(request_id)
    self._drafted.pop(request_id, None)
    self._num_pooled.pop(request_id, None)

  def reset(self) -> None:
    self._lookup.reset()
    self.pool = PhrasePool(_POOL_SIZE, self._draft.phrase_length)

  def _pool_output(
    self, view: policies.StepView, row: int, texts: SlotTexts
  ) -> None:
    """Adds the phrases that the output of a row has got meanwhile."""
    request_id = int(view.request_ids[row])
    end = int(view.kv_lengths[row]) + 1
    start = self._num_pooled.get(request_id, end - int(view.num_output[row]))
    new = texts.known_from(view, row, start)
    self.pool.add_text(new)
    # Those that begin with the last tokens are not complete yet.
    complete = max(len(new) - self._draft.phrase_length, 0)
    self._num_pooled[request_id] = start + complete

  def _lengthened(
    self, last: int, chain: list[int], probs: list[float], num_nodes: int
  ) -> _Drafted:
    """Returns a chain with phrases after it.

    Args:
      last: last known token.
      chain: tokens of a lookup.
      probs: probability of each of them and those before it.
      num_nodes: most nodes of the tree.
    """
    end = len(chain) - 1
    end_token_id, end_prob = [(last, 1.0), *zip(chain, probs, strict=True)][-1]
    phrases = self.pool.newest(end_token_id, self._draft.num_phrases)
    counts = continuations.Counts()
    for phrase in phrases:
      counts.add(phrase)
    source = continuations.Source(
      counts=counts, weight=_PHRASE_SHARE * end_prob, factor=_PHRASE_FACTOR
    )
    after = continuations.merge([source], num_nodes - len(chain))
    parents = [end if p < 0 else len(chain) + p for p in after.parents]
    tree = MergedTree(
      token_ids=chain + after.token_ids,
      parents=[*range(-1, end), *parents],
      probs=probs + after.probs,
    )
    return _Drafted(
      tree=tree, end=end, end_token_id=end_token_id, phrases=phrases
    )
