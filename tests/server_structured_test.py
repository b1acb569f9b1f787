"""Structured outputs over HTTP."""

import dataclasses
import json

import jsonschema
import openai
import pytest
from decoding_cases import CONFIG
from server_cases import client_of, make_service, serving
from structured_outputs_test import SCHEMAS

from swiftspec_jax import testing
from swiftspec_jax.testing.byte_tokenizer import EOS

NAME = 'bytes'
MODEL = testing.random_model(
  dataclasses.replace(CONFIG, max_context=1024, eos_token_ids=(EOS,)), name=NAME
)
MESSAGES = [{'role': 'user', 'content': 'A record.'}]


@pytest.fixture(scope='module')
def client():
  with serving(make_service(model=MODEL)) as address, client_of(address) as it:
    yield it


def complete(client, wanted, **options):
  return client.completions.create(
    model=NAME,
    prompt='A record: ',
    max_tokens=200,
    extra_body={'structured_outputs': wanted},
    **options,
  )


def chat(client, **options):
  return client.chat.completions.create(
    model=NAME, messages=MESSAGES, **options
  )


def format_of(schema, **options):
  schema = {'name': 'record', 'schema': schema, **options}
  return {'type': 'json_schema', 'json_schema': schema}


@pytest.mark.parametrize('options', [{}, {'strict': True}])
def test_a_chat_answers_with_what_the_schema_says(client, options):
  wanted = format_of(SCHEMAS[1], **options)
  answer = chat(client, response_format=wanted, seed=1, n=3)
  for choice in answer.choices:
    assert choice.finish_reason == 'stop'
    jsonschema.validate(json.loads(choice.message.content), SCHEMAS[1])


def test_any_object_is_json(client):
  wanted, bias = {'type': 'json_object'}, {ord('}'): 100}
  answer = chat(client, response_format=wanted, logit_bias=bias)
  assert answer.choices[0].message.content == '{}'


@pytest.mark.parametrize(
  ('wanted', 'texts'),
  [
    ({'choice': ['on', 'off']}, {'on', 'off'}),
    ({'regex': 'a{2,3}'}, {'aa', 'aaa'}),
    ({'grammar': 'root ::= "x" | "y"'}, {'x', 'y'}),
    ({'json': {'enum': [1, 2]}}, {'1', '2'}),
    ({'json': '{"const": null}'}, {'null'}),
  ],
)
def test_completions_follow_grammars(client, wanted, texts):
  (choice,) = complete(client, wanted).choices
  assert choice.text in texts
  assert choice.finish_reason == 'stop'


@pytest.mark.parametrize(
  ('wanted', 'message'),
  [
    ({}, 'exactly one of json, json_object'),
    ({'choice': ['a'], 'regex': 'a'}, 'got regex and choice'),
    (
      {'json': {'properties': {'a': {'type': 'strin'}}}},
      'structured_outputs.json, at /properties/a: Invalid type: strin',
    ),
    ({'regex': '(['}, 'structured_outputs.regex: '),
    ({'whitespace_pattern': ' '}, 'structured_outputs.whitespace_pattern: not'),
  ],
)
def test_wrong_grammars_get_400_with_their_place(client, wanted, message):
  with pytest.raises(openai.BadRequestError, match=message):
    complete(client, wanted)


@pytest.mark.parametrize(
  ('response_format', 'message', 'more'),
  [
    ({'type': 'json_schema'}, 'needs json_schema', {}),
    ({'type': 'xml'}, 'response_format.type: ', {}),
    (format_of({'type': 'array', 'items': {'not': {}}}), 'at /items: ', {}),
    (
      {'type': 'json_object'},
      'not both',
      {'structured_outputs': {'regex': 'a'}},
    ),
  ],
)
def test_wrong_formats_get_400(client, response_format, message, more):
  with pytest.raises(openai.BadRequestError, match=message):
    chat(client, response_format=response_format, extra_body=more)
