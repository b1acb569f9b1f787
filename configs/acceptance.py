"""How often drafts are right, where nobody has measured the pair."""

# With it, serial trees of eight nodes and four draft forwards accept 3.53 draft
# tokens a round; SwiftSpec, table 7, has 3.63 for Qwen2-72B with 1.5B, the mean
# of six tasks. Other pairs are assumed to be as good.
STAND_ALONE = 0.9
