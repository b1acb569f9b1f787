r"""Prepared outcomes against a tree that lives on, with the same draft.

  python -m experiments.studies.prepared_outcomes --output_dir=results

Both let the draft work while the target verifies. SwiftSpec grows one tree, of
which the verdict keeps a part. SSD prepares a chain for each of the outcomes
that are most probable. The draft is forced: the true token has rank r in its
distribution with probability a (1 - a)^r. It makes as many forwards of as many
tokens beside a verification, and has the same luck. The tree's rounds are those
of the real pipeline with small models, as in experiments.plan. Those of SSD are
replayed over the same texts. rows.jsonl has a line for each acceptance.
"""

import pathlib
from typing import Any

import jax
import numpy as np
from absl import flags

import swiftspec_jax as ss
from experiments import program
from experiments.output import benchmark_output, provenance
from experiments.planning import plan_rounds
from experiments.studies import outcome_replay
from swiftspec_jax import errors
from swiftspec_jax import sampling as sampling_lib
from swiftspec_jax.planning.rounds import Times

_ACCEPTANCE = flags.DEFINE_list(
  'acceptance', ['0.5', '0.7', '0.85'], "Acceptance of the draft's best token."
)
_WIDTH = flags.DEFINE_integer(
  'width', 8, 'Leaves, or outcomes, of a draft forward.', lower_bound=1
)
_NUM_DRAFT_STEPS = flags.DEFINE_integer(
  'num_draft_steps',
  4,
  'Draft forwards beside a verification; the length of the chains.',
  lower_bound=1,
)
_DRAFT_SHARE = flags.DEFINE_float(
  'draft_share',
  0.15,
  'Seconds of a draft forward over those of a verification.',
  lower_bound=0.0,
)
_NUM_REQUESTS = flags.DEFINE_integer(
  'num_requests', 8, 'Texts of 192 tokens.', lower_bound=1
)
_OUTPUT_DIR = flags.DEFINE_string(
  'output_dir', None, 'New or empty directory for the results.', required=True
)
_HOLDERS = (
  _ACCEPTANCE,
  _WIDTH,
  _NUM_DRAFT_STEPS,
  _DRAFT_SHARE,
  _NUM_REQUESTS,
)


def main() -> None:
  """Runs the program."""
  acceptances = _acceptances()
  directory = pathlib.Path(_OUTPUT_DIR.value)
  benchmark_output.open_directory(directory, {}, resume=False)
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', 2)
  trees = [
    ss.TreeConfig(
      num_nodes=_WIDTH.value,
      width=_WIDTH.value,
      num_draft_steps=_NUM_DRAFT_STEPS.value,
      forced_acceptance=acceptance,
      prompt_lookup=False,
    )
    for acceptance in acceptances
  ]
  recordings = plan_rounds.record(trees, _NUM_REQUESTS.value, ['async'])
  print('acceptance  system     hits  tokens/round  tokens/verification time')
  for recording in recordings:
    row = _row(recording)
    benchmark_output.append_line(directory / 'rows.jsonl', row)
    for name in ('swiftspec', 'ssd'):
      print(
        f'{row["acceptance"]:10g}  {name:9}  {row[f"{name}_hit_rate"]:4.2f}  '
        f'{row[f"{name}_acceptance_length"]:12.2f}  {row[f"{name}_speed"]:8.2f}'
      )
  facts = {**provenance.collect(), 'flags': {h.name: h.value for h in _HOLDERS}}
  benchmark_output.write_json(directory / 'provenance.json', facts)


def _acceptances() -> list[float]:
  try:
    found = [float(text) for text in _ACCEPTANCE.value]
  except ValueError:
    found = []
  if not found or not all(0 < acceptance < 1 for acceptance in found):
    raise errors.UserError(
      f'--acceptance={",".join(_ACCEPTANCE.value)} must be numbers between 0 '
      'and 1 such as 0.5,0.7'
    )
  return found


def _row(recording: plan_rounds.Recording) -> dict[str, Any]:
  """Returns the figures of both; speeds are in tokens a verification time."""
  acceptance = recording.tree.forced_acceptance
  length, draft = _NUM_DRAFT_STEPS.value, _DRAFT_SHARE.value
  chains = outcome_replay.replay(
    _ranks(recording, acceptance),
    length,
    outcome_replay.most_probable(acceptance, length, _WIDTH.value),
  )
  times = Times(target=1.0, draft=draft)
  return {
    'acceptance': acceptance,
    'swiftspec_hit_rate': recording.outcomes[2],
    'swiftspec_late_hit_rate': recording.outcomes[1],
    'swiftspec_acceptance_length': recording.rounds.acceptance_length,
    'swiftspec_speed': recording.rounds.tokens_per_second(times),
    'ssd_hit_rate': chains.hit_rate,
    'ssd_acceptance_length': chains.acceptance_length,
    'ssd_speed': chains.num_tokens / chains.seconds(1.0, draft, length),
  }


def _ranks(
  recording: plan_rounds.Recording, acceptance: float
) -> list[np.ndarray]:
  """Returns the ranks of the texts' tokens in the draft's distribution."""
  texts = []
  for seed, size in enumerate(recording.rounds.num_tokens.tolist()):
    # Of two tokens of a prompt, and a first one that nobody drafts.
    positions = np.arange(3, 2 + size)[None]
    keys = sampling_lib.position_keys(
      np.array([seed], np.uint32), positions, sampling_lib.Stream.DRAFT
    )
    uniform = jax.vmap(jax.vmap(jax.random.uniform))(keys)[0]
    ranks = np.log1p(-np.asarray(uniform, np.float64)) / np.log1p(-acceptance)
    texts.append(ranks.astype(np.int64))
  return texts


if __name__ == '__main__':
  program.run(main)
