"""Records what transformers makes of the texts in tokenizer_strings.py.

Needs torch. From the root of the repository:

  PYTHONPATH=.:tests python tests/golden/record_tokenizer.py
"""

import json
import pathlib

import tokenizer_strings
import transformers

from swiftspec_jax.checkpoint import builtin


def record(name: str) -> None:
  """Writes tokenizer_<name>.json next to this file."""
  path = builtin.fetch(name)
  peer = transformers.AutoTokenizer.from_pretrained(
    path.parent, gguf_file=path.name
  )
  golden = {
    'transformers': transformers.__version__,
    'digests': [
      tokenizer_strings.digest(peer, text)
      for text in tokenizer_strings.strings()
    ],
  }
  file = pathlib.Path(__file__).with_name(f'tokenizer_{name}.json')
  file.write_text(json.dumps(golden) + '\n')


if __name__ == '__main__':
  record('smollm2-135m-instruct')
  record('gemma-3-270m')
