r"""Measures what quantized weights cost in quality.

  python -m experiments.studies.evaluate_weights --target=T --output_dir=results

Decodes the prompts greedily without quantization, and lets the model rate these
answers with its weights as they are and quantized. The directory gets
summary.json: for each kind of weights the perplexity, its increase over the
weights as they are, and the share of the tokens that would be chosen in their
place again.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tqdm
from absl import flags

import swiftspec_jax as ss
from experiments.flags import run_flags
from experiments.measuring import benchmark_report, benchmark_run
from swiftspec_jax import config, errors
from swiftspec_jax.cli import output_files, program, provenance
from swiftspec_jax.cli import prompts as prompts_lib
from swiftspec_jax.cli.flags import shared_flags
from swiftspec_jax.engine import scoring

_WEIGHT_DTYPES = flags.DEFINE_list(
  'weight_dtypes',
  # Experts alone have mxfp4, and .gguf files alone have blocks.
  [x for x in config.WEIGHT_DTYPES if x not in ('mxfp4', config.STORED)],
  'Kinds of quantized weights.',
)
_PROMPTS = run_flags.prompts()
_LIMIT = run_flags.limit()
_OUTPUT_DIR = run_flags.output_dir()
flags.FLAGS.set_default('max_new_tokens', 128)

_PLAIN = 'plain'
# Token ids of prompt and answer, and the length of the prompt.
_Text = tuple[tuple[int, ...], int]


def main() -> None:
  """Runs the program."""
  _check()
  prompts_path = pathlib.Path(_PROMPTS.value)
  prompts = prompts_lib.read_prompts(prompts_path, _LIMIT.value)
  directory = pathlib.Path(_OUTPUT_DIR.value)
  settings = shared_flags.shared_settings(
    prompts_path, limit=_LIMIT.value, weight_dtypes=_WEIGHT_DTYPES.value
  )
  output_files.open_directory(directory)
  model = shared_flags.load_target(is_wide=True)
  texts = _decode(model, prompts)
  weights = {_PLAIN: _rate(model, texts, _PLAIN)}
  facts = {'target': model.name, 'dtype': model.dtype.name}
  for weight_dtype in _WEIGHT_DTYPES.value:
    del model  # Two of them may not fit.
    model = shared_flags.load_target(weight_dtype)
    weights[weight_dtype] = _rate(model, texts, weight_dtype)
  plain = weights[_PLAIN]['perplexity']
  for values in weights.values():
    values['perplexity_increase'] = values['perplexity'] - plain
  summary = {
    'num_prompts': len(texts),
    'num_tokens': sum(len(ids) - first for ids, first in texts),
    'weights': weights,
  }
  provenances = {**provenance.collect(), **facts, 'flags': settings}
  output_files.write_json(
    directory / 'summary.json', {**summary, 'provenance': provenances}
  )
  print(_table(summary))
  print(f'written to {directory}')


def _check() -> None:
  shared_flags.check(['autoregressive'])
  if flags.FLAGS.weight_dtype is not None:
    raise errors.UserError(
      '--weight_dtype has no meaning here: --weight_dtypes names what is '
      'compared with the weights as they are'
    )
  if shared_flags.sampling().temperature:
    raise errors.UserError(
      f'--temperature={flags.FLAGS.temperature} has no meaning here: the '
      'answers are greedy'
    )
  names = _WEIGHT_DTYPES.value
  run_flags.check_names('weight_dtypes', names, config.WEIGHT_DTYPES)


def _decode(
  model: ss.Model, prompts: Sequence[prompts_lib.Prompt]
) -> list[_Text]:
  """Returns the prompts with their greedy answers."""
  sampling = shared_flags.sampling()
  encoded = benchmark_run.encode(model, prompts, sampling.max_new_tokens)
  decode = benchmark_run.make_decode(ss.Decoder(model))
  texts = []
  for _, token_ids in tqdm.tqdm(encoded, desc='decoding', unit='prompt'):
    result = decode(ss.Request(token_ids=token_ids, sampling=sampling))
    texts.append((token_ids + result.token_ids, len(token_ids)))
  return texts


def _rate(
  model: ss.Model, texts: Sequence[_Text], name: str
) -> dict[str, float]:
  """Returns what a model says of all answers together."""
  log_probs, is_equal = [], []
  for token_ids, first in tqdm.tqdm(texts, desc=name, unit='prompt'):
    rated = scoring.score(model, token_ids, first)
    log_probs.append(rated.chosen)
    best = rated.top_token_ids[:, 0]
    is_equal.append(best == np.asarray(token_ids[first:]))
  return {
    'num_bytes': model.num_bytes,
    'perplexity': float(np.exp(-np.concatenate(log_probs).mean())),
    'equal_tokens': float(np.concatenate(is_equal).mean()),
  }


def _table(summary: Mapping[str, Any]) -> str:
  """Returns the summary as text for a terminal."""
  columns = {
    'weights': ('name',),
    'MB': ('num_bytes', '.1f', 1e-6),
    'perplexity': ('perplexity', '.4f'),
    'increase': ('perplexity_increase', '+.4f'),
    'equal tokens': ('equal_tokens', '.4f'),
  }
  rows = [{'name': name, **row} for name, row in summary['weights'].items()]
  return benchmark_report.table_of(rows, columns, num_names=1)


if __name__ == '__main__':
  program.run(main)
