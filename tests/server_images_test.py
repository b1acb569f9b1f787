"""Images over HTTP."""

import base64
import contextlib
import io
import re
import struct
import warnings
import zlib

import image_cases
import numpy as np
import PIL.Image
import pytest
from images_test import LOOKUP, engine_of
from server_cases import client_of, error_of, fetch, make_service, serving

import swiftspec_jax as ss
from swiftspec_jax import errors
from swiftspec_jax.config.architecture import Vision
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.requests import images
from swiftspec_jax.server.service import Service


def url_of(pixels, kind='png'):
  file = io.BytesIO()
  PIL.Image.fromarray(pixels).save(file, kind)
  data = base64.b64encode(file.getvalue()).decode()
  return f'data:image/{kind};base64,{data}'


def part_of(url):
  return {'type': 'image_url', 'image_url': {'url': url}}


@pytest.fixture(scope='module')
def service(tmp_path_factory):
  directory = tmp_path_factory.mktemp('clip')
  image_cases.write(directory)
  target = ss.load(directory)
  engine = engine_of(target, LOOKUP, FixedLength(3))
  return Service(engine, target, name='llava')


@pytest.fixture(scope='module')
def address(service):
  with serving(service) as address:
    yield address


def ask(address, content):
  with client_of(address) as client:
    return client.chat.completions.create(
      model='llava',
      messages=[{'role': 'user', 'content': content}],
      max_tokens=8,
      temperature=0,
      logprobs=True,
    )


def test_chat_with_images(service, address):
  pixels = [image_cases.pixels(seed) for seed in (1, 2)]
  content = [
    {'type': 'text', 'text': 'Is '},
    part_of(url_of(pixels[0])),
    {'type': 'text', 'text': ' like '},
    part_of(url_of(pixels[1])),
  ]
  answer = ask(address, content)
  # BOS, <|user|>, texts and images, EOS, <|assistant|>
  texts = (256, 260), b'Is ', (270,) * 9, b' like ', (270,) * 9, (257, 261)
  token_ids = tuple(token_id for text in texts for token_id in text)
  assert answer.usage.prompt_tokens == len(token_ids)
  request = ss.Request(
    token_ids=token_ids,
    images=tuple(images.Image(pixels=x) for x in pixels),
    sampling=ss.SamplingParams(max_new_tokens=8, logprobs=True),
  )
  expected = service.engine.submit(request).result()
  assert answer.choices[0].message.content == expected.text
  logprobs = [x.logprob for x in answer.choices[0].logprobs.content]
  np.testing.assert_allclose(logprobs, expected.logprobs, atol=1e-5)


def test_chat_without_images(address):
  assert ask(address, 'Hi').usage.prompt_tokens == 6


_GOOD = url_of(image_cases.pixels(1))


@pytest.mark.parametrize(
  ('parts', 'message'),
  [
    ([part_of('https://a.b/c.png')], 'this server fetches nothing'),
    ([part_of('data:text/plain;base64,YQ==')], 'this server fetches nothing'),
    ([part_of('data:image/png;base64,?')], 'not valid base64'),
    ([part_of('data:image/png;base64,YQ==')], 'must be a PNG, JPEG'),
    ([part_of(_GOOD)] * 3, '3 images; .* at most 2 .--max_images'),
    ([{'type': 'text', 'text': '<reserved_8>'}], '9 placeholders .* 0 images'),
    ([{'type': 'audio'}], "'text', 'image_url'"),
    ([part_of('')], 'this server fetches nothing'),
  ],
)
def test_bad_images_are_refused(address, parts, message):
  body = {'model': 'llava', 'messages': [{'role': 'user', 'content': parts}]}
  status, text = fetch(f'{address}/v1/chat/completions', body)
  assert status == 400
  assert re.search(message, error_of(text)['message'])


def test_a_model_of_text_refuses_images():
  service = make_service()
  content = [{'type': 'text', 'text': 'a'}, part_of(_GOOD)]
  messages = [{'role': 'user', 'content': content}]
  body = {'model': 'letters', 'messages': messages}
  with serving(service) as address:
    status, text = fetch(f'{address}/v1/chat/completions', body)
  assert status == 400
  assert 'this model reads no images' in error_of(text)['message']


def tower(*, crops, size=12):
  return Vision(
    kind='clip',
    image_token_id=0,
    image_size=size,
    patch_size=4,
    num_layers=1,
    embed_dim=8,
    num_heads=1,
    ffw_dim=8,
    norm_eps=1e-5,
    activation='gelu',
    projector_activation='gelu',
    crops=crops,
  )


def file_of(array):
  file = io.BytesIO()
  PIL.Image.fromarray(array).save(file, 'png')
  return file.getvalue()


def test_images_are_cut_or_squeezed():
  # 24 high and 48 wide: a dark left, a middle, and a bright right part.
  wide = np.zeros((24, 48, 3), np.uint8)
  wide[:, 12:36], wide[:, 36:] = 100, 200
  cut = images.read(file_of(wide), tower(crops=True)).pixels
  squeezed = images.read(file_of(wide), tower(crops=False)).pixels
  assert cut.shape == squeezed.shape == (12, 12, 3)
  assert (cut[:, 2:-2] == 100).all()
  assert (squeezed[0, [0, 5, 6, 11], 0] == [0, 100, 100, 200]).all()


def test_large_images_are_refused():
  data = file_of(np.zeros((5000, 5000, 3), np.uint8))
  with pytest.raises(errors.UserError, match='has 5000 x 5000 pixels; at most'):
    images.read(data, tower(crops=True))
  data = file_of(np.zeros((1, 15000, 3), np.uint8))
  with pytest.raises(errors.UserError, match='1 pixels is too long'):
    images.read(data, tower(crops=True, size=336))
  assert images.read(data, tower(crops=False)).pixels.shape == (12, 12, 3)
  header = struct.pack('>IIBBBBB', 2**16, 2**16, 8, 2, 0, 0, 0)
  bomb = b'\x89PNG\r\n\x1a\n'
  for name, content in ((b'IHDR', header), (b'IDAT', b'')):
    check = struct.pack('>I', zlib.crc32(name + content))
    bomb += struct.pack('>I', len(content)) + name + content + check
  with pytest.raises(errors.UserError, match='the image is too large: '):
    images.read(bomb, tower(crops=False))


def test_photographs_are_upright():
  pixels = image_cases.pixels(1)
  exif, file = PIL.Image.Exif(), io.BytesIO()
  exif[0x0112] = 6  # to be turned to the right
  PIL.Image.fromarray(pixels).save(file, 'png', exif=exif)
  found = images.read(file.getvalue(), tower(crops=True)).pixels
  assert (found == np.rot90(pixels, -1)).all()


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['png', 'jpeg', 'webp', 'gif'])
def test_broken_images_are_read_or_refused(kind):
  file, random = io.BytesIO(), np.random.default_rng(0)
  PIL.Image.fromarray(image_cases.pixels(1)).save(file, kind)
  whole = np.frombuffer(file.getvalue(), np.uint8)
  for _ in range(3000):
    data = whole[: random.integers(1, len(whole) + 1)].copy()
    places = random.integers(0, len(data), random.integers(0, 5))
    data[places] = random.integers(0, 256, len(places))
    with warnings.catch_warnings(), contextlib.suppress(errors.UserError):
      warnings.simplefilter('ignore')
      images.read(data.tobytes(), tower(crops=True))
