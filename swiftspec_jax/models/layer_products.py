"""The products of a layer, by kernels where these are faster."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from kernels_pallas.matmul_all_reduce import api as project_api
from kernels_pallas.matmul_all_reduce import reference as project_reference
from kernels_pallas.swiglu import api as swiglu_api
from kernels_pallas.swiglu import reference as swiglu_reference
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import layers
from swiftspec_jax.models.matrices.quantization import QuantizedMatrix
from swiftspec_jax.models.matrices.row_products import RowProducts
from swiftspec_jax.runtime import sharding as sharding_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Products:
  """The products of a layer that kernels can make; by default none does.

  Attributes:
    swiglu: the gated product, as `swiglu_reference.swiglu`.
    project: back to the width of the model, as
      `project_reference.matmul_all_reduce`.
  """

  swiglu: Callable[..., jax.Array] = swiglu_reference.swiglu
  project: Callable[..., jax.Array] = project_reference.matmul_all_reduce


PLAIN = Products()


def on_devices(sharding: NamedSharding | None, kernels: str) -> Products:
  """Returns the products of few tokens on the devices of a cache.

  Args:
    sharding: placement of keys and values; None is JAX's default device.
    kernels: implementation, as in ModelConfig.
  """
  columns, rows = None, None
  if sharding is not None:
    columns = sharding_lib.sharding_of(sharding.mesh, (None, None, 'ffw'))
    rows = sharding_lib.sharding_of(sharding.mesh, ('ffw',))
  return Products(
    swiglu=functools.partial(
      swiglu_api.swiglu, implementation=kernels, sharding=columns
    ),
    project=functools.partial(
      project_api.matmul_all_reduce, implementation=kernels, sharding=rows
    ),
  )


def project(x: jax.Array, weight: Any, products: Products) -> jax.Array:
  """Returns x [B, T, in] times a weight [..., D]."""
  if isinstance(weight, layers.MATRICES):
    return layers.product(x, weight)
  return products.project(x, weight)


def gate(
  x: jax.Array, weight: Any, products: Products, activation: str
) -> jax.Array:
  """Returns the gated activation of x [B, T, D] times a weight [D, 2, F]."""
  if isinstance(weight, QuantizedMatrix):
    rows = x.reshape(-1, x.shape[-1])
    hidden = weight.multiply_gated(rows, activation)
    return hidden.reshape(*x.shape[:2], -1)
  if isinstance(weight, layers.MATRICES):
    gate, up = jnp.moveaxis(layers.product(x, weight), 2, 0)
    return swiglu_reference.gated_activation(gate, up, activation)
  return products.swiglu(x, weight, activation=activation)


def of_norm(
  x: jax.Array,
  added: jax.Array | None,
  scale: jax.Array,
  weight: Any,
  config: ModelConfig,
  product_fn: Callable[[jax.Array, Any], jax.Array],
  activation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns x + added [B, T, D], and the product of its norm and a weight.

  Args:
    x: [B, T, D].
    added: [B, T, D], or None for nothing.
    scale: f32[D] scale of the norm.
    weight: weight [D, ...].
    config: configuration of the model.
    product_fn: function of the norm and the weight, where one launch does not
      make all of it.
    activation: name of the activation where the product is gated, or None.
  """
  if added is not None and isinstance(weight, RowProducts):
    rows = (a.reshape(-1, a.shape[-1]) for a in (x, added))
    total, product = weight.multiply_normed(
      *rows, scale, config.norm_eps, activation
    )
    product = product.reshape(*x.shape[:2], *product.shape[1:])
    return total.reshape(x.shape), product
  total = add(x, added)
  normed = layers.rms_norm(total, scale, config.norm_eps)
  return total, product_fn(normed, weight)


def add(x: jax.Array, added: jax.Array | None) -> jax.Array:
  """Returns x + added; x where there is nothing to add."""
  return x if added is None else x + added
