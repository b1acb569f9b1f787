"""Records what transformers makes of the cases in model_cases.py.

Needs torch and accelerate. From the root of the repository:

  PYTHONPATH=.:tests python tests/golden/record_models.py
"""

import json
import pathlib
import tempfile

import model_cases
import numpy as np
import torch
import transformers
from transformers import modeling_utils

from swiftspec_jax import testing, tokenizer
from swiftspec_jax.checkpoint import builtin


def load_peer(directory: pathlib.Path) -> modeling_utils.PreTrainedModel:
  """Returns the model of transformers in float32."""
  return transformers.AutoModelForCausalLM.from_pretrained(
    directory, dtype=torch.float32, attn_implementation='eager'
  ).eval()


@torch.no_grad()
def save_random(directory: pathlib.Path) -> modeling_utils.PreTrainedModel:
  """Replaces the weights of a checkpoint; returns the model of them."""
  config = transformers.AutoConfig.from_pretrained(directory)
  peer = transformers.AutoModelForCausalLM.from_config(
    config, dtype=torch.float32, attn_implementation='eager'
  ).eval()
  torch.manual_seed(0)
  for parameter in peer.parameters():
    parameter.normal_(std=0.3)
  peer.save_pretrained(directory)
  return peer


@torch.no_grad()
def step_logits(peer, token_ids: np.ndarray) -> np.ndarray:
  """Returns f32[tokens, V], computed one by one."""
  cache, logits = transformers.DynamicCache(config=peer.config), []
  for token_id in token_ids.tolist():
    # By position, as the name of the cache has changed in 5.24.
    output = peer(torch.tensor([[token_id]]), None, None, cache, use_cache=True)
    logits.append(output.logits[0, 0].numpy())
  return np.stack(logits)


@torch.no_grad()
def chain_logits(peer, token_ids: np.ndarray) -> np.ndarray:
  """Returns f32[tokens, V]."""
  return peer(torch.tensor(token_ids)[None].long()).logits[0].numpy()


def tree_logits(peer, token_ids: np.ndarray) -> np.ndarray:
  """Returns f32[nodes, V]; the nodes' tokens follow those of the prefix."""
  num_prefix = model_cases.NUM_PREFIX
  nodes = token_ids[num_prefix:]
  chains = (
    [*token_ids[:num_prefix], *nodes[model_cases.tree_path(node)]]
    for node in range(len(model_cases.PARENTS))
  )
  return np.stack([chain_logits(peer, np.array(ids))[-1] for ids in chains])


def _rounded(logits: np.ndarray) -> list:
  return [[float(f'{x:.6g}') for x in row] for row in logits.tolist()]


def _record_cases() -> dict:
  record = {}
  for name, (family, changes) in model_cases.CASES.items():
    with tempfile.TemporaryDirectory() as directory:
      path = pathlib.Path(directory)
      testing.write_tiny_checkpoint(path, family, **changes)
      peer = load_peer(path)
    ids = model_cases.token_ids()
    record[name] = {
      'chain': _rounded(model_cases.sample(chain_logits(peer, ids))),
      'tree': _rounded(model_cases.sample(tree_logits(peer, ids))),
    }
  return record


@torch.no_grad()
def _record_greedy(name: str, prompts: tuple[str, ...]) -> list:
  """Returns tokens, and where the choice was close by how much."""
  path = builtin.fetch(name)
  peer = transformers.AutoModelForCausalLM.from_pretrained(
    path.parent,
    gguf_file=path.name,
    dtype=torch.float32,
    attn_implementation='eager',
  ).eval()
  peer_tokenizer = transformers.AutoTokenizer.from_pretrained(
    path.parent, gguf_file=path.name
  )
  records = []
  for prompt in prompts:
    ids = tokenizer.encode_prompt(peer_tokenizer, prompt)
    output = peer.generate(
      torch.tensor([ids]),
      attention_mask=torch.ones(1, len(ids)),
      do_sample=False,
      max_new_tokens=model_cases.NUM_NEW_TOKENS,
      output_logits=True,
      return_dict_in_generate=True,
    )
    best = torch.cat(output.logits).topk(2).values
    gaps = (best[:, 0] - best[:, 1]).tolist()
    records.append(
      {
        'prompt_ids': ids,
        'token_ids': output.sequences[0, len(ids) :].tolist(),
        'gaps': {i: float(f'{g:.3g}') for i, g in enumerate(gaps) if g < 0.01},
      }
    )
  return records


if __name__ == '__main__':
  golden = {
    'transformers': transformers.__version__,
    'torch': torch.__version__,
    'tiny': _record_cases(),
    'smollm2-135m-instruct': _record_greedy(
      'smollm2-135m-instruct', model_cases.CHAT_PROMPTS
    ),
    'gemma-3-270m': _record_greedy('gemma-3-270m', model_cases.PLAIN_PROMPTS),
  }
  file = pathlib.Path(__file__).with_name('models.json')
  file.write_text(json.dumps(golden) + '\n')
