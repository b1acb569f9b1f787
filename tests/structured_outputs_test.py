"""Outputs that follow grammars, with drafts and without."""

import collections
import dataclasses
import json
import pathlib

import engine_cases
import jsonschema
import numpy as np
import pytest
import tree_cases
from decoding_cases import CONFIG, assert_same, run, tokenizer_of
from engine_cases import TARGET, RandomLengths
from load_cases import serve

import swiftspec_jax as ss
from experiments.flags import run_flags
from swiftspec_jax import testing
from swiftspec_jax.requests import grammar
from swiftspec_jax.runtime import profiling
from swiftspec_jax.testing.byte_tokenizer import EOS
from swiftspec_jax.tokenizer import encode_prompt

SCHEMAS = json.loads(
  (pathlib.Path(__file__).parent / 'schemas.json').read_text()
)
RECORDS = run_flags.DEFAULT_PROMPTS.with_name('records.jsonl')
RECORD = ss.StructuredOutputs(json=SCHEMAS[1])
KINDS = (
  RECORD,
  ss.StructuredOutputs(json=SCHEMAS[15]),
  ss.StructuredOutputs(json_object=True),
  ss.StructuredOutputs(regex='(ab|ba)+c{0,9}'),
  ss.StructuredOutputs(choice=('on', 'off', 'one')),
  ss.StructuredOutputs(grammar='start: "x" start "y" | "z"'),
)
ENDING = testing.random_model(
  dataclasses.replace(CONFIG, eos_token_ids=(EOS,)), name='ending'
)
DRAFTS = {**engine_cases.DRAFTS, 'grammar': ss.GrammarDraft()}


def request_of(wanted, prompt=b'{"', **sampling):
  sampling = {'max_new_tokens': 300, **sampling}
  return ss.Request(
    token_ids=tuple(prompt),
    sampling=ss.SamplingParams(structured_outputs=wanted, **sampling),
  )


def decode(wanted, draft=None, model=TARGET, **sampling):
  """The result of one request."""
  length = {'num_speculative_tokens': 8} if draft == ss.GrammarDraft() else {}
  decoder = ss.Decoder(model, draft, **length)
  return run(decoder, [request_of(wanted, **sampling)])[0]


def test_outputs_are_valid_and_those_of_plain_decoding():
  """Two seeds of thirty schemas, drawn by a model that knows no JSON."""
  requests = [
    request_of(ss.StructuredOutputs(json=schema), seed=seed, temperature=1.0)
    for schema in SCHEMAS
    for seed in range(2)
  ]
  decoder = ss.Decoder(
    TARGET, ss.GrammarDraft(), num_speculative_tokens=7, batch_size=8
  )
  results = run(decoder, requests)
  assert_same(results, run(ss.Decoder(TARGET, batch_size=8), requests))
  assert {result.finish_reason for result in results} == {'stop'}
  for schema, result in zip(np.repeat(SCHEMAS, 2), results, strict=True):
    jsonschema.validate(json.loads(result.text), schema)


def mixed_requests(count=16):
  """Every other request has a grammar, every other one of these is greedy."""
  generator = np.random.default_rng(0)
  plain = engine_cases.random_requests(count, seed=1, longest_prompt=40)
  for i in range(0, count, 2):
    plain[i] = request_of(
      KINDS[i // 2 % len(KINDS)],
      generator.integers(0, 256, generator.integers(1, 40)).tolist(),
      temperature=float(i % 4 > 0),
      seed=i,
      max_new_tokens=60,
    )
  return plain


@pytest.fixture(scope='module')
def mixed():
  requests = mixed_requests()
  return requests, run(ss.Decoder(TARGET, batch_size=4), requests)


@pytest.mark.parametrize(
  'name', ['lookup', 'datastore', 'itself', 'bad_tree', 'grammar']
)
def test_a_load_of_all_kinds_says_the_same_with_drafts(name, mixed):
  """Slots and pages are few, drafts have random lengths, some are cancelled."""
  requests, want = mixed
  policy = RandomLengths()
  engine = engine_cases.make_engine(
    DRAFTS[name], policy, chains=engine_cases.FEW
  )
  got = serve(engine, requests, seed=0)
  for one, other in zip(got, want, strict=True):
    count = len(one.token_ids)
    assert one.token_ids == other.token_ids[:count]
    if one.finish_reason != 'cancelled':
      assert (one.finish_reason, one.text) == (other.finish_reason, other.text)
  assert sum(one.finish_reason == 'cancelled' for one in got) < 4
  engine_cases.assert_empty(engine)


@pytest.mark.parametrize(
  ('kind', 'run_ahead'), [('lookup', 2), ('serial', 0), ('async', 2)]
)
def test_rounds_in_flight_say_the_same(kind, run_ahead):
  if kind == 'lookup':
    target, draft, options = TARGET, ss.PromptLookup(prompt_lookup_min=1), {}
  else:
    target, draft = tree_cases.pair(*tree_cases.DEVICES[kind])
    options = {'tree': tree_cases.TREE}
  requests = mixed_requests(8)
  want = run(ss.Decoder(target, batch_size=4), requests)
  decoder = ss.Decoder(
    target, draft, batch_size=4, run_ahead=run_ahead, **options
  )
  assert_same(run(decoder, requests), want)


def letters_model(table, num_tokens):
  """A table whose tokens llguidance reads, the last one ending outputs."""
  model = testing.table_model(table, eos_token_ids=[num_tokens - 1])
  tokenizer = tokenizer_of('abcdefghij'[:num_tokens])
  return dataclasses.replace(model, tokenizer=tokenizer)


@pytest.mark.parametrize('draft', [None, ss.GrammarDraft()])
def test_the_distribution_is_restricted_and_renormalized(draft):
  """P(ab) of a(b|c)d? is b / (b + c), and d follows with d / (d + end)."""
  table = np.random.default_rng(0).dirichlet(np.ones(5), 5)
  a, b, c, d, end = range(5)
  model = letters_model(table, 5)
  share = {x: table[a, x] / (table[a, b] + table[a, c]) for x in (b, c)}
  want = {}
  for x, letter in ((b, 'ab'), (c, 'ac')):
    of_d = table[x, d] / (table[x, d] + table[x, end])
    want |= {f'{letter}d': share[x] * of_d, letter: share[x] * (1 - of_d)}
  wanted = ss.StructuredOutputs(regex='a(b|c)d?')
  requests = [
    request_of(wanted, [0], temperature=1.0, seed=seed) for seed in range(2000)
  ]
  length = {} if draft is None else {'num_speculative_tokens': 3}
  results = run(ss.Decoder(model, draft, batch_size=16, **length), requests)
  counts = collections.Counter(result.text for result in results)
  assert counts.keys() == want.keys()
  expected = np.array([want[text] for text in counts]) * 2000
  observed = np.array(list(counts.values()))
  assert ((observed - expected) ** 2 / expected).sum() < 16.3  # 0.1 % of 3


def test_an_output_ends_where_nothing_may_follow():
  result = decode(ss.StructuredOutputs(choice=('on',)))
  assert (result.text, result.token_ids) == ('on', tuple(b'on'))
  assert (result.finish_reason, result.stop_reason) == ('stop', None)


def test_end_tokens_come_where_the_grammar_accepts():
  result = decode(
    ss.StructuredOutputs(regex='(ab)*'), temperature=1.0, logit_bias={EOS: 100}
  )
  assert (result.text, result.token_ids) == ('', (EOS,))
  wanted = ss.StructuredOutputs(regex='(ab){2}a*')
  ending = {'model': ENDING, 'logit_bias': {EOS: 100}}
  assert decode(wanted, **ending).text == 'abab'
  assert decode(wanted, **ending, min_tokens=6).text == 'ababaa'
  # It wins over min_tokens.
  wanted = ss.StructuredOutputs(regex='(ab){2}')
  assert decode(wanted, min_tokens=200).text == 'abab'


@pytest.mark.parametrize('draft', [None, ss.GrammarDraft()])
def test_what_is_adjusted_is_what_the_grammar_leaves(draft):
  wanted = ss.StructuredOutputs(regex='[a-c]{9}')
  bias = {ord('b'): 100, ord('x'): 100}
  told = {'logprobs': True, 'top_logprobs': 4}
  result = decode(wanted, draft, logit_bias=bias, **told)
  assert result.text == 'b' * 9
  # Under the model's distribution over a, b and c.
  for top in result.top_logprobs:
    assert {token_id for token_id, _ in top[:3]} == set(b'abc')
    assert np.exp([value for _, value in top]).sum() == pytest.approx(1)
  penalized = decode(wanted, draft, presence_penalty=2.0, temperature=0.3)
  assert len(set(penalized.text)) == 3
  cut = {'temperature': 1.5, 'top_k': 2, 'top_p': 0.9, 'min_p': 0.01}
  texts = [decode(wanted, draft, **cut, seed=seed).text for seed in range(3)]
  assert all(len(text) == 9 and set(text) <= set('abc') for text in texts)


def test_a_stop_string_ends_an_output_early():
  result = decode(RECORD, ss.GrammarDraft(), stop=(',',))
  assert result.stop_reason == ','
  assert result.text in ('{"is_active": true', '{"is_active": false')


def test_forced_tokens_are_drafts_that_are_right():
  decoder = ss.Decoder(TARGET, ss.GrammarDraft(), num_speculative_tokens=20)
  result = run(decoder, [request_of(RECORD)])[0]
  assert result.stats.num_rounds <= 6
  with_chains = decode(RECORD, ss.PromptLookup())
  assert with_chains.text == result.text
  assert with_chains.stats.acceptance_length > 4


def test_choices_become_branches():
  matcher = grammar.start(RECORD, TARGET)
  vocabulary = grammar.vocabulary_of(TARGET)
  draft = grammar.draft(matcher, [], [], 64, vocabulary=vocabulary)
  texts = ['']
  for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
    texts.append(texts[parent + 1] + chr(token_id))
  assert '{"is_active": true, "account_type": "' in texts
  assert '{"is_active": false, "account_type": "' in texts
  # A chain of a drafter stays one, and what is forbidden is not in it.
  tokens = list(b'{"is_active": trUe')
  chain = grammar.draft(matcher, tokens, range(-1, len(tokens) - 1), 60)
  assert (
    bytes(chain.token_ids) == b'{"is_active": tr' + b'ue, "account_type": "'
  )
  assert chain.parents == list(range(-1, len(chain.token_ids) - 1))


@pytest.mark.parametrize(
  ('wanted', 'message'),
  [
    ({}, 'exactly one of .*got none'),
    ({'regex': 'a', 'choice': ('b',)}, 'got regex and choice'),
    ({'choice': ('a', '')}, 'empty text'),
    ({'json': '{'}, 'json: Expecting'),
    ({'json': '[]'}, 'a schema is an object'),
    ({'json': {'type': 'strin'}}, 'json, at its top: Invalid type'),
    (
      {'json': {'properties': {'a': {'items': {'minimum': 'x'}}}}},
      'at /properties/a/items: ',
    ),
    (
      {
        'json': {
          'anyOf': [{}, {'$ref': '#/$defs/b'}],
          '$defs': {'b': {'if': 1}},
        }
      },
      'at /\\$defs/b: Unimplemented keys: ..if',
    ),
    ({'regex': '([a'}, 'regex: .*unclosed character class'),
    ({'grammar': 'start: "a" b'}, 'grammar: .*unknown name: "b"'),
    ({'grammar': 'root ::= "a" b'}, 'grammar: .*not found'),
    ({'regex': 'a' * 2**18}, 'has 262144 characters; the most is'),
  ],
)
def test_wrong_grammars_are_refused_with_their_place(wanted, message):
  with pytest.raises(ss.UserError, match=f'(?s){message}'):
    run(ss.Decoder(TARGET), [request_of(ss.StructuredOutputs(**wanted))])


def test_what_a_grammar_may_forbid_is_not_asked_for():
  for options in (
    {'banned_token_ids': (1,)},
    {'forced_token_ids': (1,)},
    {'logit_bias': {1: -np.inf}},
  ):
    with pytest.raises(ss.UserError, match='with structured_outputs'):
      ss.SamplingParams(structured_outputs=RECORD, **options)


def test_a_schema_that_explodes_is_refused_soon():
  parts = [
    {'anyOf': [{'properties': {f'{i}_{j}': {'enum': [i]}}} for j in range(6)]}
    for i in range(12)
  ]
  with pytest.raises(ss.UserError, match='too large'):
    grammar.start(ss.StructuredOutputs(json={'allOf': parts}), TARGET)


def test_what_becomes_too_complex_ends_in_an_error():
  options = {f'{i}': {'const': i} for i in range(600)}
  options = {'type': 'object', 'properties': options}
  schema = {'properties': {'a': options}, 'required': ['a']}
  wanted = ss.StructuredOutputs(json={'type': 'object', **schema})
  results = [decode(wanted, draft) for draft in (None, ss.GrammarDraft())]
  assert {result.finish_reason for result in results} == {'error'}
  assert {result.text for result in results} == {'{"a": {'}


def test_a_model_needs_a_token_that_ends_outputs():
  model = testing.table_model(np.full((3, 3), 1 / 3))
  with pytest.raises(ss.UserError, match='table has none'):
    grammar.start(RECORD, model)


def test_nothing_is_compiled_after_warm_up():
  request = request_of(RECORD, temperature=1.0, max_new_tokens=30)
  decoder = ss.Decoder(TARGET, ss.GrammarDraft())
  decoder.warmup(300, request.sampling)
  engine = engine_cases.make_engine(ss.GrammarDraft(), RandomLengths())
  engine.programs.compile_all(has_grammar=True)
  with profiling.count_compilations() as compilations:
    run(decoder, [request])
    serve(engine, mixed_requests(4), seed=0)
  assert compilations.count == 0


def test_a_step_with_a_grammar_is_read_before_the_next():
  engine = engine_cases.make_engine(run_ahead=2)
  handle = engine.submit(request_of(KINDS[3], max_new_tokens=20))
  records = [engine.step() for _ in range(5)]
  assert [record.has_grammar for record in records] == [True] * 5
  assert handle.num_updates == 5


@pytest.mark.ci
def test_a_real_model_writes_records_three_tokens_a_round():
  target = ss.load('smollm2-135m-instruct')
  requests, schemas = [], []
  for line in RECORDS.read_text().splitlines()[:3]:
    values = json.loads(line)
    schemas.append(values['schema'])
    sampling = ss.SamplingParams(
      structured_outputs=ss.StructuredOutputs(json=values['schema'])
    )
    token_ids = encode_prompt(target.tokenizer, values['turns'][0])
    requests.append(ss.Request(token_ids=tuple(token_ids), sampling=sampling))
  drafted = ss.Decoder(target, ss.GrammarDraft(), num_speculative_tokens=15)
  results = run(drafted, requests)
  assert_same(results, run(ss.Decoder(target), requests))
  for schema, result in zip(schemas, results, strict=True):
    jsonschema.validate(json.loads(result.text), schema)
  assert np.mean([r.stats.acceptance_length for r in results]) > 3
