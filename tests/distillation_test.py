import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distillation_cases import (
  CONFIG,
  FEATURE_LAYERS,
  random_groups,
  target,
  write_data,
)

import swiftspec_jax as ss
from swiftspec_jax import errors, testing
from swiftspec_jax.checkpoint.drafts import draft as draft_lib
from swiftspec_jax.distillation import (
  evaluation,
  losses,
  packing,
  samples,
  shards,
  student,
  trainer,
  training,
)
from swiftspec_jax.models import decoder
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.models.cache import dense
from swiftspec_jax.models.matrices import transposed

STANDS_ALONE = student.StudentConfig(init_layers=(0, 2), output_vocab_size=100)
READS_FEATURES = dataclasses.replace(
  STANDS_ALONE, feature_layers=FEATURE_LAYERS
)
STUDENTS = pytest.mark.parametrize(
  'architecture',
  [STANDS_ALONE, READS_FEATURES],
  ids=['stands_alone', 'reads_features'],
)
TRAINING = training.TrainingConfig(
  student=STANDS_ALONE,
  loss=losses.LossWeights(),
  num_steps=3,
  tokens_per_batch=2048,
  warmup_steps=1,
)


@pytest.fixture
def data(tmp_path):
  write_data(tmp_path / 'data')
  return tmp_path / 'data'


def make_trainer(data, output_dir, config=TRAINING, devices=1, **options):
  return trainer.Trainer(
    config,
    target(),
    data,
    output_dir,
    devices=jax.devices()[:devices],
    **options,
  )


def test_shards_keep_what_was_written(tmp_path):
  groups = random_groups(0)
  path = shards.shard_path(tmp_path, 0)
  shards.write_shard(path, groups, {'target': 'tiny', 'vocab_size': 272})
  read, metadata = shards.read_shard(path)
  assert metadata['target'] == 'tiny'
  for group, again in zip(groups, read, strict=True):
    assert group.has_document == again.has_document
    for part, other in zip(
      (group, *group.samples), (again, *again.samples), strict=True
    ):
      np.testing.assert_array_equal(part.token_ids, other.token_ids)
      np.testing.assert_array_equal(part.top_token_ids, other.top_token_ids)
      np.testing.assert_allclose(
        part.top_log_probs, other.top_log_probs, rtol=2e-3
      )
    for sample, other in zip(group.samples, again.samples, strict=True):
      np.testing.assert_array_equal(sample.roles, other.roles)
      assert sample.kind == other.kind


def test_repeated_samples_are_dropped():
  groups = random_groups(0)
  once = packing.split(groups)
  twice = packing.split([*groups, *groups])
  for part, other in zip(once, twice, strict=True):
    assert sum(g.num_tokens for g in part) == sum(g.num_tokens for g in other)


def test_little_data_is_split_too():
  groups = random_groups(0)
  for count in (2, 3, 5):
    learned, held_out = packing.split(groups[:count])
    assert learned
    assert held_out


# Compiled as a whole, and not operation by operation.
student_forward = jax.jit(
  student.forward, static_argnames=('config', 'num_passes')
)
token_losses = jax.jit(losses.token_losses)


@STUDENTS
def test_packed_rows_are_independent(architecture):
  """Logits in a packed row are those of each branch on its own."""
  model = target()
  config = architecture.model_config(model.config)
  outputs = student.choose_outputs(random_groups(0), 272, 100)
  params = student.initial_params(config, model, architecture, outputs, seed=0)
  pieces = packing.make_pieces(random_groups(1, num_groups=6))
  plan = packing.plan_batches(pieces, 2048, np.random.default_rng(0))

  def logits(rows):
    passes = student_forward(params, config, all_places(rows), num_passes)
    return np.stack(passes, axis=-1)

  num_passes = 3 if config.reads_features else 1
  packed = logits(plan[0])
  assert packed.shape[2] == 100
  for i, row in enumerate(plan[0]):
    prefix_place = None
    for _, place, part, branch in packing.walk(row):
      if branch == 0:
        prefix, prefix_place = part, place
        continue
      alone = dataclasses.replace(prefix, samples=(part,))
      piece = packing.Piece(group=alone, samples=(part,), is_first=True)
      single = logits([[piece]])[0]
      size = len(prefix.token_ids)
      np.testing.assert_allclose(
        packed[i, prefix_place], single[:size], atol=1e-4
      )
      np.testing.assert_allclose(
        packed[i, place], single[size : size + len(part.token_ids)], atol=1e-4
      )


def all_places(rows):
  """Arrays of these rows for the forward, at every place."""
  batch = make_batch(rows)
  size = batch.token_ids.shape
  arrays = {
    **dataclasses.asdict(batch),
    'places': np.broadcast_to(np.arange(size[1]), size),
    'features': packing.features_of(rows, batch),
  }
  return {name: array[: len(rows)] for name, array in arrays.items()}


@pytest.mark.parametrize('window', [None, 8])
def test_passes_are_those_of_a_chain(window):
  """Pass k is the k-th forward of a draft that goes on from its own state."""
  config = dataclasses.replace(
    READS_FEATURES.model_config(CONFIG), sliding_window=window
  )
  params = params_lib.random_params(jax.random.key(0), config)
  group = random_groups(3)[0]
  sample = group.samples[0]
  piece = packing.Piece(group=group, samples=(sample,), is_first=True)
  passes = student_forward(params, config, all_places([[piece]]), 3)
  token_ids = np.concatenate([group.token_ids, sample.token_ids])
  features = np.concatenate([group.features, sample.features])

  @jax.jit
  def forward(tokens, before, cache, start):
    hidden, cache = decoder.forward(
      params,
      config,
      tokens[None],
      cache,
      starts=start[None],
      features_before=before,
    )
    return hidden, cache, decoder.unembed(params, config, hidden)[0]

  @jax.jit
  def features_before(features):
    projected = decoder.project_features(params, config, features[None])
    return jnp.pad(projected[:, :-1], ((0, 0), (1, 0), (0, 0)))

  text_hidden, text_cache, text_logits = forward(
    token_ids,
    features_before(features),
    dense.init(config, 1, 128, 'float32', target().mesh),
    np.int32(0),
  )
  for root in (1, 9, len(token_ids) - 4):
    # What stands after the root is written over.
    hidden = np.asarray(text_hidden)[:, root : root + 1]
    cache, logits = text_cache, np.asarray(text_logits)[root]
    for number in range(3):
      place = root + number
      np.testing.assert_allclose(passes[number][0, place], logits, atol=1e-4)
      hidden, cache, (logits,) = forward(
        token_ids[place + 1 : place + 2], hidden, cache, np.int32(place + 1)
      )


def make_batch(rows, role_weights=(0.1, 0.3, 1.0)):
  rng = np.random.default_rng(0)
  return packing.make_batch(rows, 2048, role_weights, rng)


@pytest.mark.parametrize('num_samples', [1, 8])
def test_places_hold_what_is_learned(num_samples):
  """All answers once, and prompts with their whole weight together."""
  groups = random_groups(2, num_groups=8, num_samples=num_samples)
  pieces = packing.make_pieces(groups)
  (rows,) = packing.plan_batches(pieces, 2048, None)
  batch = make_batch(rows)
  assert batch.places.shape[1] == (256 if num_samples == 1 else 512)
  num_answers = samples.answer_tokens(groups).total()
  assert batch.is_answer.sum() == num_answers
  num_given = sum(
    len(group.token_ids) - 1 + 3 * len(group.samples) for group in groups
  )
  np.testing.assert_allclose(
    batch.weights.sum(), num_answers + 0.1 * num_given, rtol=1e-5
  )
  i, j = np.argwhere(batch.is_answer)[0]
  token = batch.token_ids[i, batch.places[i, j]]
  assert batch.top_token_ids[i, j, 0] == 7 * token % 256


def test_losses_by_hand():
  draft = np.log([[[0.5, 0.2, 0.2, 0.1]]])
  target_top = np.log([[[0.6, 0.3]]])
  measures = token_losses(draft, np.array([[[0, 2]]]), target_top)
  kl = (
    0.6 * np.log(0.6 / 0.5) + 0.3 * np.log(0.3 / 0.2) + 0.1 * np.log(0.1 / 0.3)
  )
  expected = {
    'cross_entropy': -np.log(0.5),
    'kl': kl,
    'acceptance': 0.7,
    'total_variation': 0.3,
    'agreement': 1.0,
  }
  for name, value in expected.items():
    np.testing.assert_allclose(measures[name], [[value]], rtol=1e-5)


def test_what_the_draft_cannot_propose_counts_as_rest():
  draft = np.log([[[0.5, 0.5]]])
  top = np.log([[[0.6, 0.4]]])
  measures = token_losses(draft, np.array([[[-1, 1]]]), top)
  kl = 0.4 * np.log(0.4 / 0.5) + 0.6 * np.log(0.6 / 0.5)
  np.testing.assert_allclose(measures['kl'], [[kl]], rtol=1e-5)
  np.testing.assert_allclose(measures['agreement'], [[0.0]])
  np.testing.assert_allclose(measures['cross_entropy'], [[0.0]])


@pytest.mark.parametrize(
  ('hits', 'rounds'),
  [([], 0), ([True] * 5, 1), ([True] * 6, 2), ([False] * 3, 3)],
)
def test_rounds_of_a_chain(hits, rounds):
  assert evaluation.count_rounds([hits] * 4) == rounds


def test_later_tokens_of_a_chain_have_guesses_of_their_own():
  first, later = [True] * 6, [False] * 6
  assert evaluation.count_rounds([first, first, later, later]) == 2
  assert evaluation.count_rounds([first, later, first, first]) == 3


@pytest.mark.parametrize(
  ('architecture', 'optimiser', 'learning_rate'),
  [
    (STANDS_ALONE, 'adamw', 9e-3),
    (STANDS_ALONE, 'muon', 3e-2),
    pytest.param(READS_FEATURES, 'adamw', 3e-3, marks=pytest.mark.optimised),
  ],
  ids=['stands_alone-adamw', 'stands_alone-muon', 'reads_features-adamw'],
)
def test_training_learns(
  data, tmp_path, architecture, optimiser, learning_rate
):
  # Features are noise here, and must be told from what counts.
  num_steps, share = (40, 0.9) if architecture.feature_layers else (12, 0.8)
  config = dataclasses.replace(
    TRAINING,
    student=architecture,
    num_steps=num_steps,
    optimiser=optimiser,
    learning_rate=learning_rate,
    prompt_weight=0.5,
  )
  run = make_trainer(data, tmp_path / 'run', config)
  metrics = list(run.run())
  assert metrics[-1]['cross_entropy'] < share * metrics[0]['cross_entropy']
  figures = evaluation.summarize(run.held_out_batches())
  assert figures['all']['num_tokens'] > 0


def test_devices_share_a_batch(data, tmp_path):
  config = dataclasses.replace(TRAINING, tokens_per_batch=4096, num_steps=2)
  one = make_trainer(data, tmp_path / 'one', config)
  two = make_trainer(data, tmp_path / 'two', config, devices=2)
  for a, b in zip(one.run(), two.run(), strict=True):
    np.testing.assert_allclose(a['loss'], b['loss'], rtol=1e-4)


def test_a_restored_run_repeats_the_losses(data, tmp_path):
  """`train_draft_test` has a draft that reads features."""
  expected = list(make_trainer(data, tmp_path / 'whole').run())
  first = make_trainer(data, tmp_path / 'parts')
  steps = first.run()
  losses_seen = [next(steps)]
  first.save()
  next(steps)  # lost
  # More data must not change a run that has begun.
  shutil.copy(
    data / 'shard-000000.safetensors', data / 'shard-000003.safetensors'
  )
  second = make_trainer(data, tmp_path / 'parts')
  assert second.step == 1
  assert losses_seen + list(second.run()) == expected


def test_a_draft_goes_on_with_other_outputs(data, tmp_path):
  first = make_trainer(data, tmp_path / 'first')
  list(first.run())
  first.save('float32')
  for size in (60, 150, None):
    check_other_outputs(data, tmp_path / 'first', tmp_path / f'{size}', size)


def check_other_outputs(data, first, second, size):
  """The draft in `first` gets other outputs, and the rest is as it was."""
  model = target()
  draft = ss.load(first, draft_of=model)
  config = dataclasses.replace(
    TRAINING, student=dataclasses.replace(STANDS_ALONE, output_vocab_size=size)
  )
  make_trainer(data, second, config, start_from=draft).save('float32')
  other = ss.load(second, draft_of=model)
  jax.tree.map(
    np.testing.assert_array_equal,
    draft.params['layers'],
    other.params['layers'],
  )
  its = dict(
    zip(
      draft.params['output_token_ids'].tolist(),
      np.asarray(draft.params['unembedding']),
      strict=True,
    )
  )
  outputs = other.params.get('output_token_ids', np.arange(CONFIG.vocab_size))
  for token_id, row in zip(
    outputs.tolist(), np.asarray(other.params['unembedding']), strict=True
  ):
    expected = its.get(
      token_id, np.asarray(model.params['embedding'])[token_id]
    )
    np.testing.assert_array_equal(row, expected)
  assert set(its) & set(outputs.tolist())


def test_a_run_with_other_options_is_refused(data, tmp_path):
  make_trainer(data, tmp_path / 'run')
  other = dataclasses.replace(TRAINING, learning_rate=1.0)
  with pytest.raises(errors.UserError, match='learning_rate'):
    make_trainer(data, tmp_path / 'run', other)


def test_bad_data_is_refused(tmp_path):
  with pytest.raises(errors.UserError, match='has 0 shards'):
    make_trainer(tmp_path / 'nothing', tmp_path / 'run')
  write_data(tmp_path / 'other', vocab_size=300)
  with pytest.raises(errors.UserError, match='another vocabulary'):
    make_trainer(tmp_path / 'other', tmp_path / 'run')


def test_data_without_the_features_is_refused(tmp_path):
  config = dataclasses.replace(TRAINING, student=READS_FEATURES)
  write_data(tmp_path / 'other', feature_layers=(1,))
  with pytest.raises(errors.UserError, match='--feature_layers=0,2'):
    make_trainer(tmp_path / 'other', tmp_path / 'run', config)
  write_data(tmp_path / 'none', feature_layers=())
  with pytest.raises(errors.UserError, match='has no features, which'):
    shards.feature_layers(tmp_path / 'none')


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({}, 'give init_layers or num_layers'),
    ({'init_layers': (7,)}, 'layers 0 to 2'),
    ({'init_layers': (0,), 'feature_layers': (3,)}, 'layers 0 to 2'),
    ({'init_layers': (0,), 'ffw_dim': 8}, 'leave out ffw_dim'),
    ({'num_layers': 1, 'output_vocab_size': 1000}, 'from 1 to vocab'),
  ],
)
def test_architectures_that_do_not_fit(options, message):
  with pytest.raises(errors.UserError, match=message):
    student.StudentConfig(**options).model_config(CONFIG)


@STUDENTS
@pytest.mark.parametrize('stored_dtype', draft_lib.STORED_DTYPES)
def test_a_draft_is_saved_and_loaded(tmp_path, stored_dtype, architecture):
  model = target()
  config = architecture.model_config(model.config)
  outputs = np.arange(5, 105, dtype=np.int32)
  params = student.initial_params(config, model, architecture, outputs, seed=0)
  stored = {k: v for k, v in params.items() if k != 'embedding'}
  stored = jax.tree.map(np.asfortranarray, stored)  # strides do not matter
  draft_lib.save(tmp_path, config, stored, model, stored_dtype=stored_dtype)
  draft = ss.load(tmp_path, draft_of=model)
  assert draft.config == config
  np.testing.assert_array_equal(draft.params['output_token_ids'], outputs)
  tolerance = {'float32': 0, 'float16': 1e-3, 'int8': 1e-2}[stored_dtype]
  for (path, leaf), other in zip(
    jax.tree_util.tree_leaves_with_path(params),
    jax.tree.leaves(transposed.undone(draft.params)),
    strict=True,
  ):
    np.testing.assert_allclose(
      leaf, other, atol=tolerance, err_msg=jax.tree_util.keystr(path)
    )
  with pytest.raises(errors.UserError, match='draft_of=target'):
    ss.load(tmp_path)
  other = testing.random_model(dataclasses.replace(CONFIG, vocab_size=280))
  with pytest.raises(errors.UserError, match='vocabulary is another'):
    ss.load(tmp_path, draft_of=other)
  wider = testing.random_model(dataclasses.replace(CONFIG, embed_dim=64))
  with pytest.raises(errors.UserError, match='64 wide'):
    ss.load(tmp_path, draft_of=wider)


def test_layers_of_the_target_are_a_draft(tmp_path):
  model = target()
  for name, layers in {'all': range(3), 'two': (0, 2)}.items():
    student.save_layers(tmp_path / name, model, layers)
    draft = ss.load(tmp_path / name, draft_of=model)
    assert draft.config.num_layers == len(layers)
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=1e-3),  # float16
      draft.params['layers'],
      [model.params['layers'][i] for i in layers],
    )
  # With all layers it is the target, and is always right.
  draft = ss.load(tmp_path / 'all', draft_of=model)
  (found,) = ss.generate(model, [[1, 2, 3]], draft=draft, max_new_tokens=12)
  (expected,) = ss.generate(model, [[1, 2, 3]], max_new_tokens=12)
  assert found.token_ids == expected.token_ids
  assert found.stats.acceptance_length > 3
  with pytest.raises(errors.UserError, match='init_layers'):
    student.save_layers(tmp_path / 'none', model, (3,))


def test_output_ids_that_do_not_fit(tmp_path):
  model = target()
  config = STANDS_ALONE.model_config(model.config)
  outputs = np.arange(200, 300, dtype=np.int32)
  params = student.initial_params(
    config, model, STANDS_ALONE, np.arange(100, dtype=np.int32), seed=0
  )
  params['output_token_ids'] = outputs
  draft_lib.save(tmp_path, config, params, model)
  with pytest.raises(errors.UserError, match='output_token_ids'):
    ss.load(tmp_path, draft_of=model)
