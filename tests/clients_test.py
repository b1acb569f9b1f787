"""Libraries of others against the server: calls of tools, schemas, load."""

import importlib.util
import json
import os
import subprocess
import sys

import client_programs
import pytest
import server_cases

import swiftspec_jax as ss

pytestmark = pytest.mark.peers
TEMPLATE = (
  '{{ tools | tojson if tools }}<tool_call>\n{"name": NAME}</tool_call>'
  '{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n'
  '{% endfor %}<|im_start|>assistant\n'
)


@pytest.fixture(scope='module')
def model():
  model = ss.load('smollm2-135m-instruct')
  model.tokenizer.chat_template = TEMPLATE
  return model


@pytest.fixture(scope='module')
def address(model):
  service = server_cases.make_service(
    model=model, max_context=1000, name=client_programs.MODEL
  )
  with server_cases.serving(service) as address:
    yield address


def skip_without(library):
  if importlib.util.find_spec(library) is None:
    pytest.skip(f'{library} is not installed')


def run(folder, *command):
  environment = {
    'HF_HUB_OFFLINE': '1',
    'LITELLM_LOCAL_MODEL_COST_MAP': 'True',
    'LLM_USER_PATH': str(folder),
    'OPENAI_API_KEY': 'none',
  }
  return subprocess.check_output(
    [sys.executable, *command], env={**os.environ, **environment}
  )


@pytest.mark.parametrize(
  'library', ['litellm', 'langchain_openai', 'instructor', 'pydantic_ai', 'llm']
)
def test_libraries_get_what_they_ask_for(library, address, tmp_path):
  skip_without(library)
  program = client_programs.__file__
  *_, answer = run(tmp_path, program, library, f'{address}/v1').splitlines()
  assert list(json.loads(answer)) == ['city']


def test_guidellm_measures(address, model, tmp_path):
  skip_without('guidellm')
  model.tokenizer.save_pretrained(tmp_path)
  name = client_programs.MODEL
  run(
    tmp_path,
    *('-m', 'guidellm', 'run', '--disable-console'),
    *('--backend', f'kind=openai_http,target={address},model={name}'),
    *('--profile', 'kind=synchronous'),
    *('--constraint', 'kind=max_requests,count=2'),
    *('--tokenizer', f'kind=huggingface_auto,model={tmp_path}'),
    *('--data', 'kind=synthetic_text,prompt_tokens=16,output_tokens=4'),
    *('--output', f'kind=json,path={tmp_path / "found.json"}'),
  )
  (found,) = json.loads((tmp_path / 'found.json').read_text())['benchmarks']
  assert len(found['requests']['successful']) == 2
