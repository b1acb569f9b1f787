r"""Trains a draft model on what its target wrote.

  swiftspec train_draft --data=data --output_dir=draft \
    --init_layers=0,1,29 --output_vocab_size=8192 --num_steps=2000

Afterwards `swiftspec_jax.load('draft', draft_of=target)` and --draft=draft
load it. The folder also gets metrics.jsonl, training.png and checkpoints;
run the same command again to go on after an interruption.
"""

import pathlib
import time

import jax
from absl import flags
from tqdm import tqdm

import swiftspec_jax as ss
from swiftspec_jax import errors
from swiftspec_jax.checkpoint.drafts import draft as draft_lib
from swiftspec_jax.cli import program, training_log
from swiftspec_jax.cli.flags import flag_values, host_flags, shared_flags
from swiftspec_jax.config.architecture import Recurrent
from swiftspec_jax.distillation import (
  evaluation,
  losses,
  shards,
  student,
  training,
)
from swiftspec_jax.distillation import trainer as trainer_lib
from swiftspec_jax.runtime import sharding

_DATA = flags.DEFINE_string(
  'data', None, 'Folder that swiftspec generate_data wrote.', required=True
)
_OUTPUT_DIR = flags.DEFINE_string(
  'output_dir', None, 'Where the draft and all about it go.', required=True
)
_START_FROM = flags.DEFINE_string(
  'start_from',
  None,
  'Draft whose parameters are the first ones; its outputs may be others.',
)
flags.DEFINE_list(
  'init_layers', [], "Layers of the target that the draft's begin as."
)
_NUM_LAYERS = flags.DEFINE_integer(
  'num_layers', None, 'Layers of a draft without --init_layers.', lower_bound=1
)
_SIZES = {
  name: flags.DEFINE_integer(name, None, f"{text}; default: the target's.")
  for name, text in (
    ('embed_dim', "Width; another one than the target's is slow to learn"),
    ('num_heads', 'Query heads'),
    ('num_kv_heads', 'Key and value heads'),
    ('ffw_dim', 'Width inside the feed-forward blocks'),
    ('output_vocab_size', 'Tokens that the draft can propose'),
  )
}
_LOSSES = {
  name: flags.DEFINE_float(f'{name}_weight', value, f'Weight of the {text}.')
  for name, value, text in (
    ('cross_entropy', 0.5, "loss on the target's most probable token"),
    ('kl', 0.5, "divergence from the target's distribution"),
    ('total_variation', 0.0, 'probability that sampling rejects'),
  )
}
_READS_FEATURES = flags.DEFINE_bool(
  'reads_features',
  False,
  "The draft reads outputs of the target's layers (EAGLE-3), those that "
  'generate_data --feature_layers stored.',
)
_NUM_BLOCKS = flags.DEFINE_integer(
  'recurrent_blocks',
  None,
  'Number of residual blocks of a recurrent head (ReDrafter), which the draft '
  "is then, without layers. Its data hold the output of the target's last "
  'layer alone.',
  lower_bound=0,
)
_HEAD_WIDTH = flags.DEFINE_integer(
  'recurrent_width',
  None,
  "With --recurrent_blocks: their width; default: the target's.",
  lower_bound=1,
)
_TRAINING = flag_values.define_fields(
  training.TrainingConfig,
  {
    'num_steps': 'Optimiser steps.',
    'tokens_per_batch': 'Tokens of a step.',
    'learning_rate': 'At its peak.',
    'warmup_steps': 'Steps until the peak.',
    'prompt_weight': 'Of tokens of prompts.',
    'user_weight': "Of the target's words as a user.",
    'num_passes': 'With --reads_features or --recurrent_blocks: length of the '
    'chains that it is trained for.',
  },
)
_COMPUTE_DTYPE = flags.DEFINE_enum(
  'compute_dtype',
  None,
  ['float32', 'bfloat16'],
  'Of products. Default: float32 on CPU, bfloat16 elsewhere.',
)
_OPTIMISER = flags.DEFINE_enum(
  'optimiser',
  'adamw',
  training.OPTIMISERS,
  'Muon turns the layers, with AdamW for norms and unembedding.',
)
_STORED_DTYPE = flags.DEFINE_enum(
  'stored_dtype',
  'float16',
  draft_lib.STORED_DTYPES,
  'Of the weights of the draft in its file; int8 has a scale for each row.',
)
_EVALUATE_EVERY = flags.DEFINE_integer(
  'evaluate_every',
  200,
  'Steps between evaluations; each also writes a checkpoint.',
  lower_bound=1,
)


def main() -> None:
  """Runs the program."""
  host_flags.initialize()
  shared_flags.check(['autoregressive'])
  target = shared_flags.load_target(is_wide=True)
  config = _config(target)
  start_from = None
  if _START_FROM.value:
    start_from = ss.load(_START_FROM.value, draft_of=target, dtype='float32')
  output_dir = pathlib.Path(_OUTPUT_DIR.value)
  trainer = trainer_lib.Trainer(
    config,
    target,
    pathlib.Path(_DATA.value),
    output_dir,
    devices=jax.devices(),
    start_from=start_from,
  )
  log = training_log.TrainingLog(output_dir, trainer.step)
  _train(trainer, log, config.num_steps)
  figures = evaluation.summarize(trainer.held_out_batches())
  if sharding.is_first_process():
    print(training_log.table(figures))
    print(f'the draft is in {output_dir}')


def _recurrent(target: ss.Model) -> Recurrent | None:
  """Returns the head that the flags describe, if they describe one."""
  if _NUM_BLOCKS.value is None:
    if _HEAD_WIDTH.value is not None:
      raise errors.UserError('--recurrent_width needs --recurrent_blocks')
    return None
  return Recurrent(
    num_blocks=_NUM_BLOCKS.value,
    width=_HEAD_WIDTH.value or target.config.embed_dim,
  )


def _config(target: ss.Model) -> training.TrainingConfig:
  platform = jax.devices()[0].platform
  default = 'float32' if platform == 'cpu' else 'bfloat16'
  feature_layers = ()
  head = _recurrent(target)
  if _READS_FEATURES.value or head:
    feature_layers = shards.feature_layers(pathlib.Path(_DATA.value))
  return training.TrainingConfig(
    student=student.StudentConfig(
      init_layers=flag_values.numbers(
        'init_layers', 'layer numbers such as 0,1'
      ),
      feature_layers=feature_layers,
      recurrent=head,
      num_layers=_NUM_LAYERS.value,
      **{name: holder.value for name, holder in _SIZES.items()},
    ),
    loss=losses.LossWeights(**{k: v.value for k, v in _LOSSES.items()}),
    compute_dtype=_COMPUTE_DTYPE.value or default,
    optimiser=_OPTIMISER.value,
    seed=flags.FLAGS.seed,
    **{name: holder.value for name, holder in _TRAINING.items()},
  )


def _train(trainer, log, num_steps: int) -> None:
  if trainer.step == 0:
    log.add(0, held_out=evaluation.summarize(trainer.held_out_batches(2)))
  bar = tqdm(
    total=num_steps,
    initial=trainer.step,
    unit='step',
    disable=not sharding.is_first_process(),
  )
  started = time.monotonic()
  with bar:
    for metrics in trainer.run():
      log.add(
        trainer.step, seconds=time.monotonic() - started, training=metrics
      )
      bar.set_postfix(
        loss=f'{metrics["loss"]:.3f}', agreement=f'{metrics["agreement"]:.3f}'
      )
      bar.update()
      is_last = trainer.step == num_steps
      if is_last or trainer.step % _EVALUATE_EVERY.value == 0:
        held_out = evaluation.summarize(trainer.held_out_batches(8))
        log.add(trainer.step, held_out=held_out)
        trainer.save(_STORED_DTYPE.value)
        log.draw()
        figures = held_out['all']
        if not bar.disable:
          bar.write(
            f'step {trainer.step}: held out agreement '
            f'{figures["agreement"]:.3f}, chain of 4 '
            f'{figures["chain_acceptance_length"]:.2f}'
          )


if __name__ == '__main__':
  program.run(main)
