r"""How often a target is right that sees little of a long text (MagicDec).

  python -m experiments.studies.long_contexts --texts='docs/how_it_works/*.md' \
    --prompt_tokens=2048 --budgets=128,256 --output_dir=results
  python -m experiments.studies.long_contexts --texts='docs/how_it_works/*.md' \
    --prompt_tokens=16384 --rope_scaling='{"rope_type":"yarn","factor":4.0}' \
    --num_texts=1 --budgets=256,512,1024 --interval=64 --output_dir=results

The target decodes plainly. Then it drafts for itself, once with the first and
the latest tokens of a text (`ss.SelfDraft`), and once with what its attention
chooses (`ss.SnapKVDraft`). Both see --budgets tokens and a few more: a window
is whole pages, and what is chosen grows by up to --interval tokens until the
next choice. There are two tasks for each text of the files put together:

- continue: the text goes on;
- recall: the last 32 tokens of the prompt are those of a passage in its middle,
  so that a model may repeat what follows there.

A prompt is read once. rows.jsonl gets a line as soon as an output is there:
counts, and the time of the steps after the first token, as seconds and as
seconds of processors. The table has those of a step over those of a plain one:
a draft pays where its tokens a round are more. Drafts have 3 tokens, or
--num_speculative_tokens. With --resume a run goes on.
"""

import dataclasses
import itertools
import math
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

import swiftspec_jax as ss
from experiments import program
from experiments.flags import draft_flags, shared_flags, size_flags
from experiments.output import benchmark_output, provenance
from experiments.studies import long_texts
from swiftspec_jax import errors
from swiftspec_jax.cost_model.step_buckets import StepBuckets
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.scheduling.scheduler_config import SchedulerConfig
from swiftspec_jax.step.program_sizes import ProgramSizes

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
_INTERVAL = flags.DEFINE_integer(
  'interval',
  16,  # as long as a page, so that both see about as much
  'Tokens that a text grows by before SnapKV chooses again.',
  lower_bound=1,
)
_RESUME = flags.DEFINE_boolean(
  'resume', False, 'Go on with the results in --output_dir.'
)
_OUTPUT_DIR = flags.DEFINE_string(
  'output_dir', None, 'New or empty directory for the results.', required=True
)
_HOLDERS = _TEXTS, _PROMPT_TOKENS, _NUM_TEXTS, _BUDGETS, _INTERVAL
_TASKS = 'continue', 'recall'
_PLAIN = 'plain'
_LENGTH = 3  # draft tokens of a round
_NUM_RECALLED = 32  # as many as `ss.SnapKVDraft` has queries
_CHUNK = 256  # tokens of a prompt in a step
_PAGE_SIZE = 16
_SPARE_PAGES = 64  # so that no output takes pages of a prompt

_Draft = ss.SelfDraft | ss.SnapKVDraft | None
_Key = tuple[int, str, int, str]  # text, draft, budget, task


def main() -> None:
  """Runs the program."""
  shared_flags.check(['autoregressive'])
  if shared_flags.sampling().max_new_tokens < 2:
    raise errors.UserError(
      '--max_new_tokens=1 leaves no step after the first token; give 2 or more'
    )
  drafts = list(_drafts())
  directory = pathlib.Path(_OUTPUT_DIR.value)
  settings = {
    **shared_flags.to_json(),
    **{holder.name: holder.value for holder in _HOLDERS},
  }
  benchmark_output.open_directory(directory, settings, resume=_RESUME.value)
  benchmark_output.write_settings(directory, settings)
  facts = {**provenance.collect(), 'flags': settings}
  benchmark_output.write_json(directory / 'provenance.json', facts)
  rows = {
    _key(row): row
    for row in benchmark_output.read_lines(directory / 'rows.jsonl')
  }
  target = shared_flags.load_target()
  texts = long_texts.read(
    target, _TEXTS.value, _NUM_TEXTS.value, _PROMPT_TOKENS.value
  )
  engine = _make_engine(target)
  # Those of one text come together, as they share pages.
  for (index, text), draft in itertools.product(enumerate(texts), drafts):
    for row in _run(engine, index, text, *draft, done=set(rows)):
      benchmark_output.append_line(directory / 'rows.jsonl', row)
      rows[_key(row)] = row
  print(
    'draft   budget  task      tokens/round  accepted/drafted  equal  '
    'seconds  processor'
  )
  for (name, budget, _), task in itertools.product(drafts, _TASKS):
    print(_line(name, budget, task, list(rows.values())))


def _key(row: dict[str, Any]) -> _Key:
  return row['text'], row['draft'], row['budget'], row['task']


def _drafts() -> Iterator[tuple[str, int, _Draft]]:
  """Yields the name, the budget and the options of each draft."""
  yield _PLAIN, _PROMPT_TOKENS.value, None
  sinks = ss.SelfDraft().num_sink_tokens
  for budget in size_flags.read(_BUDGETS):
    yield 'window', budget, ss.SelfDraft(window=budget - sinks)
    snapkv = ss.SnapKVDraft(budget=budget, interval=_INTERVAL.value)
    yield 'snapkv', budget, snapkv


def _length() -> int:
  options = draft_flags.num_speculative_tokens()
  return options.get('num_speculative_tokens', _LENGTH)


def _make_engine(target: ss.Model) -> Engine:
  """Returns an engine for one request."""
  limit = _PROMPT_TOKENS.value + shared_flags.sampling().max_new_tokens
  num_fed = _length() + 1
  buckets = StepBuckets(
    rows=(1,),
    query_tokens=(num_fed, num_fed + _CHUNK),
    lengths=tuple(range(num_fed)),
  )
  sizes = ProgramSizes(
    scheduler=SchedulerConfig(
      buckets=buckets,
      num_pages=-(-limit // _PAGE_SIZE) + _SPARE_PAGES,
      max_context=limit,
      page_size=_PAGE_SIZE,
    ),
    contexts=(limit // 4, limit // 2, limit),
  )
  return Engine(target, sizes=sizes)


def _run(
  engine: Engine,
  index: int,
  text: Sequence[int],
  name: str,
  budget: int,
  draft: _Draft,
  done: set[_Key],
) -> Iterator[dict[str, Any]]:
  """Yields the rows of a text and a draft that are not there yet."""
  missing = [task for task in _TASKS if (index, name, budget, task) not in done]
  if not missing:
    return
  engine.take_draft(draft)
  engine.policy = FixedLength(_length() if draft else 0)
  for task in missing:
    prompt = text if task == 'continue' else _recalling(text)
    # Reads what is not in the cache yet, and compiles.
    _decode(engine, prompt, 3 * (_length() + 1))
    result, times = _decode(
      engine, prompt, shared_flags.sampling().max_new_tokens
    )
    stats = result.stats
    yield {
      'text': index,
      'draft': name,
      'budget': budget,
      'task': task,
      'num_rounds': stats.num_rounds,
      'num_drafted': stats.num_drafted,
      'num_accepted': stats.num_accepted,
      **times,
      'token_ids': list(result.token_ids),
    }


def _recalling(text: Sequence[int]) -> list[int]:
  """Returns a prompt that ends with a passage of its middle."""
  middle = len(text) // 2
  return [
    *text[: len(text) - _NUM_RECALLED],
    *text[middle : middle + _NUM_RECALLED],
  ]


def _decode(
  engine: Engine, prompt: Sequence[int], max_new_tokens: int
) -> tuple[ss.GenerationResult, dict[str, float]]:
  """Returns the output, and what the steps after its first token took."""
  sampling = dataclasses.replace(
    shared_flags.sampling(), max_new_tokens=max_new_tokens
  )
  handle = engine.submit(ss.Request(token_ids=tuple(prompt), sampling=sampling))
  while not handle.num_updates:
    engine.step()
  start, start_of_work, num_steps = time.perf_counter(), time.process_time(), 0
  while not handle.is_finished:
    engine.step()
    num_steps += 1
  return handle.result(), {
    'num_steps': num_steps,
    'seconds': time.perf_counter() - start,
    'processor_seconds': time.process_time() - start_of_work,
  }


def _line(
  name: str, budget: int, task: str, rows: Sequence[dict[str, Any]]
) -> str:
  """Returns the line of the table for a draft and a task, of all texts."""
  plain = [row for row in rows if (row['draft'], row['task']) == (_PLAIN, task)]
  kind = name, budget, task
  own = [r for r in rows if (r['draft'], r['budget'], r['task']) == kind]
  counts = {
    count: sum(row[count] for row in own)
    for count in ('num_rounds', 'num_accepted', 'num_drafted')
  }
  outputs = [[row['token_ids'] for row in some] for some in (own, plain)]
  costs = [
    _per_step(own, what) / _per_step(plain, what)
    for what in ('seconds', 'processor_seconds')
  ]
  length = 1 + counts['num_accepted'] / counts['num_rounds']
  return (
    f'{name:6}  {budget:6}  {task:8}  {length:12.2f}  '
    f'{counts["num_accepted"]:8}/{counts["num_drafted"]:<7}  '
    f'{outputs[0] == outputs[1]!s:5}  {costs[0]:7.2f}  {costs[1]:9.2f}'
  )


def _per_step(rows: Sequence[dict[str, Any]], what: str) -> float:
  num_steps = sum(row['num_steps'] for row in rows)
  # A text may end with its first token.
  return sum(row[what] for row in rows) / (num_steps or math.nan)


if __name__ == '__main__':
  program.run(main)
