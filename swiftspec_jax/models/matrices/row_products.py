"""What matrices have in common that round nothing before their sums."""

import abc
from typing import Any

import jax


class RowProducts(abc.ABC):
  """Products of rows with a matrix, by one function that returns f32."""

  @abc.abstractmethod
  def _multiply(self, x: jax.Array, *norm: jax.Array, **options: Any) -> Any:
    """Returns rows x [T, K] times the matrix: f32[T, *A].

    Args:
      x: rows.
      *norm: what is added to x, and the scale of a norm, whose result is
        multiplied. Then the sum is returned, too, in front of the product.
      **options: `epsilon` of the norm, and `activation`.
    """

  def scores(self, x: jax.Array) -> jax.Array:
    """Returns rows x [T, K] times the matrix: f32 [T, *A]."""
    return self._multiply(x)

  def multiply(self, x: jax.Array) -> jax.Array:
    """Returns rows x [T, K] times the matrix in their dtype: [T, *A]."""
    return self._multiply(x).astype(x.dtype)

  def multiply_normed(
    self,
    x: jax.Array,
    added: jax.Array,
    norm_scale: jax.Array,
    epsilon: float,
    activation: str | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    """Returns x + added, and its norm times the matrix.

    Args:
      x: [T, K].
      added: [T, K].
      norm_scale: f32[K] scale of the norm.
      epsilon: number that is added to the mean square.
      activation: gate that joins two parts, or None.

    Returns:
      [T, K], and [T, *A], or [T, N] with an activation.
    """
    total, product = self._multiply(
      x, added, norm_scale, epsilon=epsilon, activation=activation
    )
    return total, product.astype(x.dtype)
