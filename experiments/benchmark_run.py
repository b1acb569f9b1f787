"""Measures: every prompt in every mode, one after the other."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import swiftspec_jax as ss
from experiments import benchmark_output
from experiments.prompts import Prompt
from swiftspec_jax import tokenizer as tokenizer_lib

# Decodes one request from start to end.
Runner = Callable[[ss.Request], ss.GenerationResult]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """One result to be measured."""

  prompt: Prompt
  token_ids: tuple[int, ...]
  mode: str
  repeat: int

  @property
  def key(self) -> tuple[int | str, str, int]:
    """As that of the `Record` it will give."""
    return self.prompt.question_id, self.mode, self.repeat


def make_runner(decoder: ss.Decoder) -> Runner:
  """Returns a runner that decodes with `decoder`."""

  def run(request: ss.Request) -> ss.GenerationResult:
    *_, last = decoder.run([request])
    return last.result

  return run


def encode(
  target: ss.Model, prompts: Sequence[Prompt], max_new_tokens: int
) -> list[tuple[Prompt, tuple[int, ...]]]:
  """Returns the prompts that fit into the context, with their token ids."""
  encoded = [
    (
      prompt,
      tuple(tokenizer_lib.encode_prompt(target.tokenizer, prompt.turns[0])),
    )
    for prompt in prompts
  ]
  longest = target.config.max_context - max_new_tokens
  return [(prompt, ids) for prompt, ids in encoded if len(ids) <= longest]


def plan(
  prompts: Sequence[tuple[Prompt, tuple[int, ...]]],
  modes: Sequence[str],
  num_repeats: int,
) -> list[Job]:
  """Returns all that is to be measured, in its order.

  All modes take a prompt before the next prompt begins, and another mode is
  the first each time: a machine whose speed drifts hurts all modes alike.
  """
  jobs = []
  for repeat in range(num_repeats):
    for i, (prompt, token_ids) in enumerate(prompts):
      shift = (i + repeat) % len(modes)
      jobs += [
        Job(prompt=prompt, token_ids=token_ids, mode=mode, repeat=repeat)
        for mode in (*modes[shift:], *modes[:shift])
      ]
  return jobs


def measure(
  jobs: Sequence[Job],
  runners: Mapping[str, Runner],
  samplings: Sequence[ss.SamplingParams],
  done: Collection[tuple[int | str, str, int]] = (),
) -> Iterator[benchmark_output.Record]:
  """Yields a record for each job.

  Args:
    jobs: in their order.
    runners: one for each mode.
    samplings: one for each repeat.
    done: keys of jobs that are left out.
  """
  for job in jobs:
    if job.key in done:
      continue
    request = ss.Request(
      token_ids=job.token_ids, sampling=samplings[job.repeat]
    )
    result = runners[job.mode](request)
    yield benchmark_output.make_record(job.prompt, job.mode, job.repeat, result)
