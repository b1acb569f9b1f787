"""Measures decoders against each other on a few prompts."""

from collections.abc import Mapping, Sequence

import swiftspec_jax as ss
from experiments.measuring import benchmark_run
from experiments.output import benchmark_output
from swiftspec_jax.cli import references
from swiftspec_jax.cli.prompts import Prompt


def compare(
  target: ss.Model,
  decoders: Mapping[str, ss.Decoder],
  prompts: Sequence[str],
  sampling: ss.SamplingParams,
  *,
  forced: Mapping[str, float],
) -> list[benchmark_output.Record]:
  """Decodes every prompt with every decoder, once before the clock runs.

  Args:
    target: target of all decoders.
    decoders: decoders by the names of their modes.
    prompts: texts; each is the user's turn.
    sampling: sampling parameters of all prompts.
    forced: acceptance that is forced on some of the decoders' drafts.

  Returns:
    Records for `benchmark_report`.
  """
  known = references.References(target)
  runners = {
    mode: benchmark_run.make_runner(decoder, forced.get(mode), known.add_to)
    for mode, decoder in decoders.items()
  }
  encoded = benchmark_run.encode(
    target,
    [
      Prompt(question_id=i, task='chat', turns=(text,))
      for i, text in enumerate(prompts)
    ],
    sampling.max_new_tokens,
  )
  jobs = benchmark_run.plan(encoded, list(decoders), 1)
  for _ in benchmark_run.measure(jobs, runners, [sampling]):
    pass  # compiles
  return list(benchmark_run.measure(jobs, runners, [sampling]))
