"""Targets that read images, and drafts that read text alone."""

import dataclasses
import io
import json
import pathlib

import chex
import engine_cases
import image_cases
import jax
import numpy as np
import PIL.Image
import pytest
from engine_cases import RandomLengths, make_sizes
from safetensors import numpy as safetensors_numpy

import swiftspec_jax as ss
from swiftspec_jax import errors, testing
from swiftspec_jax.drafters import engine_drafter, make_drafter
from swiftspec_jax.drafters.models.draft_tree import TreeDraft
from swiftspec_jax.drafters.models.persistent_trees import PersistentTrees
from swiftspec_jax.drafters.models.self_draft import SelfDraft
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.models import vision
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.requests import images

GOLDEN = json.loads(
  pathlib.Path(__file__).with_name('golden').joinpath('images.json').read_text()
)
LOOKUP = ss.PromptLookup(prompt_lookup_min=1)
CHAINS = {'rows': (4,), 'lengths': (0, 3)}
TREES = {'rows': (4,), 'lengths': (0, 6), 'draft_steps': (0, 3)}
NUM_PAGES = 22  # of 8 tokens: several long rows do not fit


@pytest.fixture(scope='module')
def models(tmp_path_factory):
  """Targets by the kind of their tower, and 'text': a draft."""
  found = {}
  for tower in image_cases.TOWERS:
    directory = tmp_path_factory.mktemp(tower)
    image_cases.write(directory, tower)
    found[tower] = ss.load(directory)
  directory = tmp_path_factory.mktemp('text')
  testing.write_tiny_checkpoint(directory)
  found['text'] = ss.load(directory, draft_of=found['clip'])
  return found


def engine_of(target, draft=None, policy=None, max_images=2, **options):
  drafts = TREES if make_drafter.spec_of(draft).makes_trees else CHAINS
  sizes = make_sizes(NUM_PAGES, drafts=drafts)
  sizes = dataclasses.replace(sizes, max_images=max_images)
  return Engine(target, draft, sizes=sizes, policy=policy, **options)


def request_of(*parts, seeds=(), **sampling):
  sampling = {'max_new_tokens': 24, 'ignore_eos': True, **sampling}
  return ss.Request(
    token_ids=image_cases.prompt(*parts),
    images=tuple(map(image_cases.image, seeds)),
    sampling=ss.SamplingParams(**sampling),
  )


def golden_request(**sampling):
  parts, seeds = image_cases.PARTS, image_cases.SEEDS
  return request_of(*parts, seeds=seeds, **sampling)


def tokens_of(engine, requests):
  results = engine_cases.results_of(engine, requests)
  return [result.token_ids for result in results]


def embed(model, pixels):
  run = jax.jit(vision.embed, static_argnums=1)
  return run(model.params['vision'], model.config.vision, pixels)


@pytest.mark.parametrize('tower', image_cases.TOWERS)
def test_embeddings_are_those_of_transformers(models, tower):
  found = embed(models[tower], image_cases.pixels(1))
  assert found.shape == (9, 32)
  np.testing.assert_allclose(
    found[::4, ::5], GOLDEN[tower]['embeddings'], atol=1e-5
  )


def test_towers_of_bfloat16_are_about_the_same(tmp_path):
  image_cases.write(tmp_path)
  model = ss.load(tmp_path, dtype='bfloat16')
  found = embed(model, image_cases.pixels(1))
  assert found.dtype == 'bfloat16'
  np.testing.assert_allclose(
    found[::4, ::5].astype(np.float32), GOLDEN['clip']['embeddings'], atol=0.1
  )
  [output] = tokens_of(engine_of(model), [golden_request()])
  assert len(output) == image_cases.NUM_NEW_TOKENS


@pytest.mark.parametrize('tower', image_cases.TOWERS)
def test_output_is_that_of_transformers(models, tower):
  engine = engine_of(models[tower], LOOKUP, FixedLength(3))
  [found] = tokens_of(engine, [golden_request()])
  assert list(found) == GOLDEN[tower]['token_ids']


def test_a_decoder_over_pages_reads_images(models):
  decoder = ss.Decoder(models['clip'], policy=FixedLength(0))
  *_, last = decoder.run([golden_request()])
  assert list(last.result.token_ids) == GOLDEN['clip']['token_ids']


def drafts_of(models):
  reading = dataclasses.replace(
    models['text'].config, num_layers=1, feature_layers=(0, 1), feature_dim=64
  )
  return {
    'lookup': LOOKUP,
    'chain': models['text'],
    'tree': TreeDraft(
      model=testing.random_model(reading),
      width=3,
      branching=3,
      suffix_lookup=True,
    ),
    'self': SelfDraft(num_sink_tokens=8, window=16),
  }


def random_requests(count, seed):
  """With 0, 1 and 2 images, of which several have the same."""
  generator = np.random.default_rng(seed)
  requests = []
  for _ in range(count):
    parts, seeds = [], generator.integers(0, 3, generator.integers(0, 3))
    for _ in seeds:
      parts += [None, 'ab' * int(generator.integers(0, 6))]
    parts = ['xy' * int(generator.integers(0, 5)), *parts, 'ababab? ']
    sampling = {
      'max_new_tokens': int(generator.integers(1, 40)),
      'temperature': float(generator.choice([0, 0.8])),
      'seed': int(generator.integers(0, 1000)),
    }
    requests.append(request_of(*parts, seeds=seeds.tolist(), **sampling))
  return requests


@pytest.fixture(scope='module')
def plain_outputs(models):
  """Requests, and what each gets alone and without drafts."""
  requests, outputs = random_requests(16, 0), []
  engine = engine_of(models['clip'])
  for request in requests:
    outputs += tokens_of(engine, [request])
  return requests, outputs


def test_steps_ahead_and_more_devices_change_no_output(models, tmp_path):
  image_cases.write(tmp_path)
  target = ss.load(tmp_path, devices=jax.devices()[:2])
  engine = engine_of(target, run_ahead=1)
  found = tokens_of(
    engine, [golden_request(), request_of('A'), golden_request()]
  )
  for i in (0, 2):
    assert list(found[i]) == GOLDEN['clip']['token_ids']


@pytest.mark.parametrize('name', ['lookup', 'chain', 'tree', 'self'])
def test_drafts_change_no_output(models, plain_outputs, name):
  requests, outputs = plain_outputs
  draft = drafts_of(models)[name]
  engine = engine_of(models['clip'], draft, RandomLengths())
  assert tokens_of(engine, requests) == outputs
  assert engine.scheduler.num_preemptions
  assert engine.scheduler.num_shared_tokens
  engine_cases.assert_empty(engine, NUM_PAGES)


class Listener(engine_drafter.HostDrafter):
  """Drafts nonsense, and notes the text that it is told."""

  name = 'listener'

  def __init__(self):
    self.texts = []

  def draft(self, view, lengths, texts):
    self.texts.append(texts.known_from(view, 0, 0))
    return engine_drafter.chains_of(view, texts, {0: [1] * lengths[0]})


@pytest.mark.parametrize(
  ('parts', 'seeds'),
  [
    (['no image'], ()),
    (['text', None, 'after'], (1,)),
    ([None, 'first'], (1,)),
    (['a', None, 'b', None, 'c'], (1, 2)),
    ([None, None, ' two of them, one after the other'], (1, 2)),
  ],
)
def test_a_draft_is_told_of_the_text_alone(models, parts, seeds):
  listener = Listener()
  engine = engine_of(models['clip'], listener, FixedLength(2))
  [output] = tokens_of(engine, [request_of(*parts, seeds=seeds)])
  text = list(image_cases.prompt(*filter(None, parts)))
  assert len(listener.texts) > 15
  for told in listener.texts:
    assert told == [*text, *output][: len(told)]
    assert len(told) > len(text)


def test_a_draft_model_has_positions_of_its_own(models):
  """Its drafts are what it writes by itself after the text alone."""
  draft = models['text']
  engine = engine_of(models['clip'], draft, FixedLength(3))
  request = golden_request()
  handle = engine.submit(request, shows_drafts=True)
  text = [*image_cases.prompt(*filter(None, image_cases.PARTS))]
  num_checked = 0
  for update in handle:
    if num_checked < 4 and update.draft_nodes:
      proposed = tuple(node.token_id for node in update.draft_nodes)
      [alone] = ss.generate(
        draft,
        [text],
        sampling=ss.SamplingParams(
          max_new_tokens=len(proposed), ignore_eos=True
        ),
      )
      assert proposed == alone.token_ids
      num_checked += 1
    text += update.token_ids
  assert num_checked == 4


def without_layers(model):
  """The same, but its distribution depends on the last token alone."""
  return dataclasses.replace(
    model,
    config=dataclasses.replace(model.config, num_layers=0),
    params={**model.params, 'layers': []},
  )


def test_a_draft_of_the_same_law_is_always_right(models):
  """So its noise is that of the target's places, not of its own."""
  target, draft = map(without_layers, (models['clip'], models['text']))
  engine = engine_of(target, draft, FixedLength(3))
  stats = engine.submit(golden_request(temperature=1.0)).result().stats
  assert stats.num_accepted == stats.num_drafted > 12


def test_different_images_share_no_pages(models):
  engine = engine_of(models['clip'])
  parts = 'eight   ', None, 'and so on and on'
  [first] = tokens_of(engine, [request_of(*parts, seeds=[1])])
  num_shared = []
  for seed in (2, 1):
    before = engine.scheduler.num_shared_tokens
    [output] = tokens_of(engine, [request_of(*parts, seeds=[seed])])
    num_shared.append(engine.scheduler.num_shared_tokens - before)
    assert (output == first) == (seed == 1)
  # The text in front of the image, and all full pages but the last token's.
  assert num_shared == [8, 32]


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'images': ()}, 'has 18 placeholders .* for 0 images'),
    ({'images': (image_cases.image(1),) * 3}, '3 images; .* at most 2'),
    ({'token_ids': image_cases.prompt(None, 'a', None)}, 'ends with an image'),
    (
      {'images': (images.Image(pixels=np.zeros((8, 8, 3), np.uint8)),) * 2},
      r'is uint8\[8, 8, 3\], the model takes uint8\[12, 12, 3\]',
    ),
  ],
)
def test_bad_requests(models, change, message):
  request = dataclasses.replace(golden_request(), **change)
  with pytest.raises(errors.UserError, match=message):
    engine_of(models['clip']).submit(request)


def test_other_models_and_drafts_refuse_images(models):
  with pytest.raises(errors.UserError, match='reads no images'):
    engine_of(models['text']).submit(golden_request())
  with pytest.raises(errors.UserError, match='devices cannot leave out the im'):
    engine_of(models['clip'], LOOKUP, run_ahead=1)
  with pytest.raises(
    errors.UserError, match='PersistentTrees cannot leave out'
  ):
    engine_of(
      models['clip'],
      PersistentTrees(model=models['text'], tree=ss.TreeConfig()),
    )


@pytest.mark.parametrize(
  'names',
  [
    {
      'language_model.model.': 'model.language_model.',
      'language_model.lm': 'lm',
    },
    {'vision_tower.vision_model.': 'vision_tower.'},
    {
      'vision_tower.': 'model.vision_tower.',
      'multi_modal': 'model.multi_modal',
    },
  ],
)
def test_other_layouts_of_checkpoints(models, names, tmp_path):
  image_cases.write(tmp_path)
  path = tmp_path / 'model.safetensors'
  weights = {}
  for name, array in safetensors_numpy.load_file(path).items():
    for old, new in names.items():
      if name.startswith(old):
        name = new + name.removeprefix(old)
    weights[name] = array
  safetensors_numpy.save_file(weights, path)
  found = ss.load(tmp_path)
  assert found.config == models['clip'].config
  chex.assert_trees_all_equal(found.params, models['clip'].params)


def test_saved_models_have_their_tower(models, tmp_path):
  ss.save(models['clip'], tmp_path / 'saved')
  found = ss.load(tmp_path / 'saved')
  assert found.config == models['clip'].config
  chex.assert_trees_all_equal(found.params, models['clip'].params)


@pytest.mark.parametrize(
  ('file', 'change', 'message'),
  [
    ('config.json', {'vision_feature_layer': [-2, -1]}, 'must be one layer'),
    ('config.json', {'vision_feature_layer': -5}, 'of the 3 of the tower'),
    ('config.json', {'projector_hidden_act': 'relu'}, "hidden_act='relu'"),
    ('config.json', {'multimodal_projector_bias': False}, 'bias=False is not'),
    ('preprocessor_config.json', {'do_pad': True}, 'do_pad=True in'),
    ('preprocessor_config.json', {'do_rescale': False}, 'do_rescale=False in'),
    ('preprocessor_config.json', {'image_mean': None}, 'lacks a usable entry'),
    (
      'preprocessor_config.json',
      {'size': {'shortest_edge': 14}},
      "size={'shortest_edge': 14}, .* must have shortest_edge of 12 pixels",
    ),
  ],
)
def test_unknown_towers_are_refused(file, change, message, tmp_path):
  image_cases.write(tmp_path)
  values = json.loads((tmp_path / file).read_text())
  (tmp_path / file).write_text(json.dumps({**values, **change}))
  with pytest.raises(errors.UserError, match=message):
    ss.load(tmp_path)


@pytest.mark.peers
@pytest.mark.parametrize('family', ['llama', 'qwen2'])
@pytest.mark.parametrize('tower', image_cases.TOWERS)
def test_equals_transformers_live(tower, family, tmp_path):
  record_images = pytest.importorskip('golden.record_images')
  seeds, parts = (3, 4, 3), (None, 'Why ', None, ' and ', None, '?')
  image_cases.write(tmp_path, tower, seed=5, family=family)
  request = request_of(*parts, seeds=seeds)
  normed = [record_images.normed(image_cases.pixels(seed)) for seed in seeds]
  _, _, token_ids = record_images.run_peer(tmp_path, request.token_ids, normed)
  engine = engine_of(ss.load(tmp_path), LOOKUP, FixedLength(3), max_images=3)
  [found] = tokens_of(engine, [request])
  assert list(found) == token_ids


@pytest.mark.peers
@pytest.mark.parametrize('tower', image_cases.TOWERS)
def test_what_transformers_saves_is_read(tower, tmp_path):
  record_images = pytest.importorskip('golden.record_images')
  image_cases.write(tmp_path, tower)
  record_images.save_random(tmp_path)
  request = golden_request()
  normed = [
    record_images.normed(image_cases.pixels(seed)) for seed in image_cases.SEEDS
  ]
  _, _, token_ids = record_images.run_peer(tmp_path, request.token_ids, normed)
  [found] = tokens_of(engine_of(ss.load(tmp_path)), [request])
  assert list(found) == token_ids


@pytest.mark.peers
@pytest.mark.parametrize('shape', [(40, 90), (90, 41), (20, 20), (300, 200)])
@pytest.mark.parametrize('tower', image_cases.TOWERS)
def test_pixels_are_those_of_transformers(tower, shape, tmp_path):
  record_images = pytest.importorskip('golden.record_images')
  image_cases.write(tmp_path, tower)
  raw = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
  file = io.BytesIO()
  PIL.Image.fromarray(raw).save(file, 'png')
  found = images.read(file.getvalue(), ss.load(tmp_path).config.vision)
  np.testing.assert_allclose(
    record_images.normed(found.pixels),
    record_images.preprocessed(tmp_path, tower, raw),
    atol=1e-5,
  )
