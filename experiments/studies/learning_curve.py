r"""How a server's drafts improve with what it has served.

  python -m experiments.studies.learning_curve --limit=12 --repeats=5 \
    --temperature=0.8 --max_new_tokens=40 --output_dir=results

The target writes an answer to every prompt, --repeats times, each time with
other noise. Then the drafter of mode datastore is asked after each of its
tokens, as a server would ask it that serves one request after the other: once
by a drafter that forgets each request, and once by one that keeps outputs.
Drafts never change an output, so acceptance is that of the server. rows.jsonl
has a line for each repeat, and curve.json what is printed.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

import swiftspec_jax as ss
from experiments import program
from experiments import prompts as prompts_lib
from experiments.flags import modes, shared_flags
from experiments.measuring import benchmark_run
from experiments.output import benchmark_output, provenance
from swiftspec_jax.serving.drafters.texts.datastore import (
  Datastore,
  DatastoreDrafter,
)

_PROMPTS = flags.DEFINE_string(
  'prompts', str(prompts_lib.DEFAULT_PATH), 'JSON lines with the prompts.'
)
_LIMIT = flags.DEFINE_integer(
  'limit', None, 'How many prompts to take. Default: all.', lower_bound=1
)
_REPEATS = flags.DEFINE_integer(
  'repeats', 5, 'How often each prompt comes.', lower_bound=1
)
_NUM_NODES = flags.DEFINE_integer(
  'num_draft_tokens', 7, 'Most tokens of a draft.', lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer(
  'batch_size', 8, 'Requests that decode together.', lower_bound=1
)
_OUTPUT_DIR = flags.DEFINE_string(
  'output_dir', None, 'New or empty directory for the results.', required=True
)
_FORGETS, _LEARNS = 'forgets', 'learns'


def main() -> None:
  """Runs the program."""
  num_past_tokens = flags.FLAGS.past_tokens or 2**16
  shared_flags.check(['autoregressive', modes.DATASTORE])
  prompts = prompts_lib.read_prompts(pathlib.Path(_PROMPTS.value), _LIMIT.value)
  directory = pathlib.Path(_OUTPUT_DIR.value)
  benchmark_output.open_directory(directory, {}, resume=False)
  target = shared_flags.load_target()
  answers = _answers(target, prompts)
  drafters = {
    _FORGETS: DatastoreDrafter(Datastore()),
    _LEARNS: DatastoreDrafter(Datastore(num_past_tokens=num_past_tokens)),
  }
  print(f'requests before  {_FORGETS}  {_LEARNS}')
  for repeat, outputs in enumerate(answers):
    row: dict[str, Any] = {'num_served': repeat * len(prompts)}
    for name, drafter in drafters.items():
      rounds = [_serve(drafter, *texts) for texts in outputs]
      num_tokens = sum(len(output) - 1 for _, output in outputs)
      row[name] = num_tokens / sum(rounds)
    benchmark_output.append_line(directory / 'rows.jsonl', row)
    print(f'{row["num_served"]:15}  {row[_FORGETS]:7.2f}  {row[_LEARNS]:6.2f}')
  settings = {
    **shared_flags.to_json(),
    **{
      holder.name: holder.value
      for holder in (_PROMPTS, _LIMIT, _REPEATS, _NUM_NODES)
    },
  }
  facts = {**provenance.collect(), 'flags': settings}
  benchmark_output.write_json(directory / 'provenance.json', facts)


def _answers(
  target: ss.Model, prompts: Sequence[prompts_lib.Prompt]
) -> list[list[tuple[tuple[int, ...], tuple[int, ...]]]]:
  """Returns prompts and outputs of each repeat."""
  samplings = shared_flags.samplings(_REPEATS.value)
  encoded = benchmark_run.encode(target, prompts, samplings[0].max_new_tokens)
  requests = [
    ss.Request(token_ids=token_ids, sampling=sampling)
    for sampling in samplings
    for _, token_ids in encoded
  ]
  decoder = ss.Decoder(target, batch_size=_BATCH_SIZE.value)
  found: list[tuple[int, ...]] = [()] * len(requests)
  for event in decoder.run(requests):
    if event.result is not None:
      found[event.index] = event.result.token_ids
  texts = [
    (request.token_ids, output)
    for request, output in zip(requests, found, strict=True)
  ]
  size = len(encoded)
  return [texts[i : i + size] for i in range(0, len(texts), size)]


def _serve(
  drafter: DatastoreDrafter, prompt: Sequence[int], output: Sequence[int]
) -> int:
  """Returns the rounds after the first token of an output; teaches it."""
  text = np.array([*prompt, *output], np.int32)
  num_known, num_rounds = len(prompt) + 1, 0
  while num_known < len(text):
    tree = drafter.tree(text[:num_known], _NUM_NODES.value)
    pairs = zip(tree.parents, tree.token_ids, strict=True)
    nodes = {pair: node for node, pair in enumerate(pairs)}
    node = -1
    while num_known < len(text):
      node = nodes.get((node, int(text[num_known])), len(text))
      num_known += 1
      if node == len(text):
        break  # the target's own token
    num_rounds += 1
  drafter.past.add(np.array(output, np.int32))
  return num_rounds


if __name__ == '__main__':
  program.run(main)
