r"""How often a target is right that sees little of a long text (MagicDec).

  python -m experiments.long_contexts --texts='docs/how_it_works/*.md' \
    --prompt_tokens=2048 --budgets=128,256 --output_dir=results

The target drafts for itself, once with the first and the latest tokens of a
text (`ss.SelfDraft`), and once with what its attention chooses
(`ss.SnapKVDraft`). Both see --budgets tokens and a few more: a window is whole
pages, and what is chosen grows by up to 16 tokens until the next choice. There
are two tasks for each text of the files put together:

- continue: the text goes on;
- recall: the last 32 tokens of the prompt are those of a passage in its middle,
  so that a model may repeat what follows there.

Counts are exact, and times are not measured. rows.jsonl has a line for each
draft and task.
"""

import glob
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

import swiftspec_jax as ss
from experiments import program
from experiments.flags import shared_flags, size_flags
from experiments.output import benchmark_output, provenance
from swiftspec_jax import errors

_TEXTS = flags.DEFINE_multi_string(
  'texts', None, 'Text files, as quoted glob patterns.', required=True
)
_PROMPT_TOKENS = flags.DEFINE_integer(
  'prompt_tokens', 2048, 'Length of a prompt.', lower_bound=256
)
_NUM_TEXTS = flags.DEFINE_integer(
  'num_texts', 2, 'How many prompts of a task.', lower_bound=1
)
_BUDGETS = flags.DEFINE_list(
  'budgets', ['128', '256', '512'], 'Tokens that a draft sees, ascending.'
)
_OUTPUT_DIR = flags.DEFINE_string(
  'output_dir', None, 'New or empty directory for the results.', required=True
)
_HOLDERS = _TEXTS, _PROMPT_TOKENS, _NUM_TEXTS, _BUDGETS
_TASKS = 'continue', 'recall'
_NUM_RECALLED = 32  # as many as `ss.SnapKVDraft` has queries
_INTERVAL = 16  # as long as a page, so that both see about as much


def main() -> None:
  """Runs the program."""
  shared_flags.check(['autoregressive'])
  drafts = list(_drafts())
  directory = pathlib.Path(_OUTPUT_DIR.value)
  benchmark_output.open_directory(directory, {}, resume=False)
  target = shared_flags.load_target()
  prompts = [(text, _recalling(text)) for text in _texts(target)]
  expected = _decode(target, None, prompts)
  print('draft   budget  task      tokens/round  accepted/drafted  equal')
  for name, budget, draft in drafts:
    found = _decode(target, draft, prompts)
    for task in _TASKS:
      row = _row(found[task], expected[task])
      row = {'draft': name, 'budget': budget, 'task': task, **row}
      benchmark_output.append_line(directory / 'rows.jsonl', row)
      print(
        f'{name:6}  {budget:6}  {task:8}  {row["acceptance_length"]:12.2f}  '
        f'{row["num_accepted"]:8}/{row["num_drafted"]:<7}  '
        f'{row["outputs_equal"]}'
      )
  settings = {holder.name: holder.value for holder in _HOLDERS}
  facts = {
    **provenance.collect(),
    'flags': {**shared_flags.to_json(), **settings},
  }
  benchmark_output.write_json(directory / 'provenance.json', facts)


def _drafts() -> Iterator[tuple[str, int, ss.SelfDraft | ss.SnapKVDraft]]:
  """Yields the name, the budget and the options of each draft."""
  sinks = ss.SelfDraft().num_sink_tokens
  for budget in size_flags.read(_BUDGETS):
    yield 'window', budget, ss.SelfDraft(window=budget - sinks)
    yield 'snapkv', budget, ss.SnapKVDraft(budget=budget, interval=_INTERVAL)


def _texts(target: ss.Model) -> list[list[int]]:
  """Returns texts of the length of prompts, from the files."""
  token_ids: list[int] = []
  for pattern in _TEXTS.value:
    paths = sorted(glob.glob(pattern, recursive=True))
    if not paths:
      raise errors.UserError(f'--texts={pattern} matches no file')
    for path in map(pathlib.Path, paths):
      text = path.read_text(encoding='utf-8')
      token_ids += target.tokenizer.encode(text, add_special_tokens=False)
  size = _PROMPT_TOKENS.value
  needed = _NUM_TEXTS.value * size
  if len(token_ids) < needed:
    raise errors.UserError(
      f'--texts have {len(token_ids)} tokens, and {needed} are needed; name '
      'more files or take a smaller --num_texts'
    )
  starts = range(0, needed, size)
  return [token_ids[start : start + size] for start in starts]


def _recalling(text: Sequence[int]) -> list[int]:
  """Returns a prompt that ends with a passage of its middle."""
  middle = len(text) // 2
  return [
    *text[: len(text) - _NUM_RECALLED],
    *text[middle : middle + _NUM_RECALLED],
  ]


def _decode(
  target: ss.Model,
  draft: ss.SelfDraft | ss.SnapKVDraft | None,
  prompts: Sequence[Sequence[list[int]]],
) -> dict[str, list[ss.GenerationResult]]:
  """Returns the results of each task; drafts are None for plain decoding."""
  options = {} if draft is None else shared_flags.num_speculative_tokens()
  decoder = ss.Decoder(target, draft, **options)
  found: dict[str, list[ss.GenerationResult]] = {task: [] for task in _TASKS}
  # Those of one text come together, as they share pages.
  for pair in prompts:
    for task, prompt in zip(_TASKS, pair, strict=True):
      request = ss.Request(
        token_ids=tuple(prompt), sampling=shared_flags.sampling()
      )
      *_, last = decoder.run([request])
      found[task].append(last.result)
  return found


def _row(
  found: Sequence[ss.GenerationResult], expected: Sequence[ss.GenerationResult]
) -> dict[str, Any]:
  stats = [result.stats for result in found]
  num_accepted = sum(own.num_accepted for own in stats)
  num_rounds = sum(own.num_rounds for own in stats)
  return {
    'num_rounds': num_rounds,
    'num_drafted': sum(own.num_drafted for own in stats),
    'num_accepted': num_accepted,
    'acceptance_length': 1 + num_accepted / num_rounds,
    'outputs_equal': all(
      own.token_ids == other.token_ids
      for own, other in zip(found, expected, strict=True)
    ),
  }


if __name__ == '__main__':
  program.run(main)
