"""Measures: every prompt in every mode, one after the other."""

import dataclasses
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence

import tqdm
from absl import logging

import swiftspec_jax as ss
from experiments.output import benchmark_output
from swiftspec_jax import errors
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.cli import references
from swiftspec_jax.cli.prompts import Prompt

# Decodes one request from start to end.
Decode = Callable[[ss.Request], ss.GenerationResult]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runner:
  """How a mode decodes, and what is known of it.

  Attributes:
    decode: decodes one request from start to end.
    host_seconds: function that returns the seconds of the host loop so far, or
      None if it is not ours.
    prepare: function that changes a request before the clock runs.
    forced_acceptance: acceptance that the draft is told to reach.
  """

  decode: Decode
  host_seconds: Callable[[], float | None] = lambda: None
  prepare: Callable[[ss.Request], ss.Request] = lambda request: request
  forced_acceptance: float | None = None


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


def make_decode(decoder: ss.Decoder) -> Decode:
  """Returns what decodes a request with `decoder` from start to end."""

  def decode(request: ss.Request) -> ss.GenerationResult:
    *_, last = decoder.run([request])
    return last.result

  return decode


class Bench:
  """A target, and the prompts that it decodes in several ways.

  Attributes:
    encoded: prompts that fit into the context, with their token ids.
    max_tokens: most tokens of a request, prompt and output together.
    references: outputs that drafts of forced acceptance are told.
  """

  def __init__(
    self,
    target: ss.Model,
    prompts: Sequence[Prompt],
    sampling: ss.SamplingParams,
  ):
    """Encodes the prompts.

    Args:
      target: model that defines the output.
      prompts: prompts to decode.
      sampling: sampling of the requests; their seeds may differ.

    Raises:
      UserError: no prompt fits into the context.
    """
    self.encoded = encode(target, prompts, sampling.max_new_tokens)
    longest = max(len(token_ids) for _, token_ids in self.encoded)
    self.max_tokens = longest + sampling.max_new_tokens
    self.references = references.References(target)
    self._sampling = sampling

  def warmed(
    self, decoder: ss.Decoder, show_progress: str | None = None
  ) -> ss.Decoder:
    """Returns a decoder, with all compiled that the prompts can need.

    Args:
      decoder: decoder of the target.
      show_progress: label of a bar on standard error, None for no bar.
    """
    decoder.warmup(self.max_tokens, self._sampling, show_progress=show_progress)
    return decoder

  def runner(self, decoder: ss.Decoder, forced: float | None = None) -> Runner:
    """Returns a runner of a decoder, whose tree may have forced acceptance."""
    known = {} if forced is None else {'prepare': self.references.add_to}
    return Runner(
      decode=make_decode(decoder),
      host_seconds=lambda: decoder.host_seconds,
      forced_acceptance=forced,
      **known,
    )


def encode(
  target: ss.Model, prompts: Sequence[Prompt], max_new_tokens: int
) -> list[tuple[Prompt, tuple[int, ...]]]:
  """Returns the prompts that fit into the context, with their token ids.

  Raises:
    UserError: there are none.
  """
  encoded = [
    (
      prompt,
      tuple(tokenizer_lib.encode_prompt(target.tokenizer, prompt.turns[0])),
    )
    for prompt in prompts
  ]
  longest = target.config.max_context - max_new_tokens
  fitting = [(prompt, ids) for prompt, ids in encoded if len(ids) <= longest]
  num_skipped = len(prompts) - len(fitting)
  limit = (
    f'the {target.config.max_context} tokens of the context, which must also '
    f'hold {max_new_tokens} new tokens'
  )
  if not fitting:
    raise errors.UserError(f'no prompt fits into {limit}')
  if num_skipped:
    logging.warning('Skipping %d prompts longer than %s.', num_skipped, limit)
  return fitting


def plan(
  prompts: Sequence[tuple[Prompt, tuple[int, ...]]],
  modes: Sequence[str],
  num_repeats: int,
  done: Collection[tuple[int | str, str, int]] = (),
) -> list[Job]:
  """Returns all that is to be measured, in its order.

  All modes take a prompt before the next prompt begins, and another mode is
  the first each time: a machine whose speed drifts hurts all modes alike.

  Args:
    prompts: prompts with their token ids.
    modes: modes to measure.
    num_repeats: runs of each prompt in each mode.
    done: keys of jobs to leave out.
  """
  jobs = []
  for repeat in range(num_repeats):
    for i, (prompt, token_ids) in enumerate(prompts):
      shift = (i + repeat) % len(modes)
      jobs += [
        Job(prompt=prompt, token_ids=token_ids, mode=mode, repeat=repeat)
        for mode in (*modes[shift:], *modes[:shift])
      ]
  return [job for job in jobs if job.key not in done]


def run(
  jobs: Sequence[Job],
  runners: Mapping[str, Runner],
  samplings: Sequence[ss.SamplingParams],
  records: list[benchmark_output.Record],
  directory: pathlib.Path | None = None,
  *,
  label: str | None = None,
) -> None:
  """Adds a record for each job, and shows how far it is.

  Args:
    jobs: jobs in their order.
    runners: one for each mode.
    samplings: one for each repeat.
    records: results so far.
    directory: folder whose file gets every new record; None for no file.
    label: name in front of the bar.
  """
  with tqdm.tqdm(
    desc=label, total=len(jobs), unit='run', mininterval=0.5
  ) as progress:
    for job in jobs:
      record = _measure(job, runners[job.mode], samplings[job.repeat])
      if directory is not None:
        benchmark_output.append(directory, record)
      records.append(record)
      seconds = max(record.decode_seconds, 1e-9)
      progress.set_postfix_str(
        f'{record.mode} {record.timed_tokens / seconds:.1f} tokens/s',
        refresh=False,
      )
      progress.update()


def _measure(
  job: Job, runner: Runner, sampling: ss.SamplingParams
) -> benchmark_output.Record:
  request = ss.Request(token_ids=job.token_ids, sampling=sampling)
  request = runner.prepare(request)
  before = runner.host_seconds()
  result = runner.decode(request)
  host_seconds = None if before is None else runner.host_seconds() - before
  return benchmark_output.make_record(
    job.prompt,
    job.mode,
    job.repeat,
    result,
    host_seconds=host_seconds,
    forced_acceptance=runner.forced_acceptance,
  )
