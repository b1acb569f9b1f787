"""The target writes its own training text, shard by shard."""

import itertools
import pathlib
from collections.abc import Iterator

import jax
import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.distillation import samples, shards
from swiftspec_jax.distillation.writing import rollout, scripts
from swiftspec_jax.models.model import Model

NUM_STEPS = 256  # length of a row
_SENSIBLE_TEMPERATURE = 0.85
_MIN_DOCUMENT = 60  # tokens of an answer that becomes a document


def generate_shards(
  target: Model,
  planner: scripts.Planner,
  directory: pathlib.Path,
  *,
  seed: int,
  num_stored: int,
  feature_layers: tuple[int, ...] = (),
  show_progress: bool = False,
) -> Iterator[list[samples.Group]]:
  """Yields the groups of shards, those that exist already first; endless.

  Shard i depends on the seed, i and the shards before it, from which it takes
  texts as documents. So generation goes on where it was interrupted.

  Args:
    target: writes.
    planner: planner of the batches.
    directory: folder of the shards; made if it does not exist.
    seed: seed of the sampled passages.
    num_stored: K, entries of each distribution.
    feature_layers: layers of the target, whose outputs are stored.
    show_progress: whether each batch has a bar on standard error.

  Raises:
    UserError: a shard cannot be written, or one that exists is broken or of
      another target.
  """
  with errors.explained(f'cannot make {directory}: ', OSError):
    directory.mkdir(parents=True, exist_ok=True)
  metadata = {
    'target': target.name,
    'vocab_size': target.config.vocab_size,
    'seed': seed,
    'feature_layers': feature_layers,
  }
  existing = dict(shards.find_shards(directory))
  for number in itertools.count():
    path = existing.get(number)
    if path is not None:
      groups, found = shards.read_shard(path)
      shards.check_vocabulary(path, found, target)
    else:
      groups = _generate(
        target,
        planner,
        number,
        seed=seed,
        num_stored=num_stored,
        feature_layers=feature_layers,
        show_progress=show_progress,
      )
      shards.write_shard(shards.shard_path(directory, number), groups, metadata)
    planner.learn(_texts(target, groups))
    yield groups


def _generate(
  target, planner, number, *, seed, num_stored, feature_layers, show_progress
):
  """Returns the groups of one batch."""
  shape, plans = planner.batch(number)
  token_ids = np.zeros((shape.num_prefixes, shape.capacity), np.int32)
  for i, plan in enumerate(plans):
    token_ids[i, : len(plan.prefix)] = plan.prefix
  lengths = np.array([len(plan.prefix) for plan in plans], np.int32)
  prefix, top, features = rollout.prefill(
    target,
    token_ids,
    lengths,
    num_stored=num_stored,
    feature_layers=feature_layers,
  )
  stops = {*target.config.eos_token_ids, *planner.end_of_turn}
  written = rollout.roll_out(
    target,
    prefix,
    scripts.compile_script(plans, sorted(stops)),
    num_steps=NUM_STEPS,
    num_stored=num_stored,
    key=jax.random.fold_in(jax.random.key(seed), number),
    feature_layers=feature_layers,
    show_progress=f'shard {number + 1}' if show_progress else None,
  )
  return samples.harvest(plans, top, features, written)


def _texts(target: Model, groups: list[samples.Group]) -> list[str]:
  """Returns answers that may serve as documents."""
  texts = []
  for group in groups:
    for sample in group.samples:
      is_answer = sample.roles == samples.Role.ANSWER
      first = int(np.argmax(is_answer))
      others = np.flatnonzero(~is_answer[first:])
      size = int(others[0]) if len(others) else len(is_answer) - first
      is_sensible = sample.temperature <= _SENSIBLE_TEMPERATURE
      is_article = sample.kind in ('chat', 'translate') and is_sensible
      if is_article and size >= _MIN_DOCUMENT:
        token_ids = sample.token_ids[first : first + size]
        texts.append(
          target.tokenizer.decode(token_ids, skip_special_tokens=True)
        )
  return texts
