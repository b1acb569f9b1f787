"""Values that ask for nothing are accepted, and others are not forgotten."""

import inspect

import openai
import pydantic
import pytest

from swiftspec_jax.server import schema

PROMPT = {'model': 'm', 'prompt': 'The sea is'}
MESSAGES = {'model': 'm', 'messages': [{'role': 'user', 'content': 'Hi'}]}
# Defaults, as the references of OpenAI's API and of vLLM have them; null is
# tried for all.
SHARED = {
  'frequency_penalty': [0, 0.0],
  'logit_bias': [{}],
  'n': [1],
  'presence_penalty': [0.0],
  'seed': [0, -1, 2**40, 2**63 - 1],
  'stop': [[]],
  'stream': [False],
  'stream_options': [],
  'temperature': [1, 1.0],
  'top_p': [1, 1.0],
  'user': ['', 'me'],
  # vLLM's.
  'allowed_token_ids': [],
  'bad_words': [[]],
  'cache_salt': [],
  'early_stopping': [False],
  'guided_choice': [],
  'guided_decoding_backend': [],
  'guided_grammar': [],
  'guided_json': [],
  'guided_regex': [],
  'guided_whitespace_pattern': [],
  'ignore_eos': [False],
  'include_stop_str_in_output': [False],
  'kv_transfer_params': [],
  'length_penalty': [1.0],
  'logits_processors': [[]],
  'min_p': [0, 0.0],
  'min_tokens': [0],
  'priority': [0],
  'prompt_logprobs': [],
  'repetition_detection': [],
  'repetition_penalty': [1.0],
  'request_id': ['3f2a'],
  'response_format': [{'type': 'text'}],
  'return_token_ids': [False],
  'return_tokens_as_token_ids': [False],
  'skip_special_tokens': [True],
  'spaces_between_special_tokens': [True],
  'stop_token_ids': [[]],
  'structured_outputs': [],
  'top_k': [-1, 0],
  'truncate_prompt_tokens': [],
  'use_beam_search': [False],
  'vllm_xargs': [{}],
}
COMPLETION = {
  'add_special_tokens': [True],
  'best_of': [1],
  'echo': [False],
  'logprobs': [],
  'max_tokens': [16],
  'prompt_embeds': [],
  'suffix': [''],
}
CHAT = {
  'add_generation_prompt': [True],
  'add_special_tokens': [False],
  'audio': [],
  'chat_template': [],
  'chat_template_kwargs': [{}],
  'continue_final_message': [False],
  'documents': [[]],
  'echo': [False],
  'function_call': ['none', 'auto'],
  'functions': [[]],
  'include_reasoning': [True],
  'logprobs': [False],
  'max_completion_tokens': [],
  'max_tokens': [],
  'media_io_kwargs': [{}],
  'metadata': [{}, {'a': 'b'}],
  'mm_processor_kwargs': [{}],
  'modalities': [['text']],
  'moderation': [],
  'parallel_tool_calls': [True, False],
  'prediction': [],
  'prompt_cache_key': ['a'],
  'prompt_cache_options': [{}],
  'prompt_cache_retention': ['24h'],
  'reasoning_effort': ['none'],
  'safety_identifier': ['a'],
  'service_tier': ['auto', 'default'],
  'store': [False],
  'thinking_token_budget': [],
  'tool_choice': ['none', 'auto'],
  'tools': [[]],
  'top_logprobs': [0],
  'verbosity': ['medium'],
  'web_search_options': [],
}
KINDS = [
  (schema.CompletionRequest, PROMPT, {**SHARED, **COMPLETION}),
  (schema.ChatRequest, MESSAGES, {**SHARED, **CHAT}),
]


@pytest.mark.parametrize(('kind', 'body', 'table'), KINDS)
def test_what_asks_for_nothing_changes_nothing(kind, body, table):
  def sampling(**fields):
    return kind.model_validate({'seed': 1, **body, **fields}).samplings()

  plain = sampling()
  for name, values in table.items():
    for value in [None, *values]:
      found = sampling(**{name: value})
      assert name == 'seed' or found == plain, (name, value)
  one_of_each = {name: values[0] for name, values in table.items() if values}
  assert sampling(**one_of_each | {'seed': 1}) == plain


@pytest.mark.parametrize(
  ('resource', 'kind'),
  [(openai.resources.completions, 0), (openai.resources.chat.completions, 1)],
)
def test_the_table_has_all_that_the_client_can_send(resource, kind):
  parameters = inspect.signature(resource.Completions.create).parameters
  names = {name for name in parameters if not name.startswith('extra_')}
  _, body, table = KINDS[kind]
  of_the_client = {'self', 'timeout'}
  assert names - of_the_client - body.keys() - table.keys() == set()


@pytest.mark.parametrize(
  ('kind', 'name', 'value'),
  [
    (0, 'use_beam_search', True),
    (0, 'prompt_logprobs', 1),
    (0, 'guided_regex', 'a+'),
    (0, 'cache_salt', 'secret'),
    (0, 'temprature', 0.5),  # a slip of the pen
    (1, 'echo', True),
    (1, 'modalities', ['text', 'audio']),
  ],
)
def test_what_asks_for_something_else_is_refused(kind, name, value):
  kind, body, _ = KINDS[kind]
  with pytest.raises(pydantic.ValidationError) as refusal:
    kind.model_validate({**body, name: value})
  (error,) = refusal.value.errors()
  assert (error['type'], error['loc']) == ('extra_forbidden', (name,))


def test_what_has_no_effect_is_logged_once(caplog):
  hints = {'store': True, 'verbosity': 'high', 'service_tier': 'priority'}
  for _ in range(2):
    body = {**MESSAGES, **hints, 'seed': 1}
    found = schema.ChatRequest.model_validate(body).samplings()
    assert found == schema.ChatRequest(**MESSAGES, seed=1).samplings()
  for name in hints:
    assert caplog.text.count(f'sends {name}, which has no effect') == 1


def test_seeds_of_any_size():
  def seed(value):
    body = {**PROMPT, 'seed': value}
    (sampling,) = schema.CompletionRequest.model_validate(body).samplings()
    return sampling.seed

  assert seed(5) == seed(5 + 2**32) == seed(5 - 2**40) == 5


def test_messages_as_clients_keep_them():
  fields = {
    'role': 'assistant',
    'content': 'Hello',
    'refusal': None,
    'annotations': [],
    'audio': None,
    'function_call': None,
    'tool_calls': [],
    'name': 'Bob',
  }
  body = MESSAGES | {'messages': [*MESSAGES['messages'], fields]}
  message = schema.ChatRequest.model_validate(body).messages[-1]
  expected = {'role': 'assistant', 'content': 'Hello', 'name': 'Bob'}
  assert message.to_template() == expected
  options = {'include_obfuscation': False, 'continuous_usage_stats': False}
  streamed = {**PROMPT, 'stream': True, 'stream_options': options}
  read = schema.CompletionRequest.model_validate(streamed)
  assert not read.stream_options.include_usage
