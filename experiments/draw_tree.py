"""Draws the token trees of a prompt's first rounds as one HTML page.

  python -m experiments.draw_tree --draft=DRAFT --prompt='Why is the sky blue?'

For each round: what the draft had grown when the verdict came, what of it the
target had been sent, what stood, and what is kept. The rounds run in lock-step,
so the pictures do not depend on the machine's speed.
"""

import pathlib
from collections.abc import Sequence

from absl import flags

import swiftspec_jax as ss
from experiments.pictures import tree_page, tree_rounds
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.cli import output_files, program
from swiftspec_jax.cli.flags import config_file, modes, shared_flags, tree_flags

_MODE = flags.DEFINE_enum(
  'mode', 'async', modes.PERSISTENT_TREES, 'How to decode.'
)
_PROMPT = flags.DEFINE_string(
  'prompt', 'Why is the sky blue?', 'Text to continue.'
)
_OUTPUT = flags.DEFINE_string('output', 'trees.html', 'File to write.')

_NUM_ROUNDS = 6  # that are drawn


def main() -> None:
  """Runs the program."""
  config_file.apply()
  shared_flags.check([_MODE.value])
  target = shared_flags.load_target()
  draft = shared_flags.load_draft(target, _MODE.value)
  token_ids = tokenizer_lib.encode_prompt(target.tokenizer, _PROMPT.value)
  request = ss.Request(
    token_ids=tuple(token_ids), sampling=shared_flags.sampling()
  )
  tree_config = tree_flags.config()
  rounds = tree_rounds.collect(target, draft, request, tree_config, _NUM_ROUNDS)
  facts = tree_page.facts(target, draft, tree_config, _PROMPT.value)
  page = tree_page.render(rounds, facts)
  path = pathlib.Path(_OUTPUT.value)
  output_files.write(path, page.encode())
  print(_summary(rounds))
  print(f'written to {path}')


def _summary(rounds: Sequence[tree_rounds.Round]) -> str:
  """Returns a line for each round."""
  lines = []
  for number, round_ in enumerate(rounds, start=1):
    outcome = tree_page.OUTCOMES[round_.outcome]
    text = tree_page.visible(''.join(round_.emitted))
    lines.append(
      f'round {number}: {outcome:<8} {len(round_.nodes):>4} nodes, '
      f'{len(round_.emitted)} tokens  {text}'
    )
  return '\n'.join(lines)


if __name__ == '__main__':
  program.run(main)
