"""Records what transformers makes of the models in image_cases.py.

Needs torch. From the root of the repository:

  PYTHONPATH=.:tests python tests/golden/record_images.py
"""

import json
import pathlib
import tempfile

import image_cases
import numpy as np
import torch
import transformers


@torch.no_grad()
def run_peer(
  directory: pathlib.Path, token_ids: tuple[int, ...], images: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, list[int]]:
  """Returns embeddings f32[images, I, D], logits f32[V], and greedy tokens.

  The logits are those after the prompt.

  Args:
    directory: checkpoint of a LLaVA.
    token_ids: prompt with placeholders.
    images: f32[P, P, 3] normed images of it.
  """
  peer = transformers.LlavaForConditionalGeneration.from_pretrained(
    directory, dtype=torch.float32, attn_implementation='eager'
  ).eval()
  pixels = torch.tensor(np.stack(images).transpose(0, 3, 1, 2))
  embeddings = peer.get_image_features(pixel_values=pixels).pooler_output
  inputs = {
    'input_ids': torch.tensor([token_ids]),
    'pixel_values': pixels,
    'attention_mask': torch.ones(1, len(token_ids)),
  }
  logits = peer(**inputs).logits[0, -1].numpy()
  peer.generation_config.eos_token_id = None
  output = peer.generate(
    **inputs,
    do_sample=False,
    max_new_tokens=image_cases.NUM_NEW_TOKENS,
  )
  new = output[0, len(token_ids) :].tolist()
  return torch.stack(list(embeddings)).numpy(), logits, new


@torch.no_grad()
def save_random(directory: pathlib.Path) -> None:
  """Replaces the weights of a checkpoint, as their code saves them."""
  config = transformers.AutoConfig.from_pretrained(directory)
  peer = transformers.LlavaForConditionalGeneration(config)
  torch.manual_seed(0)
  for parameter in peer.parameters():
    parameter.normal_(std=0.3)
  peer.save_pretrained(directory)


def preprocessed(
  directory: pathlib.Path, tower: str, pixels: np.ndarray
) -> np.ndarray:
  """Returns f32[P, P, 3] normed pixels of an image u8[any, any, 3]."""
  kinds = {
    'clip': transformers.CLIPImageProcessorPil,
    'siglip': transformers.SiglipImageProcessorPil,
  }
  found = kinds[tower].from_pretrained(directory)(pixels)['pixel_values'][0]
  return np.asarray(found).transpose(1, 2, 0)


def normed(pixels: np.ndarray) -> np.ndarray:
  """Returns f32[P, P, 3] with the mean and deviation of image_cases."""
  mean, std = np.array([[0.48, 0.46, 0.41], [0.27, 0.26, 0.28]], np.float32)
  return (pixels.astype(np.float32) / 255 - mean) / std


def _rounded(array: np.ndarray) -> list:
  text = json.dumps(array.tolist())
  return json.loads(text, parse_float=lambda x: float(f'{float(x):.6g}'))


if __name__ == '__main__':
  golden = {'transformers': transformers.__version__}
  for tower in image_cases.TOWERS:
    with tempfile.TemporaryDirectory() as name:
      path = pathlib.Path(name)
      image_cases.write(path, tower)
      embeddings, logits, new = run_peer(
        path,
        image_cases.prompt(*image_cases.PARTS),
        [normed(image_cases.pixels(seed)) for seed in image_cases.SEEDS],
      )
    golden[tower] = {
      'embeddings': _rounded(embeddings[0, ::4, ::5]),
      'logits': _rounded(logits[5::31]),
      'token_ids': new,
    }
  file = pathlib.Path(__file__).with_name('images.json')
  file.write_text(json.dumps(golden) + '\n')
