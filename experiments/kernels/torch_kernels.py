"""The same calls by PyTorch on a GPU: SDPA, FlexAttention, a compiled layer.

The time is that of the kernels on the device, without gaps, the same as of JAX.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.kernels.kernel_cases import Case
from kernels_pallas.tree_attention import reference as attention_reference

_WARM_UPS = 3


def is_usable() -> bool:
  """Returns whether torch is installed and sees a GPU."""
  if importlib.util.find_spec('torch') is None:
    return False
  import torch

  return torch.cuda.is_available()


def contenders(case: Case) -> Iterator[tuple[str, Callable[..., Any]]]:
  """Yields names and functions of the tensors of `tensors`."""
  import torch
  from torch.nn import functional
  from torch.nn.attention import flex_attention

  if case.kernel == 'tree_attention' and not case.spec.has_sinks:
    scale = case.spec.head_dim**-0.5

    def sdpa(queries, keys, values, visible):
      return functional.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=visible[:, None],
        scale=scale,
        enable_gqa=True,
      )

    yield 'torch SDPA', sdpa
    compiled = torch.compile(flex_attention.flex_attention)

    def flex(queries, keys, values, visible):
      def score(score, batch, head, query, row):
        del head
        return torch.where(visible[batch, query, row], score, -float('inf'))

      return compiled(
        queries, keys, values, score_mod=score, scale=scale, enable_gqa=True
      )

    yield 'torch FlexAttention', flex
  if case.kernel == 'swiglu':

    @torch.compile
    def layer(x, weight):
      gate, up = (x @ weight).chunk(2, dim=1)
      if case.spec.activation == 'silu':
        return functional.silu(gate) * up
      return functional.gelu(gate, approximate='tanh') * up

    yield 'torch compiled', layer


def tensors(case: Case, arrays: Any, device: str = 'cuda') -> list[Any]:
  """Returns the arguments as torch tensors, in the form that it wants."""
  import torch

  if case.kernel == 'tree_attention':
    queries, keys, values, lengths, mask, positions = arrays
    visible = attention_reference.visible_rows(lengths, mask, keys.shape[2])
    if case.spec.window is not None:
      rows = jnp.arange(keys.shape[2])[None, None]
      visible &= positions[:, :, None] - rows < case.spec.window
    # Query heads of one kv head side by side, tokens behind them.
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


def seconds_of(
  call: Callable[..., Any], sets: Sequence[Any], repeats: int
) -> float:
  """Returns the mean of the seconds of a call on tensors of a GPU."""
  import torch

  with torch.inference_mode():
    for tensors in [*sets] * _WARM_UPS:
      call(*tensors)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
      for tensors in [*sets] * repeats:
        call(*tensors)
      torch.cuda.synchronize()
  micros = sum(e.self_device_time_total for e in profile.key_averages())
  return micros / 1e6 / (repeats * len(sets))
