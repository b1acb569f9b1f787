import dataclasses
import functools
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distillation_cases import CONFIG, NUM_STORED
from safetensors import numpy as safetensors_numpy
from scipy import special

from swiftspec_jax import errors, testing
from swiftspec_jax.config.architecture import IRope
from swiftspec_jax.distillation import samples, shards
from swiftspec_jax.distillation.writing import (
  chat_format,
  documents,
  generation,
  rollout,
  scripts,
  top_tokens,
)
from swiftspec_jax.models import decoder
from swiftspec_jax.models.cache import dense

PREFIX_LENGTHS = (5, 64, 33)
FEATURE_LAYERS = (1, 0)


WITH_CHUNKS = {
  'sliding_window': 12,
  'irope': IRope(nope_layers=(1,), floor_scale=9),
  'use_sinks': True,
}


@pytest.fixture(
  scope='module', params=[{}, WITH_CHUNKS], ids=['full', 'chunks']
)
def target(request):
  config = dataclasses.replace(CONFIG, num_layers=2, **request.param)
  return testing.random_model(config, name='tiny')


@pytest.fixture(scope='module')
def rolled(target):
  """Three prefixes with two rows each; rows repeat two kinds of branches."""
  rng = np.random.default_rng(0)
  token_ids = rng.integers(0, 256, (3, 64)).astype(np.int32)
  ops = [7, 8, 9, -1, 10, -1, 20, -1]
  is_first = [True] + [False] * 5 + [True, False]
  temperatures = [0, 0, 0, 1, 0, 0, 0, 0]
  limits = [0, 0, 0, 6, 0, 20, 0, 30]
  script = rollout.Script(
    ops=np.tile(np.array(ops * 8, np.int32), (6, 1)),
    begins_branch=np.tile(np.array(is_first * 8), (6, 1)),
    temperatures=np.tile(np.array(temperatures * 8, np.float32), (6, 1)),
    limits=np.tile(np.array(limits * 8, np.int32), (6, 1)),
    stop_token_ids=np.array([257], np.int32),
  )
  lengths = np.array(PREFIX_LENGTHS, np.int32)
  stored = {'num_stored': NUM_STORED, 'feature_layers': FEATURE_LAYERS}
  prefix, top, features = rollout.prefill(target, token_ids, lengths, **stored)
  written = rollout.roll_out(
    target, prefix, script, num_steps=256, key=jax.random.key(0), **stored
  )
  return token_ids, top, features, written, ops


@functools.partial(jax.jit, static_argnames='config')
def _forward(params, token_ids, cache, *, config):
  hidden, features, _ = decoder.forward_with_features(
    params,
    config,
    token_ids,
    cache,
    starts=jnp.zeros(1, jnp.int32),
    feature_layers=FEATURE_LAYERS,
  )
  logits = decoder.unembed(params, config, hidden)
  return jax.nn.log_softmax(logits[0], axis=-1), features[0]


def _expected(target, token_ids):
  """Log-probabilities and features of a plain forward."""
  cache = dense.init(target.config, 1, 512, target.dtype, target.mesh)
  padded = np.zeros((1, 512), np.int32)
  padded[0, : len(token_ids)] = token_ids
  found = _forward(target.params, padded, cache, config=target.config)
  return [np.asarray(x)[: len(token_ids)] for x in found]


def test_probs_and_features_are_those_of_a_plain_forward(target, rolled):
  token_ids, top, features, written, ops = rolled
  for row in (0, 3, 5):
    prefix = token_ids[row // 2][: PREFIX_LENGTHS[row // 2]]
    # The second branch of the row, from op 6 on, stands after the prefix.
    places = np.flatnonzero(written.op_index[row] // len(ops) == 0)
    branch = places[written.op_index[row, places] >= 6]
    text = written.token_ids[row, branch]
    expected, outputs = _expected(target, np.concatenate([prefix, text]))
    size = len(prefix)
    for got, stored, place, part in (
      (top, features, (row // 2, slice(size)), slice(size)),
      (written.top, written.features, (row, branch), slice(size, None)),
    ):
      np.testing.assert_allclose(stored[place], outputs[part], atol=5e-3)
      want = expected[part]
      best = np.sort(want, axis=-1)[:, ::-1][:, :NUM_STORED]
      np.testing.assert_allclose(got.log_probs[place], best, atol=1e-4)
      of_ids = np.take_along_axis(want, got.token_ids[place], axis=1)
      np.testing.assert_allclose(of_ids, best, atol=1e-4)


def test_rows_follow_their_script(rolled):
  *_, written, ops = rolled
  for row in range(6):
    ids, index = written.token_ids[row], written.op_index[row]
    assert index[0] == 0
    assert set(np.diff(index)) <= {0, 1}
    op = np.array(ops)[index % len(ops)]
    np.testing.assert_array_equal(ids[op >= 0], op[op >= 0])
    for number, limit in ((3, 6), (5, 20), (7, 30)):
      size = int((index == number).sum())
      stopped = 257 in ids[index == number]
      assert size == limit or (stopped and size < limit)


def test_greedy_passages_take_the_best_token(rolled):
  *_, written, ops = rolled
  is_greedy = np.isin(written.op_index[:, 1:] % len(ops), (5, 7))
  best = written.top.token_ids[:, :-1, 0]
  np.testing.assert_array_equal(
    written.token_ids[:, 1:][is_greedy], best[is_greedy]
  )


largest = jax.jit(top_tokens.largest, static_argnums=1)


def test_draws_follow_the_distribution():
  num_rows, size = 40_000, 300
  rng = np.random.default_rng(2)
  row = rng.normal(size=size).astype(np.float32)
  logits = np.tile(row, (num_rows, 1))
  temperatures = np.full(num_rows, 0.5, np.float32)
  uniform = rng.random((2, num_rows), np.float32)
  drawn = jax.jit(top_tokens.draw)(
    logits, largest(logits, 4), temperatures, uniform
  )
  expected = special.softmax(row / 0.5)
  frequencies = np.bincount(drawn, minlength=size) / num_rows
  assert abs(frequencies - expected).sum() / 2 < 0.05


@pytest.fixture(scope='module')
def plain_target():
  return testing.random_model(CONFIG, name='tiny')


def test_chat_format(plain_target):
  form = chat_format.chat_format(plain_target.tokenizer)
  assert form.opening == (256, 260)
  assert form.closing == (257, 261)
  assert form.between == (257, 260)


@pytest.mark.parametrize(
  ('text', 'start'),
  [
    (list(range(200)), None),
    ([9, 8, 7] + [1, 2] * 60, 3 + 4),
    ([5] * 100, 2),
    ([5] * 20, None),
  ],
)
def test_loops_are_found(text, start):
  assert samples.loop_start(np.array(text)) == start


@pytest.fixture
def planner(plain_target, tmp_path):
  text = '\n'.join(
    f'Line {i} of the manual says that part {i * i} is {"good" * (i % 3)}.'
    for i in range(400)
  )
  (tmp_path / 'manual.txt').write_text(text)
  files = documents.find_files([str(tmp_path / '*.txt')])
  sizes = {'seed': 0, 'num_steps': generation.NUM_STEPS}
  prompts = ['Who are you?', 'What is this?']
  library = documents.Library(files)
  return scripts.Planner(
    plain_target.tokenizer, library, own_prompts=prompts, **sizes
  )


def test_generation_goes_on_where_it_stopped(plain_target, planner, tmp_path):
  def generate(directory, count):
    found = generation.generate_shards(
      plain_target, planner, directory, seed=0, num_stored=NUM_STORED
    )
    return [samples.answer_tokens(next(found)) for _ in range(count)]

  directory = tmp_path / 'data'
  first = generate(directory, 1)
  assert first[0].keys() == {'own'}
  path = shards.shard_path(directory, 0)
  content = safetensors_numpy.load_file(path)
  assert generate(directory, 1) == first
  path.unlink()
  assert generate(directory, 1) == first
  for name, array in safetensors_numpy.load_file(path).items():
    np.testing.assert_array_equal(array, content[name], err_msg=name)
  path.write_bytes(path.read_bytes()[:-100])
  with pytest.raises(errors.UserError, match='cut short'):
    generate(directory, 1)


def test_a_shard_that_cannot_be_written(tmp_path):
  path = shards.shard_path(tmp_path / 'missing', 0)
  with pytest.raises(errors.UserError, match='cannot write'):
    shards.write_shard(path, [], {'vocab_size': 10})


def test_functions_of_sources_are_documents(tmp_path):
  body = ''.join(f'    step_{i} = {i}\n' for i in range(11))
  method = f'  def long(self):\n{body}    return "é"\n'
  path = tmp_path / 'module.py'
  path.write_text(f'class Part:\n\n{method}  other = 1\n', encoding='utf-8')
  (text,) = documents.read_texts(path)
  assert text == f'```python\n{textwrap.dedent(method)}```'
