"""Records llama.cpp's token ids of the texts in tokenizer_strings.py.

Needs xllamacpp (extra `peers`). From the root of the repository:

  PYTHONPATH=.:tests python tests/golden/record_tokenizer.py
"""

import json
import pathlib

import llama_cpp_server
import tokenizer_strings
import xllamacpp

from swiftspec_jax.checkpoint import builtin


def record(name: str) -> None:
  """Writes tokenizer_<name>.json next to this file."""
  peer = llama_cpp_server.Tokenizer(builtin.fetch(name))
  golden = {
    'xllamacpp': xllamacpp.__version__,
    'digests': [
      tokenizer_strings.digest(peer.encode(text))
      for text in tokenizer_strings.strings()
    ],
  }
  file = pathlib.Path(__file__).with_name(f'tokenizer_{name}.json')
  file.write_text(json.dumps(golden) + '\n')


if __name__ == '__main__':
  record('smollm2-135m-instruct')
  record('gemma-3-270m')
