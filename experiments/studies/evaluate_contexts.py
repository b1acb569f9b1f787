r"""How well a target predicts a long text, by the place in it.

  python -m experiments.studies.evaluate_contexts \
    --texts='docs/how_it_works/*.md' \
    --num_tokens=16384 --rope_scaling='{"rope_type":"yarn","factor":4.0}' \
    --output_dir=results

Says whether a model can do with more tokens than it was trained for, as it is
and with --rope_scaling. rows.jsonl has a line for each --span of places: the
perplexity of the tokens there, given all before them.
"""

import pathlib

import numpy as np
from absl import flags

from experiments import program
from experiments.flags import shared_flags
from experiments.output import benchmark_output, provenance
from experiments.studies import long_texts
from swiftspec_jax import scoring

_TEXTS = flags.DEFINE_multi_string(
  'texts', None, 'Text files, as quoted glob patterns.', required=True
)
_NUM_TOKENS = flags.DEFINE_integer(
  'num_tokens', 16384, 'Length of the text.', lower_bound=2
)
_SPAN = flags.DEFINE_integer(
  'span', 2048, 'Tokens that a perplexity is of.', lower_bound=2
)
_OUTPUT_DIR = flags.DEFINE_string(
  'output_dir', None, 'New or empty directory for the results.', required=True
)
_HOLDERS = _TEXTS, _NUM_TOKENS, _SPAN


def main() -> None:
  """Runs the program."""
  shared_flags.check(['autoregressive'])
  directory = pathlib.Path(_OUTPUT_DIR.value)
  benchmark_output.open_directory(directory, {}, resume=False)
  target = shared_flags.load_target()
  size, span = _NUM_TOKENS.value, _SPAN.value
  (text,) = long_texts.read(target, _TEXTS.value, 1, size)
  log_probs, _ = scoring.score(target, text, 1)
  print('from    to      perplexity')
  for start in range(0, size, span):
    end = min(start + span, size)
    own = log_probs[max(start - 1, 0) : end - 1]  # none of the first token
    row = {'from': start, 'to': end, 'perplexity': float(np.exp(-own.mean()))}
    benchmark_output.append_line(directory / 'rows.jsonl', row)
    print(f'{start:6}  {end:6}  {row["perplexity"]:10.2f}')
  settings = {holder.name: holder.value for holder in _HOLDERS}
  facts = {
    **provenance.collect(),
    'target': target.name,
    'flags': {**shared_flags.to_json(), **settings},
  }
  benchmark_output.write_json(directory / 'provenance.json', facts)


if __name__ == '__main__':
  program.run(main)
