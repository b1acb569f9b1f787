"""Asks a server with a library of others.

  python client_programs.py LIBRARY ADDRESS

prints the answer as JSON, in the last line.
"""

import json
import os
import pathlib
import subprocess
import sys

import openai
import pydantic

MODEL = 'small'
QUESTION = 'What is the weather in Paris?'
MESSAGES = [{'role': 'user', 'content': QUESTION}]


class Weather(pydantic.BaseModel, extra='forbid'):
  """The weather of a place."""

  city: str = pydantic.Field(max_length=20)


SCHEMA = Weather.model_json_schema()
TOOL = {
  'type': 'function',
  'function': {'name': 'Weather', 'parameters': SCHEMA},
}


def litellm(url):
  import litellm

  parts = litellm.completion(
    f'openai/{MODEL}',
    MESSAGES,
    api_base=url,
    tools=[TOOL],
    tool_choice='required',
    parallel_tool_calls=False,
    stream=True,
  )
  message = litellm.stream_chunk_builder(list(parts)).choices[0].message
  return json.loads(message.tool_calls[0].function.arguments)


def langchain_openai(url):
  import langchain_openai

  chat = langchain_openai.ChatOpenAI(model=MODEL, base_url=url)
  structured = chat.with_structured_output(Weather, method='function_calling')
  return structured.invoke(QUESTION).model_dump()


def instructor(url):
  import instructor

  client = instructor.from_openai(openai.OpenAI(base_url=url))
  return client.chat.completions.create(
    model=MODEL, response_model=Weather, messages=MESSAGES, max_retries=0
  ).model_dump()


def pydantic_ai(url):
  import pydantic_ai
  from pydantic_ai.models.openai import OpenAIChatModel
  from pydantic_ai.providers.openai import OpenAIProvider

  model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url))
  agent = pydantic_ai.Agent(model, output_type=Weather)
  settings = {'parallel_tool_calls': False}
  return agent.run_sync(QUESTION, model_settings=settings).output.model_dump()


def llm(url):
  settings = {'model_id': MODEL, 'model_name': MODEL, 'api_base': url}
  folder = pathlib.Path(os.environ['LLM_USER_PATH'])
  # JSON is YAML.
  (folder / 'extra-openai-models.yaml').write_text(
    json.dumps([{**settings, 'supports_schema': True}])
  )
  command = ['llm', '-m', MODEL, '--schema', json.dumps(SCHEMA), QUESTION]
  return json.loads(subprocess.check_output([sys.executable, '-m', *command]))


if __name__ == '__main__':
  name, url = sys.argv[1:]
  sys.stdout.write('\n' + json.dumps(globals()[name](url)))
