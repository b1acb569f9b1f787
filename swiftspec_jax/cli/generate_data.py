"""Lets a target write the text that its draft model is trained on.

  swiftspec generate_data --output_dir=data --num_tokens=2_000_000
  swiftspec generate_data --output_dir=data --documents='text/*.txt'
  swiftspec generate_data --output_dir=data --prompts=mine.jsonl

The target invents users and answers them, and does tasks with documents: by
default the documentation of the Python packages that are installed. Each
line of --prompts is {"prompt": "..."}. Run it again to go on where it
stopped; more tokens later is a larger --num_tokens.
"""

import collections
import pathlib

from absl import flags
from tqdm import tqdm

from swiftspec_jax import errors
from swiftspec_jax.cli import program
from swiftspec_jax.cli.flags import flag_values, shared_flags
from swiftspec_jax.distillation import samples
from swiftspec_jax.distillation.writing import documents, generation, scripts
from swiftspec_jax.runtime import input_files

_OUTPUT_DIR = flags.DEFINE_string(
  'output_dir', None, 'Where the shards go.', required=True
)
_NUM_TOKENS = flags.DEFINE_integer(
  'num_tokens',
  2_000_000,
  "Stop when the target's own answers have this many tokens.",
  lower_bound=1,
)
_DOCUMENTS = flags.DEFINE_multi_string(
  'documents',
  [],
  'Text files to give tasks about, as quoted glob patterns. Default: the '
  'documentation of the installed packages.',
)
_PROMPTS = flags.DEFINE_string(
  'prompts', None, 'JSON-lines file with own prompts; they are answered first.'
)
_TOP_LOGPROBS = flags.DEFINE_integer(
  'top_logprobs',
  16,
  'Entries of the next-token distribution that are stored with each token.',
  lower_bound=1,
)
flags.DEFINE_list(
  'feature_layers',
  [],
  'Layers of the target whose outputs are stored, too, for drafts that read '
  'them; 2 bytes for each number.',
)


def main() -> None:
  """Runs the program."""
  shared_flags.check(['autoregressive'])
  feature_layers = flag_values.numbers(
    'feature_layers', 'layer numbers such as 0,1'
  )
  own_prompts = _read_prompts()
  library = documents.Library(documents.find_files(_DOCUMENTS.value))
  target = shared_flags.load_target()
  target.config.check_layers('feature_layers', feature_layers)
  seed = flags.FLAGS.seed
  planner = scripts.Planner(
    target.tokenizer,
    library,
    seed=seed,
    num_steps=generation.NUM_STEPS,
    own_prompts=own_prompts,
  )
  shards = generation.generate_shards(
    target,
    planner,
    pathlib.Path(_OUTPUT_DIR.value),
    seed=seed,
    num_stored=_TOP_LOGPROBS.value,
    feature_layers=feature_layers,
    show_progress=True,
  )
  kinds = collections.Counter()
  with tqdm(total=_NUM_TOKENS.value, unit='tok', unit_scale=True) as bar:
    for number, groups in enumerate(shards, 1):
      kinds.update(samples.answer_tokens(groups))
      bar.set_postfix_str(f'{number} shards')
      bar.update(kinds.total() - bar.n)
      if not kinds.total():
        raise errors.UserError(
          'no usable answer in the first shard: the target repeats itself or '
          'ends no turn; choose an instruction-tuned target'
        )
      if bar.n >= _NUM_TOKENS.value:
        break
  shares = ', '.join(f'{kind} {n:,}' for kind, n in kinds.most_common())
  print(f'{kinds.total():,} answer tokens in {_OUTPUT_DIR.value}: {shares}')


def _read_prompts() -> list[str]:
  if _PROMPTS.value is None:
    return []
  prompts = []
  path = pathlib.Path(_PROMPTS.value)
  for place, values in input_files.read_lines(path, 'prompts'):
    prompt = values.get('prompt')
    if not isinstance(prompt, str) or not prompt.strip():
      raise errors.UserError(
        f"{place}: 'prompt' must be a text, got {prompt!r:.80}"
      )
    prompts.append(prompt)
  return prompts


if __name__ == '__main__':
  program.run(main)
