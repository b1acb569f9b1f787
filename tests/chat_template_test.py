"""No part of a conversation vanishes in a chat template."""

import pytest

from swiftspec_jax import errors, testing
from swiftspec_jax.server import messages as messages_lib
from swiftspec_jax.tokenizer import chat_template

# They know some roles, one any, and one only a first system message.
KNOWN = (
  "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
  "{{ '<' + m.role + '>' + m.content | trim }}{% endif %}{% endfor %}"
)
ANY = '{% for m in messages %}{{ "<" + m.role + ">" + m.content }}{% endfor %}'
DEVELOPER = KNOWN.replace("'system'", "'developer', 'system'")
FIRST_SYSTEM = (
  "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
  "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}"
  '{% endfor %}'
)
CALLS = (
  '{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}'
  '{{ c.function.name + c.function.arguments | tojson }}{% endfor %}'
  '{% endfor %}'
)
CALL = {
  'id': 'c1',
  'type': 'function',
  'function': {'name': 'look_up', 'arguments': '{"place": "Bern"}'},
}


def render(template, *messages, **options):
  tokenizer = testing.byte_tokenizer()
  tokenizer.chat_template = template
  read = [messages_lib.Message.model_validate(m) for m in messages]
  return chat_template.render(
    tokenizer,
    [m.to_template() for m in read],
    chat_template.Options(**options),
  )


def message(role, content, **others):
  return {'role': role, 'content': content, **others}


@pytest.mark.parametrize(
  ('template', 'role'),
  [(KNOWN, 'system'), (ANY, 'system'), (DEVELOPER, 'developer')],
)
def test_a_developer_is_heard(template, role):
  hello = message('user', 'Hello')
  text = render(template, message('developer', 'In French.'), hello)
  assert text == f'<{role}>In French.<user>Hello'


@pytest.mark.parametrize(
  ('template', 'messages', 'complaint'),
  [
    # The content is short enough to be found elsewhere.
    (
      KNOWN,
      [message('user', 's'), message('tool', 's')],
      r"leaves out messages\[1\], of role 'tool'; it names the roles system, "
      'user, assistant: use',
    ),
    (
      FIRST_SYSTEM,
      [message('system', 'a'), message('developer', 'b'), message('user', 'c')],
      r"leaves out messages\[1\], of role 'system'; .*joined into one",
    ),
    (KNOWN, [message('critic', 'a'), message('user', 'b')], "role 'critic'"),
  ],
)
def test_what_a_template_leaves_out_is_refused(template, messages, complaint):
  with pytest.raises(errors.UserError, match=complaint):
    render(template, *messages)


def test_other_roles_that_the_template_shows():
  text = render(ANY, message('tool', '3', tool_call_id='c'), message('me', 'a'))
  assert text == '<tool>3<me>a'


@pytest.mark.parametrize(
  ('body', 'reason'),
  [
    ("{{ raise_exception('roles must alternate') }}", 'roles must alternate'),
    ('{{ messages[0].name + 1 }}', "has no attribute 'name'"),
    ('{{ messages[0].content + 1 }}', 'can only concatenate str'),
    ('{{ 1 / 0 }}', 'division by zero'),
    ('{{ messages[9]["a"] }}', 'no element 9'),
    ('{% for %}', 'Expected an expression'),
    ("{{ messages[0].content.index('z') }}", 'substring not found'),
    ('{{ "abc".encode("nonsense") }}', 'unknown encoding: nonsense'),
  ],
)
def test_errors_of_templates_are_explained(body, reason):
  with pytest.raises(errors.UserError, match=reason):
    render(body, message('user', 'a'))


@pytest.mark.parametrize('content', [{}, {'content': None}, {'content': []}])
def test_an_assistant_may_only_call_tools(content):
  called = {'role': 'assistant', **content, 'tool_calls': [CALL]}
  messages = message('user', 'Weather?'), called
  assert render(CALLS, *messages) == 'Weather?look_up{"place": "Bern"}'
  # A template that knows no calls gets them as text.
  assert render(KNOWN, *messages) == (
    '<user>Weather?<assistant>{"tool_calls": [{"name": "look_up", '
    '"arguments": {"place": "Bern"}}]}'
  )
  called['content'] = 'Let me see.'
  assert '<assistant>Let me see.\n{"tool' in render(KNOWN, *messages)
  # Or says nothing at all.
  assert render(KNOWN, messages[0], {'role': 'assistant', **content}) == (
    '<user>Weather?<assistant>'
  )


def test_others_need_content():
  with pytest.raises(ValueError, match="of role 'user' needs content"):
    render(KNOWN, {'role': 'user'})


def test_templates_that_read_what_messages_say():
  # It finds thoughts in answers, and answers of tools are numbers.
  template = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    '{{ 12 // (m.content | int) }}'
    "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}{% endfor %}"
  )
  thought = message('assistant', 'hm</think>Yes.')
  assert render(template, message('user', 'Hi'), thought) == 'HiYes.'
  assert render(template, message('tool', '4'), thought) == '3Yes.'


def test_what_a_template_gets_besides():
  template = ANY + '{{ tone }}{% if add_generation_prompt %}<me>{% endif %}'
  hello, start = message('user', 'Hello'), message('assistant', 'So ')
  assert render(template, hello, variables={'tone': '!'}) == '<user>Hello!<me>'
  assert render(template, hello, opens_turn=False) == '<user>Hello'
  found = render(template, hello, start, continues=True)
  assert found == '<user>Hello<assistant>So '
  for name in ('chat_template', 'tokenize', 'messages'):
    with pytest.raises(errors.UserError, match=name):
      render(template, hello, variables={name: 'a'})
  with pytest.raises(errors.UserError, match='shows no tools'):
    render(template, hello, tools=[CALL])
