"""Other libraries, on the same model and token ids: the honest rivals.

Times mean the same as in `GenerationStats`.
"""

import importlib.util
from collections.abc import Collection

import jax

import swiftspec_jax as ss
from experiments.measuring import hf_peer, llama_peer
from experiments.measuring.benchmark_run import Decode
from swiftspec_jax import errors

PEERS = (*hf_peer.PEERS, *llama_peer.PEERS)


def check(names: Collection[str]) -> None:
  """Raises UserError unless these peers can run here, and compare fairly."""
  for peer in (hf_peer, llama_peer):
    for package in peer.PACKAGES if set(names) & set(peer.PEERS) else ():
      if importlib.util.find_spec(package) is None:
        raise errors.UserError(
          f'--peers={peer.PEERS[0]} needs {package}; run: pip install -e '
          '".[peers]"'
        )
  if jax.default_backend() != 'cpu':
    raise errors.UserError(
      '--peers run on the CPU, but JAX uses '
      f'{jax.default_backend()}; set JAX_PLATFORMS=cpu to compare'
    )


def facts(target_name: str, names: Collection[str]) -> dict[str, float]:
  """Returns what to know of peers whose weights are not those of the target."""
  if not set(names) & set(llama_peer.PEERS):
    return {}
  bits = llama_peer.bits_per_weight(llama_peer.file_of(target_name))
  return {'llama_cpp_bits_per_weight': bits}


def load(
  name: str,
  target: ss.Model,
  target_name: str,
  draft_name: str | None,
  num_speculative_tokens: int,
) -> Decode:
  """Loads the model of `target` into another library.

  Args:
    name: one of `PEERS`.
    target: model with float32 weights, for transformers; with a GGUF file, for
      llama.cpp.
    target_name: name that it was loaded by.
    draft_name: name of the draft model, for peers that take one.
    num_speculative_tokens: number of tokens that prompt lookup drafts in
      transformers; llama.cpp takes its own default.

  Raises:
    UserError: `target` is not float32, a draft is missing, or a library cannot
      read a model.
  """
  if name in (hf_peer.DRAFT, llama_peer.DRAFT) and draft_name is None:
    raise errors.UserError(f'--peers={name} needs --draft')
  if name in llama_peer.PEERS:
    return llama_peer.load(name, target, target_name, draft_name)
  return hf_peer.load(
    name, target, target_name, draft_name, num_speculative_tokens
  )
