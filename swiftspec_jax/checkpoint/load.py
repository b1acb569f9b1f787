"""Finds a model by name or path and loads it."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kernels_pallas import dispatch, tuning
from kernels_pallas.gguf_blocks import native as gguf_native
from kernels_pallas.native import library
from swiftspec_jax import config as config_lib
from swiftspec_jax import errors
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.checkpoint import end_tokens, find, formats, memory
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.drafters.models import shared_vocabulary
from swiftspec_jax.models import attention
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.models import rope_scaling as rope_scaling_lib
from swiftspec_jax.models.model import Model
from swiftspec_jax.runtime import sharding


def load(
  name_or_path: str | os.PathLike,
  *,
  file: str | None = None,
  dtype: jax.typing.DTypeLike | None = None,
  devices: Sequence[jax.Device] | None = None,
  sequence_devices: int = 1,
  draft_of: Model | None = None,
  num_layers: int | None = None,
  kernels: str = 'auto',
  weight_dtype: str | None = None,
  rope_scaling: Mapping[str, Any] | None = None,
) -> Model:
  """Loads a model.

  Args:
    name_or_path: a built-in name (`swiftspec_jax.BUILTIN_MODELS`,
      `swiftspec_jax.BUILTIN_DRAFTS`), a directory in Hugging Face layout, an
      EAGLE-3 head or a DFlash draft in one of its published layouts, a
      ReDrafter head, a .gguf file, a directory that `swiftspec_jax.save` or the
      training of a draft wrote, or a Hugging Face hub id.
    file: glob of the .gguf file to take from a hub id or a directory with
      several, such as '*q4_k_m.gguf'; `name:glob` as a name means the same.
      The numbers of a file in pieces are left out.
    dtype: dtype of weights and cache. Default: float32 on CPU, bfloat16
      elsewhere.
    devices: devices that share the model by tensor parallelism; the first
      device by default.
    sequence_devices: number of devices that share the tokens of the same kv
      heads, for long contexts in the serving engine. It divides the number of
      devices. The others share the heads.
    draft_of: the target that this model will draft for. Both need the same
      vocabulary, but one may have more tokens after those of the other: a
      draft proposes only tokens that both have. The padding of their tables may
      differ. Of a checkpoint with a layer for multi-token prediction (MiMo),
      that layer alone is loaded; so the name is that of the target.
    num_layers: number of first layers to keep, which makes a draft of any
      model, for studies; None keeps all.
    kernels: name of the code that steps of few tokens run, and prompts on one
      CPU. 'auto' takes a kernel where there is one for the devices and the
      shape, and where it agrees there with plain JAX (`kernels_pallas.trials`).
      'reference' is plain JAX. 'pallas_tpu' and 'pallas_gpu' insist on kernels,
      'mosaic_gpu' on those for Hopper where there is one, 'native' on those for
      one CPU.
    weight_dtype: type of the matrices of the layers. None keeps `dtype`, or the
      int8, int4, float8 or mxfp4 that a published checkpoint has; with `dtype`
      None and on one CPU it is 'stored' for a .gguf file of Llama or Qwen 2
      whose blocks the native kernels multiply. 'wide' widens float8, mxfp4 and
      such blocks to `dtype`. 'int8' quantizes with a scale for each
      output; 'int4' and 'float8' with one for each output and group of up to
      128 inputs; 'mxfp4', only of experts, with a power of two for each output
      and 32 inputs. Embedding, unembedding and norms stay as they are. Mixtures
      of experts take int8, float8 and mxfp4. On one CPU the native kernels
      round activations to 16 bits for int8, and to 8 bits for int4.
      'int8_dynamic' multiplies int8 by int8, for CPUs: the matrices of the
      layers and the unembedding have a scale for each output, and the
      activations are rounded with a scale for each token. 'int8_dynamic16' is
      the same, but keeps 16 bits of the layers' activations. 'stored', for one
      CPU, multiplies the blocks that a .gguf file has, which is mapped and not
      read: tables and matrices stay in its 4 to 8 bits. Activations are rounded
      to int8 with a scale for each 32.
    rope_scaling: entries by which a model without a scaling takes longer texts
      than it was trained for, as `config.json` has them: `rope_type`, which is
      'yarn', 'linear' or 'dynamic', `factor`, and others of that type.
      `original_max_position_embeddings` is by default the context of the model.
      The new one is `factor` times that. A draft needs the same.

  Raises:
    UserError: there is nothing by that name; the checkpoint is broken or
      unknown; its vocabulary is not that of `draft_of`; it has fewer layers
      than `num_layers`; the kernels are for other devices; `weight_dtype` is
      unknown; `rope_scaling` makes no sense, or the model has one;
      `sequence_devices` does not divide the number of devices; or the
      environment names a bad file of tiles (`kernels_pallas.tuning`), or lets
      XLA for GPUs run kernels at once (`kernels_pallas.last_program`).
  """
  name = os.fspath(name_or_path)
  if file is not None:
    name = f'{name}:{file}'
  mesh = sharding.make_mesh(devices, sequence_devices)
  platform = mesh.devices.flat[0].platform
  is_native = (
    platform == 'cpu' and mesh.size == 1 and kernels != dispatch.REFERENCE
  )
  if is_native:
    library.prepare('attention')  # beside all that follows
  _check_kernels(kernels, mesh, platform)
  if weight_dtype == config_lib.STORED and not is_native:
    raise errors.UserError(
      f"weight_dtype='stored' is for the native kernels on one CPU, not for "
      f'kernels={kernels!r} on {mesh.size} of platform {platform}; pass '
      "devices=jax.devices('cpu')[:1] and kernels='auto', or another "
      'weight_dtype'
    )
  source = formats.open_source(find.find(name), draft_of)
  suffix = '' if weight_dtype is None else f' ({weight_dtype})'
  with futures.ThreadPoolExecutor(1) as pool:
    reading = pool.submit(source.read_tokenizer)  # beside the weights
    if is_native:
      weight_dtype = _for_native_kernels(source, weight_dtype, dtype)
    dtype = dtype or (jnp.float32 if platform == 'cpu' else jnp.bfloat16)
    if draft_of is not None and reading.result() is not draft_of.tokenizer:
      source = _fit(source, name, reading.result(), draft_of)
    config = dataclasses.replace(
      source.config,
      num_shards=mesh.devices.size,
      num_sequence_shards=sequence_devices,
      kernels=kernels,
      weight_dtype=_weight_dtype(name, source.config, weight_dtype),
    )
    if rope_scaling is not None:
      config = _stretched(name, config, rope_scaling, draft_of)
      kind = rope_scaling_lib.kind_of(rope_scaling)
      name = f'{name} ({kind} {rope_scaling["factor"]:g})'
    if num_layers is not None:
      config = config.with_layers(num_layers)
      name = f'{name} ({num_layers} layers)'
    name += suffix
    params = _read_params(source, name, config, dtype, mesh, reading)
    tokenizer = reading.result()
  if not source.reads_target:
    config = end_tokens.complete(config, tokenizer, source.end_token_ids)
  return Model(
    name=name,
    config=config,
    params=params,
    dtype=jnp.dtype(dtype),
    mesh=mesh,
    tokenizer=tokenizer,
  )


def _check_kernels(kernels: str, mesh: Mesh, platform: str) -> None:
  """Raises UserError if a mesh cannot have such kernels."""
  if kernels not in ('auto', *dispatch.implementations_of(platform)):
    raise errors.UserError(
      f'kernels={kernels!r} cannot run on {platform} devices; auto takes what '
      'can'
    )
  if kernels == 'native' and mesh.size > 1:
    raise errors.UserError(
      f"kernels='native' is for one device, not {mesh.size}; pass "
      "devices=jax.devices()[:1] or kernels='auto'"
    )
  with errors.explained('', ValueError):
    tuning.check_variable()
    if platform == 'gpu':
      dispatch.check_flags(has_kernels=kernels != dispatch.REFERENCE)
  if kernels == 'native':
    with errors.explained("kernels='native': ", NotImplementedError):
      for needed in ('few_rows', 'attention'):
        library.check(needed)


def _for_native_kernels(
  source: formats.Source,
  weight_dtype: str | None,
  dtype: jax.typing.DTypeLike | None,
) -> str | None:
  """Returns the `weight_dtype` on one CPU; its library is being compiled.

  Raises:
    UserError: weights shall be multiplied as stored, and there is no library.
  """
  is_stored = weight_dtype == config_lib.STORED
  suits = weight_dtype is None and attention.suits_native(source.config)
  if source.block_kinds and (is_stored or (suits and dtype is None)):
    try:
      gguf_native.check(source.block_kinds)
    except NotImplementedError as error:
      if is_stored:
        raise errors.UserError(f"weight_dtype='stored': {error}") from error
      return None  # the library has said why
    return config_lib.STORED
  if not is_stored:
    library.prepare('few_rows')
  return weight_dtype


def _weight_dtype(
  name: str, config: ModelConfig, weight_dtype: str | None
) -> str | None:
  """Returns that of the matrices, which a checkpoint may have already."""
  stored = config.weight_dtype
  can_change = stored in (None, 'float8', 'mxfp4')
  if not can_change and weight_dtype not in (None, stored):
    raise errors.UserError(
      f'{name} is stored as {stored} and cannot become {weight_dtype}; leave '
      'out weight_dtype'
    )
  return None if weight_dtype == config_lib.WIDE else weight_dtype or stored


def _stretched(
  name: str,
  config: ModelConfig,
  rope_scaling: Mapping[str, Any],
  draft_of: Model | None,
) -> ModelConfig:
  """Returns the configuration for longer texts."""
  found = rope_scaling_lib.override(config, rope_scaling)
  is_named = 'original_max_position_embeddings' in rope_scaling
  if draft_of is None or draft_of.config.rope_scaling is None or is_named:
    return found
  if config.max_context == draft_of.config.max_context:
    # Heads of a target have its context, which is a stretched one.
    raise errors.UserError(
      f'{name} takes {config.max_context} tokens already, as {draft_of.name} '
      'does; name original_max_position_embeddings in its rope_scaling, or '
      'leave that out'
    )
  return found


def _read_params(
  source: formats.Source,
  name: str,
  config: ModelConfig,
  dtype: jax.typing.DTypeLike,
  mesh: Mesh,
  reading: futures.Future,
) -> params_lib.Params:
  """Returns the parameters on the devices, as far as this host has any.

  A tokenizer that cannot be read, as `reading` finds out, ends it early.
  """
  mapped = config.weight_dtype == config_lib.STORED  # takes next to no memory
  if not source.reads_target and not mapped:  # its tables are the target's
    memory.warn_if_short(name, config, dtype, mesh)

  def place(arrays, specs):
    if reading.done():
      reading.result()
    return params_lib.place_params(arrays, specs, dtype=dtype, mesh=mesh)

  if mesh.local_devices or source.reads_target:
    return source.read_params(config, place)
  return place(*params_lib.absent(config))


def _fit(
  source: formats.Source,
  name: str,
  tokenizer: tokenizer_lib.Tokenizer,
  target: Model,
) -> formats.Source:
  """Returns a stand-alone draft with the vocabulary of its target."""
  stored = source.config

  def read_params(config, place):
    place = shared_vocabulary.fit_place(place, config)
    config = dataclasses.replace(
      config,
      vocab_size=stored.vocab_size,
      shared_vocab_size=stored.shared_vocab_size,
    )
    return source.read_params(config, place)

  config = shared_vocabulary.fit(stored, name, tokenizer, target)
  return dataclasses.replace(source, config=config, read_params=read_params)
