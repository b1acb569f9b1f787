"""Targets that read images, and drafts that read text alone."""

import dataclasses
import json
import pathlib

import engine_cases
import image_cases
import jax
import numpy as np
import pytest
from engine_cases import CHAINS, TREES, RandomLengths, make_sizes

import swiftspec_jax as ss
from swiftspec_jax import errors, images, testing
from swiftspec_jax.models import vision
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.serving.drafters import engine_drafter, make_drafter
from swiftspec_jax.serving.drafters.models.draft_tree import TreeDraft
from swiftspec_jax.serving.drafters.models.living_trees import LivingTrees
from swiftspec_jax.serving.drafters.models.self_draft import SelfDraft
from swiftspec_jax.serving.drafters.texts.datastore import Datastore
from swiftspec_jax.serving.engine import PageEngine

GOLDEN = json.loads(
  pathlib.Path(__file__).with_name('golden').joinpath('images.json').read_text()
)
LOOKUP = ss.PromptLookup(prompt_lookup_min=1)


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


def engine_of(target, draft=None, policy=None, **options):
  drafts = TREES if make_drafter.makes_trees(draft) else CHAINS
  sizes = make_sizes(drafts=drafts, **options)
  sizes = dataclasses.replace(sizes, max_images=2)
  return PageEngine(target, draft, sizes=sizes, policy=policy)


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
  handles = [engine.submit(request) for request in requests]
  return [handle.result().token_ids for handle in handles]


@pytest.mark.parametrize('tower', image_cases.TOWERS)
def test_embeddings_are_those_of_transformers(models, tower):
  model = models[tower]
  found = jax.jit(vision.embed, static_argnums=1)(
    model.params['vision'], model.config.vision, image_cases.pixels(1)
  )
  assert found.shape == (9, 32)
  np.testing.assert_allclose(
    found[::4, ::5], GOLDEN[tower]['embeddings'], atol=1e-5
  )


@pytest.mark.parametrize('tower', image_cases.TOWERS)
def test_output_is_that_of_transformers(models, tower):
  engine = engine_of(models[tower], LOOKUP, FixedLength(3))
  [found] = tokens_of(engine, [golden_request()])
  assert list(found) == GOLDEN[tower]['token_ids']


def drafts_of(models):
  return {
    'lookup': LOOKUP,
    'datastore': Datastore(min_prob=0),
    'chain': models['text'],
    'tree': TreeDraft(
      model=models['text'], width=3, branching=3, suffix_lookup=True
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
    sampling = engine_cases.random_sampling(generator)
    request = request_of(*parts, seeds=seeds.tolist())
    requests.append(dataclasses.replace(request, sampling=sampling))
  return requests


@pytest.fixture(scope='module')
def plain_outputs(models):
  """Requests, and what each gets alone and without drafts."""
  requests, outputs = random_requests(24, 0), []
  engine = engine_of(models['clip'])
  for request in requests:
    outputs += tokens_of(engine, [request])
  return requests, outputs


@pytest.mark.parametrize(
  'name', ['lookup', 'datastore', 'chain', 'tree', 'self']
)
def test_drafts_change_no_output(models, plain_outputs, name):
  requests, outputs = plain_outputs
  draft = drafts_of(models)[name]
  engine = engine_of(models['clip'], draft, RandomLengths(), num_pages=28)
  assert tokens_of(engine, requests) == outputs
  assert engine.num_preemptions
  assert engine.scheduler.num_shared_tokens
  engine_cases.assert_empty(engine, 28)


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
    ([None, None, ' two of them, one behind the other'], (1, 2)),
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
  """Its drafts are what it writes by itself behind the text alone."""
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
  """The same, but its law depends on the last token alone."""
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
  with pytest.raises(errors.UserError, match='LivingTrees cannot leave out'):
    engine_of(
      models['clip'], LivingTrees(model=models['text'], tree=ss.TreeConfig())
    )
