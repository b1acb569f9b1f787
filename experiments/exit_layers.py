r"""How often a middle layer of a target knows what the target will choose.

  python -m experiments.exit_layers --limit=8 --output_dir=results

A target with --exit_layer tells its draft what a middle layer expects
(Mirror-SD). Here the target decodes prompts greedily. Then each layer's hidden
states go through the final norm and the unembedding. rows.jsonl has a line for
each layer: how often the token that the target chose is its best one, or among
its best 4 or 8. Counts are exact, and times are not measured.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import flags

import swiftspec_jax as ss
from experiments import program
from experiments import prompts as prompts_lib
from experiments.flags import shared_flags, size_flags
from experiments.measuring import benchmark_run
from experiments.output import benchmark_output, provenance
from swiftspec_jax import buckets, errors
from swiftspec_jax.cache import dense
from swiftspec_jax.models import decoder

_PROMPTS = flags.DEFINE_string(
  'prompts', str(prompts_lib.DEFAULT_PATH), 'JSON lines with the prompts.'
)
_LIMIT = flags.DEFINE_integer(
  'limit', 8, 'How many prompts to take.', lower_bound=1
)
_LAYERS = flags.DEFINE_list(
  'layers', None, 'Numbers of layers, ascending. Default: all.'
)
_OUTPUT_DIR = flags.DEFINE_string(
  'output_dir', None, 'New or empty directory for the results.', required=True
)
_HOLDERS = _PROMPTS, _LIMIT, _LAYERS
_COUNTS = 1, 4, 8
flags.FLAGS.set_default('max_new_tokens', 48)


def main() -> None:
  """Runs the program."""
  shared_flags.check(['autoregressive'])
  directory = pathlib.Path(_OUTPUT_DIR.value)
  benchmark_output.open_directory(directory, {}, resume=False)
  target = shared_flags.load_target()
  numbers = range(1, target.config.num_layers + 1)
  if _LAYERS.value:
    numbers = size_flags.read(_LAYERS)
    if numbers[-1] > target.config.num_layers:
      raise errors.UserError(
        f'--layers={",".join(_LAYERS.value)} must be at most '
        f'{target.config.num_layers}, the layers of {target.name}'
      )
  prompts = prompts_lib.read_prompts(pathlib.Path(_PROMPTS.value), _LIMIT.value)
  sampling = shared_flags.sampling()
  decode = benchmark_run.make_decode(ss.Decoder(target))
  found = []
  for _, prompt in tqdm.tqdm(
    benchmark_run.encode(target, prompts, sampling.max_new_tokens)
  ):
    result = decode(ss.Request(token_ids=prompt, sampling=sampling))
    found.append(_ranks(target, prompt, result.token_ids, tuple(numbers)))
  ranks = np.concatenate(found, axis=1)
  print('layer  best  of 4  of 8')
  for number, row in zip(numbers, ranks, strict=True):
    shares = {f'among_{n}': float((row < n).mean()) for n in _COUNTS}
    line = {'layer': number, 'num_tokens': len(row), **shares}
    benchmark_output.append_line(directory / 'rows.jsonl', line)
    print(f'{number:5}', *(f'{share:5.2f}' for share in shares.values()))
  settings = {holder.name: holder.value for holder in _HOLDERS}
  facts = {
    **provenance.collect(),
    'flags': {**shared_flags.to_json(), **settings},
  }
  benchmark_output.write_json(directory / 'provenance.json', facts)


def _ranks(
  target: ss.Model,
  prompt: tuple[int, ...],
  output: tuple[int, ...],
  numbers: tuple[int, ...],
) -> np.ndarray:
  """Returns i64[layers, tokens], how many tokens seemed better than each."""
  text = np.array([*prompt, *output], np.int32)
  size = buckets.power_of_two(len(text))
  places = np.arange(len(prompt) - 1, len(text) - 1)
  ranks = _ranks_at(
    target.params,
    np.pad(text, (0, size - len(text)))[None],
    np.resize(places, shared_flags.sampling().max_new_tokens),
    cache=dense.KVCacheConfig.of_model(
      target.config, 1, size, target.dtype
    ).init(target.mesh),
    config=target.config,
    numbers=numbers,
  )
  return np.asarray(ranks)[:, : len(places)]


@functools.partial(jax.jit, static_argnames=('config', 'numbers'))
def _ranks_at(params, token_ids, places, cache, config, numbers):
  """Returns the ranks i32[layers, n] of the tokens behind places i32[n]."""
  _, outputs, _ = decoder.forward_with_features(
    params,
    config,
    token_ids,
    cache,
    starts=jnp.zeros(1, jnp.int32),
    context=token_ids.shape[1],
    feature_layers=tuple(number - 1 for number in numbers),
  )
  outputs = jnp.stack(jnp.split(outputs[0, places], len(numbers), axis=-1))
  chosen = token_ids[0, places + 1][:, None]

  def ranks(hidden):
    logits = decoder.unembed(params, config, hidden[None])[0]
    own = jnp.take_along_axis(logits, chosen, axis=1)
    return jnp.sum(logits > own, axis=1)

  return jax.lax.map(ranks, outputs)


if __name__ == '__main__':
  program.run(main)
