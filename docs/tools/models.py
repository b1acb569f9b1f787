"""Writes the table of families in docs/how_to/models.md from the code.

python -m docs.tools.models
"""

import pathlib

from swiftspec_jax.checkpoint import gguf, hf
from swiftspec_jax.cli import output_files, program
from swiftspec_jax.models import families

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'how_to' / 'models.md'
_START, _END = '<!-- families -->', '<!-- end of families -->'
_MODELS = {
  'llama': 'Llama 2, 3, 3.1, 3.2, 3.3; SmolLM2',
  'mistral': 'Mistral 7B',
  'qwen2': 'Qwen 2, 2.5',
  'mimo': 'MiMo 7B',
  'qwen3': 'Qwen 3',
  'qwen3_moe': 'Qwen 3 30B-A3B, 235B-A22B',
  'gpt_oss': 'gpt-oss 20b, 120b',
  'llama4_text': 'Llama 4 Scout, Maverick: text',
  'gemma3_text': 'Gemma 3 270m, 1b',
  'gemma4_text': 'Gemma 4 31B, 26B-A4B, E4B, E2B: text',
  'gemma4_unified_text': 'Gemma 4 12B: text',
}
_NO_INT4 = ('gpt_oss',)  # as published


def main() -> None:
  """Writes the page."""
  output_files.write(PAGE, render(PAGE.read_text()).encode())


def render(page: str) -> str:
  """Returns a page with the table as the code has it."""
  before, _, rest = page.partition(_START)
  _, _, after = rest.partition(_END)
  header = [
    [
      '`model_type`',
      'models',
      'safetensors',
      'GGUF',
      'int4 as published',
      'quantized',
    ],
    ['---'] * 6,
  ]
  rows = [*header, *map(_row, families.FAMILIES)]
  table = '\n'.join(f'| {" | ".join(row)} |' for row in rows)
  return f'{before}{_START}\n\n{table}\n\n{_END}{after}'


def _row(family: str) -> list[str]:
  is_in_gguf = family in gguf.FAMILIES.values() or family == 'mistral'
  config = hf.config_of(PAGE, {'model_type': family})
  is_dense = config.experts is None
  return [
    f'`{family}`',
    _MODELS[family],
    'yes',
    _yes(is_in_gguf),
    _yes(family not in _NO_INT4),
    'yes' if is_dense else 'int8, int4, float8, mxfp4',
  ]


def _yes(value: bool) -> str:
  return 'yes' if value else 'no'


if __name__ == '__main__':
  program.run(main)
