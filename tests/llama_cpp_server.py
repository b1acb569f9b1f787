"""Token ids by llama.cpp (extra `peers`), the oracle for .gguf files."""

import json
import pathlib
import urllib.request

import xllamacpp


class Tokenizer:
  """The tokenizer of a .gguf file, which must hold weights, too."""

  def __init__(self, path: pathlib.Path):
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 64
    params.warmup = False
    params.verbosity = -1
    self._server = xllamacpp.Server(params)

  def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
    request = urllib.request.Request(
      f'{self._server.listening_address}/tokenize',
      json.dumps(
        {
          'content': text,
          'add_special': add_special_tokens,
          'parse_special': True,
        }
      ).encode(),
      {'Content-Type': 'application/json'},
    )
    with urllib.request.urlopen(request) as response:
      return json.load(response)['tokens']
