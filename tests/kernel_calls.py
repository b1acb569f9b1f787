"""The functions that models call, with the arguments of `arg_specs`."""

from kernels_pallas.kv_commit import api as commit_api
from kernels_pallas.quantized_matmul import api as quantized_api
from kernels_pallas.rejection import api as rejection_api
from kernels_pallas.swiglu import api as swiglu_api
from kernels_pallas.thresholds import api as threshold_api
from kernels_pallas.tree_attention import api as attention_api
from kernels_pallas.verification import api as verification_api
from swiftspec_jax import sharding

API_CALLS = {
  'accept_chain': rejection_api.accept_chain,
  'find_thresholds': threshold_api.find_thresholds,
  'kv_commit': commit_api.kv_commit,
  'quantized_matmul': lambda *arrays, **options: quantized_api.quantized_matmul(
    *arrays,
    sharding=sharding.sharding_of(sharding.make_mesh(), (None,) * 3),
    **options,
  ),
  'swiglu': lambda x, *rest, **options: swiglu_api.swiglu(
    x[None], *rest, **options
  ),
  'tree_attention': attention_api.tree_attention,
  'verify_tree': verification_api.verify_tree,
}
