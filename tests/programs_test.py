"""Which programs are compiled when, and which one a step takes."""

import dataclasses
import json

import engine_cases
import pytest
import server_cases
from decoding_cases import assert_same, sizes_of
from engine_cases import DRAFTS, RandomLengths, assert_empty, results_of
from engine_test import plain_load

import swiftspec_jax as ss
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.runtime import profiling

pytestmark = pytest.mark.usefixtures('no_programs')


def make_engine(draft=None):
  chains = {'rows': (1, 4), 'lengths': (0, 3)}
  return engine_cases.make_engine(draft, RandomLengths(), chains)


def start_first(engine):
  """Compiles what every step fits into, and nothing else."""
  engine.programs.stop()
  engine.programs.start()
  assert engine.programs.join(60)


def check(engine, requests, plain):
  assert_same(results_of(engine, requests), plain)
  assert_empty(engine)


def num_drafted(engine):
  return sum(outcome.lengths.sum() for outcome in engine.policy.outcomes)


@pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnhandledThreadExceptionWarning'
)
def test_a_failed_compilation_is_no_silence():
  service = server_cases.make_service(rows=(1, server_cases.NUM_ROWS))
  engine, programs = service.engine, service.engine.programs
  compile_fn = programs._compile

  def compile_first(program, levels):
    if programs.num_compiled >= programs._num_first:
      raise RuntimeError('out of memory')
    compile_fn(program, levels)

  programs._compile = compile_first
  programs.start()
  assert programs.join(60)
  with server_cases.serving(service) as address:
    status, answer = server_cases.fetch(f'{address}/health')
  assert status == 503
  assert 'out of memory' in server_cases.error_of(answer)['message']
  engine.submit(ss.Request(token_ids=(0,)))
  with pytest.raises(RuntimeError, match='out of memory'):
    engine.step()


@pytest.mark.parametrize('draft', ['lookup', 'bad_draft'])
def test_steps_fit_into_what_is_compiled(draft):
  """Nothing is compiled for them, and nothing is drafted."""
  engine = make_engine(DRAFTS[draft])
  start_first(engine)
  requests, plain = plain_load(8, seed=0)
  with profiling.count_compilations() as compilations:
    check(engine, requests, plain)
  assert compilations.count == 0
  assert engine.programs.is_warming_up
  assert num_drafted(engine) == 0


@pytest.mark.parametrize('draft', ['lookup', 'bad_draft'])
def test_requests_are_served_while_programs_are_compiled(draft):
  engine = make_engine(DRAFTS[draft])
  # What plain decoding needs is compiled here.
  requests, plain = plain_load(8, seed=0)
  programs = engine.programs
  programs.start()
  num_checked = 0
  while not programs.join(0):
    pair = slice(num_checked % 8, num_checked % 8 + 2)
    check(engine, requests[pair], plain[pair])
    num_checked += 2
  assert num_checked
  assert not programs.is_warming_up
  assert programs.num_compiled == programs.num_programs
  with profiling.count_compilations() as compilations:
    check(engine, requests, plain)
  assert compilations.count == 0
  assert num_drafted(engine) > 0


def test_an_end_amid_the_compilation():
  engine = engine_cases.make_engine()
  engine.programs.start()
  engine.programs.stop()
  assert engine.programs.join(60)
  assert engine.programs.num_compiled < engine.programs.num_programs


def make_sizes(rows, query_tokens, max_context):
  return sizes_of(40, max_context, 4, (), rows=rows, query_tokens=query_tokens)


@pytest.mark.parametrize(
  ('rows', 'query_tokens', 'max_context'),
  [((1, 4), (4, 8), 400), ((3, 4), (4,), 400), ((1,), (1,), 20)],
)
def test_every_step_fits_into_the_first_programs(
  rows, query_tokens, max_context
):
  sizes = make_sizes(rows, query_tokens, max_context)
  engine = Engine(server_cases.MODEL, sizes=sizes)
  start_first(engine)
  for flat in (*sizes.all_plain(), *sizes.all_mixed()):
    found = engine.programs.fit(flat)
    for field in dataclasses.fields(flat):
      assert getattr(found, field.name) >= getattr(flat, field.name)


def test_a_step_that_fills_no_program_is_compiled():
  """No row has the 32 tokens that a prompt of 18 is padded to."""
  sizes = make_sizes((1,), (8, 16, 32, 64), 20)
  assert {flat.num_tokens for flat in sizes.all_mixed()} == {8, 16, 32}
  engine = Engine(server_cases.MODEL, sizes=sizes)
  engine.programs.compile_all()
  with profiling.count_compilations() as compilations:
    engine.submit(ss.Request(token_ids=(0,) * 18)).result()
  assert compilations.count == 0


def test_a_server_that_warms_up():
  service = server_cases.make_service(rows=(1, server_cases.NUM_ROWS))
  start_first(service.engine)
  with (
    server_cases.serving(service) as address,
    server_cases.client_of(address) as client,
  ):
    status, answer = server_cases.fetch(f'{address}/health')
    assert status == 200
    assert json.loads(answer) == {
      'status': 'warming up',
      'num_programs': service.engine.programs.num_programs,
      'num_compiled_programs': 2,
    }
    _, metrics = server_cases.fetch(f'{address}/metrics')
    assert 'num_compiled_programs{model_name="letters"} 2.0' in metrics
    answer = server_cases.complete(client, 'aegc', temperature=0, max_tokens=9)
  (expected,) = ss.generate(
    server_cases.MODEL, ['aegc'], max_new_tokens=9, use_chat_template=False
  )
  assert answer.choices[0].text == expected.text
