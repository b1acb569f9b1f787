"""Published costs, for studies without the hardware.

The coefficients are those in the code of SmartSpec's authors (vLLM branches
`batch-dsd` and `req-dsd`, class `AutoTuner`). They were measured on H100 GPUs
with batches of up to about 30 rows. Everything larger is extrapolated.
"""

from swiftspec_jax import errors
from swiftspec_jax.policies.cost_model.linear import (
  DraftCoefficients,
  LinearCosts,
  TargetCoefficients,
)

_OVERHEAD_SHARE = 0.05

PROFILES = {
  # Llama 8B with EAGLE on one GPU. The draft's rows are two published terms.
  'llama-8b-h100': LinearCosts(
    target=TargetCoefficients(
      kv=4.85907942e-08,
      query_tokens=1.84383603e-05,
      rows=-4.33144783e-05,
      speculative=0.0,
      fixed=6.938699571857084e-03,
    ),
    draft=DraftCoefficients(
      kv=2.89700974e-09,
      rows=4.38694070e-08 + 5.52805909e-06,
      steps=4.52175870e-04,
      fixed=4.471109584339972e-04,
    ),
    overhead_share=_OVERHEAD_SHARE,
  ),
  # Llama 70B with prompt lookup on four GPUs.
  'llama-70b-h100': LinearCosts(
    target=TargetCoefficients(
      kv=6.24369264e-08,
      query_tokens=6.40216301e-05,
      rows=-3.97382298e-05,
      speculative=-1.12291902e-04,
      fixed=1.834535e-02,
    ),
    draft=DraftCoefficients(target_share=0.04),
    overhead_share=_OVERHEAD_SHARE,
  ),
}


def get(name: str) -> LinearCosts:
  """Returns a published profile.

  Raises:
    UserError: there is none of this name.
  """
  errors.check_known('no published profile', name, PROFILES)
  return PROFILES[name]
