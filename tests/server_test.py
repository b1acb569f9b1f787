"""The HTTP server, as OpenAI's own client sees it."""

import json

import hypothesis
import numpy as np
import openai
import programs
import pytest
import schemathesis
import server_cases
from schemathesis.specs.openapi import checks
from server_cases import (
  MODEL,
  NAME,
  client_of,
  collect,
  complete,
  error_of,
  fetch,
  make_service,
  serving,
)

import swiftspec_jax as ss


@pytest.fixture(scope='module')
def service():
  return make_service()


@pytest.fixture(scope='module')
def address(service):
  service.engine.programs.compile_all()
  with serving(service) as address:
    yield address


@pytest.fixture(scope='module')
def client(address):
  with client_of(address) as client:
    yield client


def alone(prompt, count=1, **sampling):
  """What plain decoding says, for seeds from the given one on."""
  seed = sampling.pop('seed', 0)
  options = [ss.SamplingParams(seed=seed + i, **sampling) for i in range(count)]
  return ss.generate(
    MODEL, [prompt] * count, sampling=options, use_chat_template=False
  )


@pytest.mark.parametrize('temperature', [0, 1])
def test_completions_equal_plain_decoding(client, temperature):
  options = {'temperature': temperature, 'seed': 5}
  answer = complete(client, 'aegc', max_tokens=40, n=3, **options)
  results = alone('aegc', 3, max_new_tokens=40, **options)
  assert [c.text for c in answer.choices] == [r.text for r in results]
  assert [c.index for c in answer.choices] == [0, 1, 2]
  reasons = [c.finish_reason for c in answer.choices]
  assert reasons == [r.finish_reason for r in results]
  assert answer.usage.prompt_tokens == 4
  num_tokens = sum(r.stats.new_tokens for r in results)
  assert answer.usage.completion_tokens == num_tokens
  assert answer.usage.total_tokens == 4 + num_tokens
  assert answer.object == 'text_completion'
  assert (answer.choices[0].text == answer.choices[1].text) == (not temperature)
  options |= {'stream': True, 'stream_options': {'include_usage': True}}
  stream = complete(client, 'aegc', max_tokens=40, n=3, **options)
  texts, ends, _, usage = collect(stream)
  assert [texts[i] for i in range(3)] == [r.text for r in results]
  assert [ends[i] for i in range(3)] == reasons
  assert usage == answer.usage


def test_prompts_of_all_kinds(client):
  prompts = ['abc', 'dd']
  expected = [alone(prompt, max_new_tokens=16)[0].text for prompt in prompts]
  for given in (prompts, [[0, 1, 2], [3, 3]]):
    answer = complete(client, given, temperature=0, n=2)
    texts = [choice.text for choice in answer.choices]
    assert texts == [text for text in expected for _ in range(2)]
    assert answer.usage.prompt_tokens == 5
  answer = complete(client, [3, 3], temperature=0)
  assert answer.choices[0].text == expected[1]


def test_chat(client):
  messages = [
    {'role': 'system', 'content': 'abc'},
    {'role': 'user', 'content': [{'type': 'text', 'text': 'dd'}]},
  ]
  told = {'logprobs': True, 'top_logprobs': 3, 'presence_penalty': 0.5}
  options = {'model': NAME, 'messages': messages, 'seed': 3, 'n': 2, **told}
  options['max_completion_tokens'] = 30
  answer = client.chat.completions.create(**options)
  told |= {'seed': 3, 'temperature': 1.0}
  results = alone('abcdd', 2, max_new_tokens=30, **told)
  for choice, result in zip(answer.choices, results, strict=True):
    assert choice.message.content == result.text
    assert choice.message.role == 'assistant'
    assert choice.finish_reason == result.finish_reason
    tokens = choice.logprobs.content
    assert [t.token for t in tokens] == list(
      map(MODEL.tokenizer.decode, [[i] for i in result.token_ids])
    )
    assert [t.logprob for t in tokens] == pytest.approx(result.logprobs)
    assert all(bytes(t.bytes).decode() == t.token for t in tokens)
    for token, top in zip(tokens, result.top_logprobs, strict=True):
      names = [MODEL.tokenizer.decode([i]) for i, _ in top]
      assert [t.token for t in token.top_logprobs] == names
  stream = list(client.chat.completions.create(**options, stream=True))
  assert stream[0].choices[0].delta.role == 'assistant'
  texts, ends, logprobs, usage = collect(stream)
  for choice in answer.choices:
    assert texts[choice.index] == choice.message.content
    assert ends[choice.index] == choice.finish_reason
    tokens = [t.token for t in choice.logprobs.content]
    assert logprobs[choice.index] == tokens
  assert usage is None
  # What was said can be sent back as it came.
  again = [answer.choices[0].message, {'role': 'user', 'content': 'a'}]
  client.chat.completions.create(model=NAME, messages=again, max_tokens=2)


def test_logprobs_of_completions(client):
  answer = complete(client, 'ab', logprobs=2, temperature=0, max_tokens=5)
  (result,) = alone('ab', max_new_tokens=5, logprobs=True, top_logprobs=2)
  choice = answer.choices[0]
  assert ''.join(choice.logprobs.tokens) == choice.text == result.text
  assert choice.logprobs.token_logprobs == pytest.approx(result.logprobs)
  assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]
  for top, pairs in zip(
    choice.logprobs.top_logprobs, result.top_logprobs, strict=True
  ):
    expected = {MODEL.tokenizer.decode([i]): value for i, value in pairs}
    assert top == pytest.approx(expected)
  # One that is chosen against the odds is there, too.
  answer = complete(client, 'ab', logprobs=1, max_tokens=40, seed=3)
  own = answer.choices[0].logprobs
  assert {len(top) for top in own.top_logprobs} == {1, 2}
  for name, value, top in zip(
    own.tokens, own.token_logprobs, own.top_logprobs, strict=True
  ):
    assert top[name] == value


@pytest.mark.parametrize('prompts', [['abca', 'ge'], [[0, 1, 2, 0], [6, 4]]])
@pytest.mark.parametrize('max_tokens', [0, 6])
def test_echo_with_logprobs(client, prompts, max_tokens):
  options = {
    'model': NAME,
    'prompt': prompts,
    'echo': True,
    'logprobs': 2,
    'n': 2,
    'max_tokens': max_tokens,
    'seed': 1,
  }
  answer = client.completions.create(**options)
  table = np.log(server_cases.TABLE)
  letters = 'abcdefgh'
  for choice in answer.choices:
    prompt = ['abca', 'ge'][choice.index // 2]
    own = choice.logprobs
    text = choice.text
    assert text.startswith(prompt)
    # The token that ends the text is not in it.
    assert ''.join(own.tokens).removesuffix('h') == text
    assert own.text_offset == [*range(len(own.tokens))]
    assert own.token_logprobs[0] is own.top_logprobs[0] is None
    ids = list(map(letters.index, own.tokens))
    for before, token, value, top in zip(
      ids, ids[1:], own.token_logprobs[1:], own.top_logprobs[1:], strict=False
    ):
      assert value == pytest.approx(table[before, token], abs=1e-5)
      best = np.argsort(-table[before])[:2]
      expected = {letters[i]: table[before, i] for i in (*best, token)}
      assert top == pytest.approx(expected, abs=1e-5)
    assert len(own.tokens) == len(own.token_logprobs) == len(own.top_logprobs)
    assert max_tokens or choice.finish_reason == 'length'
    assert max_tokens or text == prompt
  assert answer.usage.prompt_tokens == 6
  assert bool(answer.usage.completion_tokens) == bool(max_tokens)
  events = client.completions.create(**options, stream=True)
  texts, ends, logprobs, _ = collect(events)
  for choice in answer.choices:
    assert texts[choice.index] == choice.text
    assert ends[choice.index] == choice.finish_reason
    assert logprobs[choice.index] == choice.logprobs.tokens


def test_echo_alone(client):
  answer = complete(client, 'ab', echo=True, max_tokens=3, temperature=0)
  (result,) = alone('ab', max_new_tokens=3)
  assert answer.choices[0].text == 'ab' + result.text
  assert answer.choices[0].logprobs is None
  with pytest.raises(openai.BadRequestError, match='takes at most 600 tokens'):
    complete(client, 'a' * 600, echo=True, max_tokens=0, logprobs=1)


def test_stop_strings(client):
  (result,) = alone('a', max_new_tokens=20)
  stop = result.text[4:6]
  assert stop
  cut = result.text.index(stop)
  for given in (stop, [stop, 'zz']):
    options = {'stop': given, 'temperature': 0, 'max_tokens': 20}
    (choice,) = complete(client, **options).choices
    texts, ends, *_ = collect(complete(client, **options, stream=True))
    assert texts[0] == choice.text == result.text[:cut]
    assert ends[0] == choice.finish_reason == 'stop'


def test_what_ends_an_answer(client):
  fields = {'stop_token_ids': [2, 5], 'min_tokens': 4, 'ignore_eos': True}
  common = {'temperature': 1, 'seed': 3}
  (expected,) = alone(
    'a', **common, **{**fields, 'stop_token_ids': (2, 5)}, max_new_tokens=30
  )
  assert expected.stop_reason in (2, 5)
  text = expected.text + MODEL.tokenizer.decode(expected.stop_reason)
  chat = {'model': NAME, 'messages': [{'role': 'user', 'content': 'a'}]}
  for includes_stop in (False, True):
    common['extra_body'] = fields | {
      'include_stop_str_in_output': includes_stop
    }
    (plain,) = complete(client, max_tokens=30, **common).choices
    (said,) = client.chat.completions.create(**chat, **common).choices
    *_, last = client.chat.completions.create(**chat, **common, stream=True)
    for choice in (plain, said, *last.choices):
      assert choice.finish_reason == 'stop'
      assert choice.stop_reason == expected.stop_reason
    assert plain.text == said.message.content
    assert plain.text == (text if includes_stop else expected.text)


def test_seeds(client):
  def text(**options):
    return complete(client, max_tokens=40, extra_body=options).choices[0].text

  greedy = {'ignore_eos': True}
  assert text(seed=1, **greedy) == text(seed=1, **greedy)
  assert len({text(**greedy) for _ in range(3)}) == 3
  assert len(text(**greedy)) == 40


def figures(address):
  """Values of the metrics by name, once they agree with each other."""
  values = server_cases.figures(address)
  # A step is counted shortly after its news are out.
  num_updates = (
    values['vllm:time_to_first_token_seconds_count']
    + values['vllm:inter_token_latency_seconds_count']
  )
  accepted = values['vllm:spec_decode_num_accepted_tokens_total']
  if num_updates != values['vllm:generation_tokens_total'] - accepted:
    return figures(address)
  return values


def test_metrics_and_speculation_of_a_request(client, address):
  def change(**options):
    before = figures(address)
    complete(client, 'aegc', max_tokens=30, temperature=0, **options)
    after = figures(address)
    return {name: after[name] - before.get(name, 0) for name in after}

  prefix = 'vllm:spec_decode_num_'
  new = change()
  drafts = new[f'{prefix}drafts_total']
  accepted = new[f'{prefix}accepted_tokens_total']
  per_position = [
    new[f'{prefix}accepted_tokens_per_pos_total{i}']
    for i in range(server_cases.LENGTH)
  ]
  assert 0 < drafts <= new[f'{prefix}draft_tokens_total'] <= 3 * drafts
  assert sum(per_position) == accepted > 0
  assert per_position == sorted(per_position, reverse=True)
  assert new['vllm:prompt_tokens_total'] == 4
  tokens = new['vllm:generation_tokens_total']
  assert tokens == 30
  for name in (
    'request_success_total',
    'time_to_first_token_seconds_count',
    'e2e_request_latency_seconds_count',
    'request_time_per_output_token_seconds_count',
  ):
    assert new[f'vllm:{name}'] == 1
  for name in ('requests_running', 'requests_waiting'):
    assert figures(address)[f'vllm:num_{name}'] == 0
  for length in (0, 1, 2**80):
    new = change(extra_body={'max_speculative_tokens': length})
    assert bool(new[f'{prefix}drafts_total']) == bool(length)
    drafts = new[f'{prefix}drafts_total']
    assert (new[f'{prefix}draft_tokens_total'] > drafts) == (length > 1)
    assert new['vllm:generation_tokens_total'] == tokens


def test_models_and_health(client, address):
  (model,) = client.models.list().data
  assert (model.id, model.object) == (NAME, 'model')
  assert model.max_model_len == server_cases.MAX_CONTEXT
  assert client.models.retrieve(NAME) == model
  status, answer = fetch(f'{address}/health')
  assert (status, json.loads(answer)['status']) == (200, 'ok')
  with pytest.raises(openai.NotFoundError, match='no model') as refusal:
    client.models.retrieve('other')
  assert refusal.value.body['type'] == 'not_found_error'


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'temperature': 3}, 'temperature: Input should be less than'),
    ({'top_p': 0}, 'top_p: Input should be greater than 0'),
    ({'seed': 2**63}, 'seed: Input should be less'),
    ({'stop': ['']}, 'stop.0: String should have at least 1'),
    ({'stop': ['a'] * 17}, 'stop has more than 16 strings'),
    ({'stop': 'a' * 257}, 'stop: String should have at most 256'),
    ({'max_tokens': 0}, 'max_tokens=0 needs echo=true; give at least 1'),
    ({'best_of': 2}, 'best_of is 2; this server returns all choices, so it'),
    ({'extra_body': {'guided_json': {}}}, 'guided_json: not supported'),
    ({'logprobs': 6}, 'logprobs: Input should be less than or equal to 5'),
    ({'presence_penalty': 3}, 'presence_penalty: Input should be less'),
    ({'logit_bias': {'9': 1}}, 'logit_bias names token 9; ids are 0 to 7'),
    (
      {'extra_body': {'min_tokens': 17}},
      'min_tokens must be >= 0, and at most',
    ),
    ({'extra_body': {'stop_token_ids': [8]}}, 'stop_token_ids names token 8'),
    ({'prompt': ''}, 'prompt: String should have at least 1'),
    ({'prompt': [99]}, 'the prompt holds 99'),
    ({'prompt': [[-1]]}, 'prompt.0.0: Input should be greater'),
    ({'prompt': []}, 'the prompt is empty'),
    ({'prompt': 'a' * 600}, 'takes at most 600 tokens'),
    ({'prompt': ['a', 'a' * 600]}, 'takes at most 600 tokens'),
    ({'prompt': ['a'] * 133}, 'this is 133 requests'),
    ({'extra_body': {'stream_options': {}}}, 'stream_options needs stream'),
    ({'extra_body': {'max_speculative_tokens': -1}}, 'max_speculative_tokens'),
  ],
)
def test_mistakes_are_explained(client, service, options, message):
  with pytest.raises(openai.BadRequestError) as refusal:
    client.completions.create(**{'model': NAME, 'prompt': 'a', **options})
  error = refusal.value.body
  assert message in error['message']
  assert error['type'] == 'invalid_request_error'
  # Parts of a call that were taken have been given up.
  programs.wait_for(lambda: service.engine.num_requests == 0)


TOOLS = [{'type': 'function', 'function': {'name': 'look_up'}}]


def test_other_mistakes_are_explained(client, address):
  chat = client.chat.completions
  picture = {'type': 'image_url', 'image_url': {'url': 'data:image/png,'}}
  for options, message in (
    ({'messages': []}, 'messages: List should have at least 1 item'),
    ({'messages': [{'role': 'user', 'content': ''}]}, 'no message has content'),
    ({'messages': [{'role': 'user', 'content': [picture]}]}, "be 'text'"),
    ({'tools': [{'type': 'function'}]}, 'tools.0.function: Field required'),
    ({'tools': TOOLS}, 'chat template shows no tools; leave out tools, or'),
    ({'tool_choice': 'required'}, 'a tool that is not in tools'),
    ({'top_logprobs': 2}, 'top_logprobs needs logprobs=true'),
  ):
    messages = [{'role': 'user', 'content': 'a'}]
    with pytest.raises(openai.BadRequestError) as refusal:
      chat.create(**{'model': NAME, 'messages': messages, **options})
    assert message in refusal.value.body['message']
  url = f'{address}/v1/completions'
  for body in (b'{', b'[]', b'"\xff"', b'{"\\ud800": 1}'):
    status, answer = fetch(url, body)
    assert status == 400
    assert error_of(answer)['message']
  assert 'Content-Type' in error_of(fetch(url, b'[]')[1])['message']
  status, answer = fetch(url)
  assert (status, error_of(answer)['message']) == (405, 'Method Not Allowed')


CHECKS = [
  schemathesis.checks.not_a_server_error,
  checks.status_code_conformance,
  checks.content_type_conformance,
  checks.response_headers_conformance,
  checks.response_schema_conformance,
]


@pytest.mark.parametrize('mode', list(schemathesis.GenerationMode))
def test_any_request_gets_an_answer_of_the_schema(address, mode):
  """Requests that the schema allows, and others."""

  def check(case):
    body = case.body
    if mode.is_positive and isinstance(body, dict):
      body |= {'model': NAME, 'max_tokens': 3}
      # Few texts have letters of the model.
      if 'messages' in body:
        body['messages'].append({'role': 'user', 'content': 'a'})
      else:
        body['prompt'] = 'a'
    case.call_and_validate(checks=CHECKS)

  api = schemathesis.openapi.from_url(f'{address}/openapi.json')
  # Those that the schema allows take long to draw, and are answered.
  limits = hypothesis.settings(
    max_examples=10 if mode.is_positive else 20, derandomize=True
  )
  for found in api.get_all_operations():
    operation = found.ok()
    if operation.body or mode.is_positive:
      cases = operation.as_strategy(generation_mode=mode)
      limits(hypothesis.given(cases)(check))()
