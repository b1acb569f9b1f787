"""The same in Pallas, interpreted."""

import os
import signal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def _run(kernel, x):
  shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
  return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)


def right(x):
  def kernel(x_ref, out_ref):
    out_ref[...] = x_ref[...] + x_ref[...]

  return _run(kernel, x)


def wrong(x):
  """In one number."""

  def kernel(x_ref, out_ref):
    out_ref[...] = 2 * x_ref[...]
    out_ref[0, 5] = x_ref[0, 5]

  return _run(kernel, x)


def crashing(x):
  def kernel(x_ref, out_ref):
    os.kill(os.getpid(), signal.SIGSEGV)

  return _run(kernel, x)


def hanging(x):
  def kernel(x_ref, out_ref):
    turns = jax.lax.while_loop(
      lambda i: i >= 0, lambda i: (i + 1) % 7, jnp.int32(0)
    )
    out_ref[...] = x_ref[...] * turns.astype(x_ref.dtype)

  return _run(kernel, x)


def refused(x):
  def kernel(x_ref, out_ref):
    raise ValueError('no such layout')

  return _run(kernel, x)
