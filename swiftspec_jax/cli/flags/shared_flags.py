"""Flags that several programs share, and what they stand for."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags

import swiftspec_jax as ss
from kernels_pallas import dispatch
from swiftspec_jax import config, errors
from swiftspec_jax.checkpoint import builtin, find
from swiftspec_jax.cli import provenance
from swiftspec_jax.cli.flags import (
  config_file,
  device_flags,
  draft_flags,
  flag_values,
  modes,
  tree_flags,
)
from swiftspec_jax.runtime import hosts

_TARGET = flags.DEFINE_string(
  'target',
  'smollm2-135m-instruct',
  'Model that defines the output: a built-in name '
  f'({", ".join(ss.BUILTIN_MODELS)}), a directory in Hugging Face layout, a '
  '.gguf file, or a Hugging Face hub id.',
)
_DRAFT = flags.DEFINE_string(
  'draft',
  None,
  f'Draft model of modes {", ".join(modes.OF_DRAFTS)}; named like --target. '
  'Default: the built-in one, which auto and modes with trees can use '
  f'({", ".join(ss.BUILTIN_DRAFTS)}).',
)
_DRAFT_LAYERS = flags.DEFINE_integer(
  'draft_layers',
  None,
  'Number of layers of --draft to keep, the first ones. If --draft is the '
  'model of --target, that makes a draft for studies of any model.',
  lower_bound=1,
)
SAMPLING = flag_values.define_fields(
  ss.SamplingParams,
  {
    'max_new_tokens': 'Token limit of each output.',
    'temperature': "0 is greedy, 1 the model's own distribution.",
    'top_k': 'Sample from the k most probable tokens; 0 keeps all.',
    'top_p': 'Sample from the most probable tokens that have this probability '
    'together.',
    'seed': 'Of the noise of sampling.',
  },
)
_DTYPE = flags.DEFINE_enum(
  'dtype',
  None,
  ['float32', 'bfloat16'],
  'Of weights and cache. Default: float32 on CPU, bfloat16 elsewhere.',
)

_WEIGHT_DTYPE = flags.DEFINE_enum(
  'weight_dtype',
  None,
  (*config.WEIGHT_DTYPES, config.WIDE),
  'Quantize the matrices of the layers of --target and --draft; '
  'int8_dynamic and int8_dynamic16: also the unembedding and the activations. '
  'wide: widen the float8 or mxfp4 of a checkpoint, or the blocks of a .gguf '
  'file, to --dtype; stored: those blocks as they are, of --target alone, on '
  'one CPU. Default: the numbers of a checkpoint; on one CPU without --dtype '
  'the blocks of a .gguf file of Llama or Qwen 2.',
)
_DRAFT_WEIGHT_DTYPE = flags.DEFINE_enum(
  'draft_weight_dtype',
  None,
  (*config.WEIGHT_DTYPES, config.WIDE),
  'The same for --draft alone, which need not be exact: the output stays that '
  'of --target. Default: as --weight_dtype, but never stored; of the built-in '
  'draft on CPUs, where it is faster, int8_dynamic.',
)
_KERNELS = flags.DEFINE_enum(
  'kernels',
  'auto',
  dispatch.IMPLEMENTATIONS,
  'What steps of few tokens run on: Pallas kernels or plain JAX. auto is a '
  'kernel where there is one for the devices and the shape, and it agrees with '
  'plain JAX there.',
)
_ROPE_SCALING = flags.DEFINE_string(
  'rope_scaling',
  None,
  'Have --target and --draft take longer texts than they were trained for: '
  'what config.json would say, as in {"rope_type": "yarn", "factor": 4.0}. '
  'Types are yarn, linear and dynamic; original_max_position_embeddings is by '
  'default the context of the model.',
)
_DRAFT_ROPE_SCALING = flags.DEFINE_string(
  'draft_rope_scaling',
  None,
  'The same for --draft alone; null leaves it as it is. Default: as '
  '--rope_scaling.',
)


def sampling() -> ss.SamplingParams:
  """Returns what the flags say about sampling, checked."""
  values = {name: holder.value for name, holder in SAMPLING.items()}
  return ss.SamplingParams(**values)


def _rope_scaling(
  holder: flags.FlagHolder[str | None] = _ROPE_SCALING,
) -> dict[str, Any] | None:
  """Returns the JSON object of a flag; None leaves a model as it is."""
  try:
    values = json.loads(holder.value or 'null')
  except ValueError:
    values = holder.value
  if values is not None and not isinstance(values, dict):
    raise errors.UserError(
      f'--{holder.name}={holder.value} must be a JSON object such as '
      '{"rope_type": "yarn", "factor": 4.0}'
    )
  return values


def samplings(num_repeats: int) -> list[ss.SamplingParams]:
  """Returns the sampling of each repeat; each has noise of its own."""
  first = sampling()
  return [
    dataclasses.replace(first, seed=first.seed + repeat)
    for repeat in range(num_repeats)
  ]


def default_modes() -> tuple[str, ...]:
  """Returns the modes that are measured if none are named.

  These are all that the flags allow, but async, which needs devices, and those
  that decode over pages.
  """
  own = modes.where(lambda mode: mode.decodes and not mode.is_paged)
  return tuple(
    mode
    for mode in own
    if mode != 'async' and (mode == modes.AUTO or not _lacks_draft(mode))
  )


def target_name() -> str:
  """Returns the name that the target is loaded by."""
  return _TARGET.value


def draft_name(mode: str) -> str | None:
  """Returns the name of the draft model of a mode, None if there is none."""
  if _DRAFT.value or not modes.MODES[mode].has_builtin:
    return _DRAFT.value or None
  return builtin.draft_for(_TARGET.value)


def _lacks_draft(mode: str) -> bool:
  return modes.MODES[mode].takes_draft and draft_name(mode) is None


def check(names: Sequence[str]) -> None:
  """Raises UserError if the flags do not fit together; loads nothing.

  Must come before anything asks JAX for its devices.
  """
  sampling()
  modes.check_flags(names)
  tree_flags.config()
  draft_flags.prompt_lookup()
  draft_flags.self_draft()
  _rope_scaling()
  _rope_scaling(_DRAFT_ROPE_SCALING)
  device_flags.prepare(names)
  device_flags.check(names)
  config_file.check_device()
  for mode in names:
    if mode != modes.AUTO and _lacks_draft(mode):
      raise errors.UserError(f'mode {mode} needs a draft model: give --draft')


def compare_files(names: Sequence[str], *paths: str | None) -> None:
  """Makes sure that all processes read the same.

  Args:
    names: modes whose models are loaded.
    *paths: other files; None is none.

  Raises:
    UserError: files or devices of the processes differ.
  """
  if not hosts.is_together():
    return
  models = {_TARGET.value, *map(draft_name, names)}
  files = {name: find.find(name) for name in models if name is not None}
  files |= {path: pathlib.Path(path) for path in paths if path is not None}
  hosts.agree(
    {f'content of {name}': hosts.fingerprint(x) for name, x in files.items()}
    | {'kind of devices': jax.local_devices()[0].device_kind}
  )


def load_target(
  weight_dtype: str | None = None, *, is_wide: bool = False
) -> ss.Model:
  """Loads the model of --target.

  Args:
    weight_dtype: type of the weights in place of --weight_dtype.
    is_wide: whether a CPU without --dtype widens the blocks of a file, too.
  """
  dtype = _DTYPE.value
  if is_wide and jax.default_backend() == 'cpu':
    dtype = dtype or 'float32'
  return ss.load(
    _TARGET.value,
    dtype=dtype,
    devices=device_flags.target_devices(),
    sequence_devices=device_flags.sequence_devices(),
    kernels=_KERNELS.value,
    weight_dtype=weight_dtype or _WEIGHT_DTYPE.value,
    rope_scaling=_rope_scaling(),
  )


def load_drafts(target: ss.Model, names: Sequence[str]) -> dict[str, ss.Model]:
  """Loads the model of --draft where modes need it.

  Returns:
    The draft of each mode that has one. Modes that have it on the target's
    devices share it.
  """
  drafts = {}
  drafting = [mode for mode in names if mode in modes.OF_DRAFTS]
  sharing = [m for m in drafting if m != 'async' and draft_name(m) is not None]
  if sharing:
    drafts = dict.fromkeys(sharing, load_draft(target, sharing[0]))
  if 'async' in drafting:
    drafts['async'] = load_draft(target, 'async')
  return drafts


def load_draft(target: ss.Model, mode: str) -> ss.Model:
  """Loads the draft model of a mode, for async on devices of its own."""
  is_apart = mode == 'async'
  has_own = _DRAFT_ROPE_SCALING.value is not None
  return ss.load(
    draft_name(mode),
    dtype=_DTYPE.value,
    devices=device_flags.draft_devices()
    if is_apart
    else list(target.mesh.devices.flat),
    sequence_devices=1 if is_apart else device_flags.sequence_devices(),
    draft_of=target,
    num_layers=_DRAFT_LAYERS.value,
    kernels=_KERNELS.value,
    weight_dtype=_draft_weight_dtype(target),
    rope_scaling=_rope_scaling(
      _DRAFT_ROPE_SCALING if has_own else _ROPE_SCALING
    ),
  )


def _draft_weight_dtype(target: ss.Model) -> str | None:
  of_both = _WEIGHT_DTYPE.value
  if of_both == config.STORED:
    of_both = None  # few drafts have blocks
  given = _DRAFT_WEIGHT_DTYPE.value or of_both
  is_on_cpu = target.mesh.devices.flat[0].platform == 'cpu'
  is_builtin = _DRAFT.value in (None, *ss.BUILTIN_DRAFTS)
  if given is None and is_builtin and is_on_cpu:
    return 'int8_dynamic'  # faster, and a draft need not be exact
  return given


def speculation(mode: str, draft: ss.Model | None) -> dict[str, Any]:
  """Returns the arguments of `ss.Decoder` that make it one of the modes."""
  return {'run_ahead': tree_flags.run_ahead(), **_drafts(mode, draft)}


def _drafts(mode: str, draft: ss.Model | None) -> dict[str, Any]:
  make = modes.MODES[mode].make
  if mode == modes.AUTO and draft is None:
    return {'draft': draft_flags.prompt_lookup(), 'policy': 'goodput'}
  if make is not None:
    made = make()
    has_length = hasattr(made, 'num_speculative_tokens')
    lengths = {} if has_length else draft_flags.num_speculative_tokens()
    return {'draft': made, **lengths}
  if mode == modes.PLAIN:
    return {}
  if mode == 'chain':
    return {'draft': draft, **draft_flags.num_speculative_tokens()}
  tree = tree_flags.config()
  if mode == modes.TREE:
    new_trees = tree_flags.new_trees(draft)
    return {'draft': new_trees, 'num_speculative_tokens': tree.num_nodes - 1}
  if mode == modes.AUTO:
    tree = dataclasses.replace(tree, forced_acceptance=None)
    return {'draft': draft, 'tree': tree, 'policy': 'goodput'}
  return {'draft': draft, 'tree': tree}


def make_decoder(
  mode: str,
  target: ss.Model,
  draft: ss.Model | None,
  **options: Any,
) -> ss.Decoder:
  """Returns a decoder of one of the modes, for one request at a time.

  Args:
    mode: mode.
    target: model that defines the output.
    draft: model of the mode, if it has one.
    **options: further arguments of the decoder; a policy of None is that of
      the mode.
  """
  if options.get('policy') is None:
    options.pop('policy', None)
  return ss.Decoder(target, **{**speculation(mode, draft), **options})


def shared_settings(prompts: pathlib.Path, **settings: Any) -> dict[str, Any]:
  """Returns what results must share to be put into one summary.

  Args:
    prompts: the file.
    **settings: values of the program's own flags, by name.
  """
  facts = provenance.collect()
  return {
    **to_json(),
    **settings,
    'prompts_sha256': hashlib.sha256(prompts.read_bytes()).hexdigest(),
    **{name: facts[name] for name in ('git_sha', 'device_kind', 'cpu')},
  }


def to_json() -> dict[str, Any]:
  """Returns the values of the shared flags, by name."""
  return flag_values.of(__name__, draft_flags, device_flags, tree_flags)
