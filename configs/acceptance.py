"""How often drafts are right: what was published, and what it says of a token.

Forced acceptance is the probability that the draft's best child is right.
"""

from scipy import optimize


def of_chain(accepted_share: float, num_draft_tokens: int) -> float:
  """Returns the forced acceptance at which chains have as much accepted.

  Args:
    accepted_share: share of the draft tokens that are accepted, in (0, 1).
    num_draft_tokens: draft tokens of a chain.
  """

  def difference(acceptance: float) -> float:
    powers = (acceptance**i for i in range(1, num_draft_tokens + 1))
    return sum(powers) / num_draft_tokens - accepted_share

  return optimize.brentq(difference, 0.0, 1.0)


# With it, serial trees of eight nodes and four draft forwards accept 3.53 draft
# tokens a round; the table has 3.63, the mean of six tasks.
QWEN2_72B_1B5 = 0.9
QWEN2_72B_1B5_SOURCE = 'SwiftSpec, table 7'
LLAMA_70B_3B_SOURCE = 'assumed, as of Qwen2-72B with 1.5B'
# devquasar.com/uncategorized/
# speculative-decoding-tradeoffs-gpu-with-large-models-llama-70b-8b, its best
# setting: greedy chains of 8, both models of 4 bits, four prompts.
LLAMA_70B_8B = of_chain(0.5868, 8)
LLAMA_70B_8B_SOURCE = 'devquasar.com, llama.cpp on four prompts'
