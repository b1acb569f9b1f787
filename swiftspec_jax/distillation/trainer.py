"""A training run that goes on where it was killed."""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from swiftspec_jax import errors
from swiftspec_jax.checkpoint.drafts import draft as draft_lib
from swiftspec_jax.distillation import packing, shards, student, training
from swiftspec_jax.distillation.samples import Group
from swiftspec_jax.distillation.training import TrainingConfig
from swiftspec_jax.models import layers
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.models.matrices import transposed
from swiftspec_jax.models.model import Model
from swiftspec_jax.runtime import atomic_file, sharding

_RUN = 'run.json'
_CHECKPOINTS = 'checkpoints'
_FROZEN = ('output_token_ids',)


def load_data(
  directory: pathlib.Path,
  target: Model,
  num_shards: int | None = None,
  feature_layers: Sequence[int] = (),
) -> tuple[list[Group], int]:
  """Returns the groups of the first shards, and how many those are.

  Args:
    directory: folder of the shards.
    target: model that wrote them.
    num_shards: number of shards to read; None means all.
    feature_layers: layers whose outputs must be stored.

  Raises:
    UserError: there are no or too few shards, one is broken or lacks
      features, or another model wrote them.
  """
  found = shards.find_shards(directory)[:num_shards]
  if not found or len(found) < (num_shards or 0):
    raise errors.UserError(
      f'{directory} has {len(found)} shards, {num_shards or "some"} are '
      'needed; write them with swiftspec generate_data'
    )
  groups = []
  for _, path in found:
    new, metadata = shards.read_shard(path)
    shards.check_vocabulary(path, metadata, target)
    shards.check_features(path, metadata, feature_layers)
    groups += new
  stored = {group.top_token_ids.shape[1] for group in groups}
  if len(stored) > 1:
    raise errors.UserError(
      f'{directory} has shards with {sorted(stored)} stored log-probabilities; '
      'generate all with the same --top_logprobs'
    )
  return groups, len(found)


def data_mesh(devices: Sequence[jax.Device]) -> Mesh:
  """Returns a mesh that shares the rows of a batch among `devices`."""
  return Mesh(
    np.asarray(devices).reshape(-1, 1),
    (sharding.DATA_AXIS, sharding.MODEL_AXIS),
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
  )


class Trainer:
  """A run: its data, its state on the devices, and its checkpoints.

  Several processes may work together, each with the same arguments and with
  the devices of all; they must see the same folders.
  """

  def __init__(
    self,
    config: TrainingConfig,
    target: Model,
    data_dir: pathlib.Path,
    output_dir: pathlib.Path,
    *,
    devices: Sequence[jax.Device],
    start_from: Model | None = None,
  ):
    """Reads the data, and the last checkpoint of the run if there is one.

    Args:
      config: options of the run; a run that goes on must have the same.
      target: model that wrote the data.
      data_dir: folder of the shards. A run that goes on takes as many as it
        began with, a new one all.
      output_dir: folder of the run.
      devices: share the rows of each batch.
      start_from: a draft whose parameters are the first ones. Outputs that it
        does not have begin as in a new draft.

    Raises:
      UserError: bad data, a checkpoint of another configuration, sizes that do
        not fit, or a target whose tables are of few bits.
    """
    if isinstance(target.params['embedding'], layers.TABLES):
      raise errors.UserError(
        f'{target.name} has tables of few bits, from which no draft can begin; '
        "load it with dtype='float32'"
      )
    self.config = config
    self.target = target
    self._output_dir = output_dir
    self.model_config = config.student.model_config(target.config)
    run = self._open_run()
    groups, num_shards = load_data(
      data_dir,
      target,
      run.get('num_shards'),
      config.student.feature_layers,
    )
    learned, held_out = packing.split(groups)
    if not learned or not held_out:
      raise errors.UserError(
        f'{data_dir} has {len(learned)} usable groups for training and '
        f'{len(held_out)} for evaluation; generate more data'
      )
    self._pieces = packing.make_pieces(learned)
    self._held_out = packing.make_pieces(held_out)
    self._mesh = data_mesh(devices)
    if config.tokens_per_batch % (packing.ROW_SIZES[-1] * len(devices)):
      raise errors.UserError(
        f'tokens_per_batch={config.tokens_per_batch} must be a multiple of '
        f'{packing.ROW_SIZES[-1]} for each of {len(devices)} devices'
      )
    arrays = self._first_params(learned, start_from)
    self.outputs = arrays.get('output_token_ids')
    self._prepare_state(arrays)
    self._write_run(num_shards)
    self._manager = ocp.CheckpointManager(
      (output_dir / _CHECKPOINTS).absolute(),
      options=ocp.CheckpointManagerOptions(
        max_to_keep=2, enable_async_checkpointing=False
      ),
    )
    self._restore()

  def _open_run(self) -> dict[str, Any]:
    path = self._output_dir / _RUN
    if not path.exists():
      return {}
    try:
      run = json.loads(path.read_text())
      its_config = run['config']
    except (OSError, ValueError, KeyError) as error:
      raise errors.UserError(
        f'{path} is damaged ({error}); name a new --output_dir'
      ) from error
    mine = self.config.to_json()
    for name, value in mine.items():
      if its_config.get(name) != value:
        raise errors.UserError(
          f'{self._output_dir} holds a run with {name}='
          f'{its_config.get(name)!r}, not {value!r}; name a new --output_dir '
          'or the same options'
        )
    return run

  def _write_run(self, num_shards: int) -> None:
    path = self._output_dir / _RUN
    if path.exists() or not sharding.is_first_process():
      return
    values = {
      'config': self.config.to_json(),
      'target': self.target.name,
      'num_shards': num_shards,
    }
    with errors.explained(f'cannot write {path}: ', OSError):
      self._output_dir.mkdir(parents=True, exist_ok=True)
      with atomic_file.replacing(path) as partial:
        partial.write_text(json.dumps(values, indent=2) + '\n')

  def _first_params(self, groups, start_from) -> params_lib.Params:
    outputs, size = None, self.model_config.output_vocab_size
    if size is not None:
      outputs = student.choose_outputs(
        groups, self.model_config.vocab_size, size
      )
    arrays = student.initial_params(
      self.model_config,
      self.target,
      self.config.student,
      outputs,
      self.config.seed,
    )
    if start_from is None:
      return arrays
    its_config = dataclasses.replace(
      start_from.config, output_vocab_size=self.model_config.output_vocab_size
    )
    if its_config != self.model_config:
      raise errors.UserError(
        f'{start_from.name} has another architecture than this run; give '
        'the same options of the draft'
      )
    params = transposed.undone(start_from.params)
    return student.continue_from(jax.tree.map(np.asarray, params), arrays)

  @property
  def shares_embedding(self) -> bool:
    """Whether the embedding is the target's and stays as it is."""
    return self.model_config.embed_dim == self.target.config.embed_dim

  def _prepare_state(self, arrays: params_lib.Params) -> None:
    frozen = {*_FROZEN, *(['embedding'] if self.shares_embedding else [])}
    if self.model_config.recurrent:
      frozen.add('final_norm')  # of the target
    everywhere = sharding.replicated(self._mesh)
    self._frozen = jax.device_put(
      {k: v for k, v in arrays.items() if k in frozen}, everywhere
    )
    params = jax.device_put(
      {k: v for k, v in arrays.items() if k not in frozen}, everywhere
    )
    optimiser = training.optimiser(self.config)
    state = {'params': params, 'optimiser': optimiser.init(params)}
    self._state = jax.device_put(state, everywhere)
    self.step = 0

  def _restore(self) -> None:
    latest = self._manager.latest_step()
    if latest is None:
      return
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, self._state)
    try:
      self._state = self._manager.restore(
        latest, args=ocp.args.StandardRestore(abstract)
      )
    except (OSError, ValueError, KeyError) as error:
      raise errors.UserError(
        f'{self._output_dir}/{_CHECKPOINTS}/{latest} is not usable: {error}; '
        'remove it to go on from the one before'
      ) from error
    self.step = latest

  def save(self, stored_dtype: str = 'float16') -> None:
    """Writes a checkpoint and the draft as it is now.

    Args:
      stored_dtype: dtype of the draft's weights, one of `draft.STORED_DTYPES`.

    Raises:
      UserError: they cannot be written.
    """
    failed = f'cannot write a checkpoint to {self._output_dir}: '
    with errors.explained(failed, (OSError, ValueError)):
      self._manager.save(self.step, args=ocp.args.StandardSave(self._state))
    if not sharding.is_first_process():
      return
    arrays = jax.tree.map(np.asarray, {**self._frozen, **self._state['params']})
    if self.shares_embedding:
      del arrays['embedding']
    draft_lib.save(
      self._output_dir,
      self.model_config,
      arrays,
      self.target,
      stored_dtype=stored_dtype,
      training={'step': self.step, **self.config.to_json()},
    )

  def run(self) -> Iterator[dict[str, float]]:
    """Yields the metrics of each step up to the last, as they are done."""
    for planned in itertools.islice(self._plans(), self.step, None):
      if self.step >= self.config.num_steps:
        return
      batch = packing.make_batch(
        planned,
        self.config.tokens_per_batch,
        self.config.role_weights,
        np.random.default_rng([self.config.seed, self.step]),
      )
      self._state, metrics = training.train_step(
        self._state,
        self._frozen,
        self._to_devices(planned, batch),
        config=self.config,
        model_config=self.model_config,
      )
      self.step += 1
      yield {k: float(v) for k, v in jax.device_get(metrics).items()}

  def _plans(self) -> Iterator[list[list[packing.Piece]]]:
    for epoch in itertools.count():
      rng = np.random.default_rng([self.config.seed, epoch])
      yield from packing.plan_batches(
        self._pieces, self.config.tokens_per_batch, rng
      )

  def _to_devices(self, rows, batch: packing.Batch) -> dict[str, jax.Array]:
    arrays = dataclasses.asdict(batch)
    arrays['top_outputs'] = student.top_outputs(
      arrays.pop('top_token_ids'), self.outputs
    )
    if self.model_config.reads_features:
      arrays['features'] = packing.features_of(rows, batch)
    by_row = NamedSharding(self._mesh, PartitionSpec(sharding.DATA_AXIS))
    # Each process has the whole batch, and its devices take their rows.
    return {
      name: jax.make_array_from_callback(x.shape, by_row, x.__getitem__)
      for name, x in arrays.items()
    }

  def held_out_batches(
    self, most: int | None = None
  ) -> Iterator[tuple[list[list[packing.Piece]], dict[str, np.ndarray]]]:
    """Yields rows of held-out pieces, and each token's measures [B, S].

    Args:
      most: batches of each row size; None means all.
    """
    for size, pieces in self._held_out.items():
      plans = packing.plan_batches(
        {size: pieces}, self.config.tokens_per_batch, None
      )
      for rows in plans[:most]:
        batch = packing.make_batch(
          rows,
          self.config.tokens_per_batch,
          self.config.role_weights,
          np.random.default_rng(0),
        )
        measures = training.measure(
          self._state['params'],
          self._frozen,
          self._to_devices(rows, batch),
          config=self.config,
          model_config=self.model_config,
        )
        measures = multihost_utils.process_allgather(measures, tiled=True)
        yield rows, _at_places(measures, batch)


def _at_places(
  measures: dict[str, np.ndarray], batch: packing.Batch
) -> dict[str, np.ndarray]:
  """Puts values [B, M] at their places in rows [B, S]."""
  whole = {}
  for name, values in measures.items():
    whole[name] = np.zeros(batch.token_ids.shape, values.dtype)
    np.put_along_axis(whole[name], batch.places, values, axis=1)
  return whole
