"""The same calls by PyTorch on a GPU: SDPA, FlexAttention, a compiled layer.

The time is that of the kernels on the device, without gaps, the same as of JAX.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.kernels.kernel_cases import Case
from kernels_pallas.tree_attention import reference as attention_reference

_WARM_UPS = 3


def is_installed() -> bool:
  """Returns whether torch is installed, without importing it."""
  return importlib.util.find_spec('torch') is not None


def is_usable() -> bool:
  """Returns whether torch is installed and sees a GPU."""
  if not is_installed():
    return False
  import torch

  return torch.cuda.is_available()


def names(case: Case) -> tuple[str, ...]:
  """Returns the names of what PyTorch has for a call."""
  if case.kernel == 'tree_attention' and not case.spec.has_sinks:
    return 'torch SDPA', 'torch FlexAttention'
  return ('torch compiled',) if case.kernel == 'swiglu' else ()


def contender(case: Case, name: str) -> Callable[..., Any]:
  """Returns a function of the tensors of `tensors` by its name."""
  make = {
    'torch SDPA': _sdpa,
    'torch FlexAttention': _flex_attention,
    'torch compiled': _layer,
  }
  return make[name](case.spec)


def _sdpa(spec):
  from torch.nn import functional

  def call(queries, keys, values, visible):
    return functional.scaled_dot_product_attention(
      queries,
      keys,
      values,
      attn_mask=visible[:, None],
      scale=spec.head_dim**-0.5,
      enable_gqa=True,
    )

  return call


def _flex_attention(spec):
  import torch
  from torch.nn.attention import flex_attention

  compiled = torch.compile(flex_attention.flex_attention)

  def call(queries, keys, values, visible):
    def score(score, batch, head, query, row):
      del head
      return torch.where(visible[batch, query, row], score, -float('inf'))

    return compiled(
      queries,
      keys,
      values,
      score_mod=score,
      scale=spec.head_dim**-0.5,
      enable_gqa=True,
    )

  return call


def _layer(spec):
  import torch
  from torch.nn import functional

  @torch.compile
  def call(x, weight):
    gate, up = (x @ weight).chunk(2, dim=1)
    if spec.activation == 'silu':
      return functional.silu(gate) * up
    return functional.gelu(gate, approximate='tanh') * up

  return call


def tensors(case: Case, arrays: Any, device: str = 'cuda') -> list[Any]:
  """Returns the arguments as torch tensors, in the form that it wants."""
  import torch

  if case.kernel == 'tree_attention':
    queries, keys, values, lengths, mask, positions = arrays
    visible = attention_reference.visible_rows(lengths, mask, keys.shape[2])
    if case.spec.window is not None:
      rows = jnp.arange(keys.shape[2])[None, None]
      visible &= positions[:, :, None] - rows < case.spec.window
    # Query heads of one kv head side by side, tokens after them.
    heads = jnp.moveaxis(queries, 1, 3)
    heads = heads.reshape(heads.shape[0], -1, *heads.shape[3:])
    arrays = (heads, keys, values, visible)
  else:
    x, gate_up = arrays
    arrays = (x, gate_up.reshape(gate_up.shape[0], -1))

  def convert(array):
    if array.dtype == jnp.bool_:
      return torch.from_numpy(np.array(array)).to(device)
    wide = np.array(array.astype(jnp.float32))
    dtype = torch.bfloat16 if array.dtype == jnp.bfloat16 else torch.float32
    return torch.from_numpy(wide).to(device, dtype)

  return jax.tree.map(convert, list(arrays))


def seconds_of(case: Case, name: str, repeats: int) -> float:
  """Returns the mean of the seconds of a call on a GPU."""
  import torch

  call = contender(case, name)
  sets = case.make_sets(lambda *arrays: tensors(case, arrays))
  with torch.inference_mode():
    for arguments in sets * _WARM_UPS:
      call(*arguments)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
      for arguments in sets * repeats:
        call(*arguments)
      torch.cuda.synchronize()
  micros = sum(e.self_device_time_total for e in profile.key_averages())
  return micros / 1e6 / (repeats * len(sets))
