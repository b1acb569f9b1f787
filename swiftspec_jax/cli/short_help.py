"""What `swiftspec CMD --help` prints: the flags that people use, and examples.

It imports nothing that takes long, so the flags are named here, too. A test
compares names and defaults with those of the programs.
"""

import dataclasses
from collections.abc import Mapping, Sequence

ASKED = ('-h', '--help', '--helpshort')
ALL_ASKED = '--helpfull'

# The values are those of the programs; capitals stand for one to choose.
_TARGET = {
  'target=smollm2-135m-instruct': 'model: a name, a folder, .gguf or hub id',
}
_MODEL = {
  **_TARGET,
  'draft=MODEL': 'model that drafts; some have a built-in one',
  'weight_dtype=TYPE': 'quantize, such as int8_dynamic on CPUs or int8',
}
_SAMPLING = {
  'max_new_tokens=256': 'limit of each output',
  'temperature=0': '0 is greedy, 1 samples as the model says',
  'top_p=1': 'sample from the most probable tokens',
  'seed=0': 'of the noise of sampling',
}
_MODE = {'mode=auto': 'how to decode; autoregressive is plain'}
_RESULTS = {'output_dir=DIR': 'new or empty directory for the results'}
_CHAT = {
  'system=TEXT': 'system prompt, for models that chat',
  'stats': 'more figures after each answer',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
  """A command of `swiftspec`, and its help.

  Attributes:
    module: module that it runs.
    summary: line in the list of commands.
    about: text of lines of 80 columns.
    arguments: arguments that it needs, as people write them.
    flags: text for each flag, which is written with its default.
    examples: command lines without the `swiftspec` in front.
  """

  module: str
  summary: str
  about: str
  arguments: str = ''
  flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
  examples: Sequence[str]


COMMANDS = {
  'demo': Command(
    module='swiftspec_jax.cli.demo',
    summary='the same answers, plainly and with speculation',
    about='Downloads a small model once (93 MB) and answers four prompts, '
    'plainly and\nwith speculation, side by side. Takes a minute or two.',
    flags=_TARGET,
    examples=('demo', 'demo --target=qwen2.5-coder-1.5b-instruct'),
  ),
  'doctor': Command(
    module='swiftspec_jax.cli.doctor',
    summary='what is installed, and how fast a step is',
    about='Prints versions, devices, the cache folder and the kernels that are '
    'chosen and\nwhy. Then it measures the memory bandwidth and a step of a '
    'small model.',
    flags={'nostep': 'load and measure nothing'},
    examples=('doctor', 'doctor --nostep'),
  ),
  'generate': Command(
    module='swiftspec_jax.cli.generate',
    summary='decode a prompt, or a file of prompts',
    about='Continues a prompt, as the turn of a user if the model chats. The '
    'text goes to\nstandard output, its speed to standard error. Speculation '
    'changes no output.',
    arguments='--prompt=TEXT',
    flags={
      'prompt=TEXT': 'text to continue',
      'prompt_file=FILE': 'file with a prompt, or with many (.jsonl)',
      **_MODEL,
      **_SAMPLING,
      **_MODE,
      **_CHAT,
    },
    examples=(
      "generate --prompt='Why is the sky blue?' --max_new_tokens=64",
      "generate --target=model.gguf --temperature=0.7 --prompt='Hello!'",
      'generate --mode=prompt_lookup --prompt_file=note.txt',
    ),
  ),
  'chat': Command(
    module='swiftspec_jax.cli.generate',
    summary='talk with a model, in the terminal',
    about='Answers what you type. /reset forgets the conversation, /quit or '
    'Ctrl-D ends\nit, and Ctrl-C stops an answer.',
    flags={**_MODEL, **_SAMPLING, **_MODE, **_CHAT},
    examples=('chat', 'chat --target=MODEL --temperature=0.7 --top_p=0.9'),
  ),
  'serve': Command(
    module='swiftspec_jax.cli.serve',
    summary="an HTTP server with OpenAI's interface, and a page",
    about='Serves /v1/completions and /v1/chat/completions, and a page with a '
    'chat at /.\nCtrl-C ends it when what runs is done, a second one at once.',
    flags={
      'port=8000': '0 takes a free one',
      'host=127.0.0.1': '0.0.0.0 for other machines, with --api_key',
      'api_key=KEY': 'key that clients must give',
      **_MODEL,
      **_MODE,
      'policy=goodput': 'how much to speculate; none is not at all',
      'rows=1,2,4,8': 'requests in a step; the last is most',
      'contexts=256,1024': 'tokens of a request; the last is most',
      'target_devices=1': 'devices that share the target',
    },
    examples=(
      'serve',
      'serve --target=Qwen/Qwen3-0.6B --contexts=1024,4096 --port=9000',
    ),
  ),
  'generate_data': Command(
    module='swiftspec_jax.cli.generate_data',
    summary='let a target write the text that its draft learns from',
    about='The target invents users and answers them, and does tasks with '
    'documents. Run it\nagain to go on where it stopped.',
    arguments='--output_dir=DIR',
    flags={
      'output_dir=DIR': 'where the shards go',
      **_TARGET,
      'num_tokens=2000000': "stop when the target's answers have as many",
      'prompts=FILE': 'JSON lines, answered first',
      'documents=FILES': 'text files for tasks, as quoted glob patterns',
      'feature_layers=LAYERS': 'layers whose outputs are stored, for EAGLE-3',
    },
    examples=('generate_data --target=MODEL --output_dir=data',),
  ),
  'train_draft': Command(
    module='swiftspec_jax.cli.train_draft',
    summary='train a draft on what its target wrote',
    about='The folder gets the draft, figures of the training and checkpoints. '
    'Run the same\ncommand again to go on after an interruption.',
    arguments='--data=DIR --output_dir=DIR',
    flags={
      'data=DIR': 'folder of generate_data',
      'output_dir=DIR': 'where the draft goes',
      **_TARGET,
      'init_layers=LAYERS': "layers of the target that the draft's begin as",
      'output_vocab_size=N': 'tokens that the draft can propose',
      'reads_features': "the draft reads outputs of the target's layers",
      'num_steps=1000': 'steps of the optimiser',
    },
    examples=(
      'train_draft --data=data --output_dir=draft --init_layers=0,1,29',
      'generate --draft=draft --mode=serial',
    ),
  ),
  'build_store': Command(
    module='swiftspec_jax.cli.build_store',
    summary='write the texts that mode datastore looks drafts up in',
    about='Whoever is served may see parts of the texts, so give texts of one '
    'owner a store\nof their own.',
    arguments='--output_dir=DIR',
    flags={
      **_RESULTS,
      'texts=FILES': 'text files, as quoted glob patterns',
      'shards=DIR': 'folder of generate_data',
      'target=smollm2-135m-instruct': 'model whose tokens they become',
    },
    examples=(
      "build_store --texts='docs/*.md' --output_dir=store",
      'serve --mode=datastore --datastore=store',
    ),
  ),
  'benchmark': Command(
    module='experiments.benchmark',
    summary='speed and acceptance of ways to decode',
    about='Measures modes of decoding against each other: each decodes all '
    'prompts, one at\na time. Ctrl-C keeps what is done, --resume goes on.',
    arguments='--output_dir=DIR',
    flags={
      **_RESULTS,
      'modes=MODES': 'such as autoregressive,auto; by default all',
      **_MODEL,
      'max_new_tokens=256': 'limit of each output',
      'prompts=FILE': 'JSON lines; by default 60 prompts of 6 tasks',
      'limit=N': 'how many prompts to take',
      'repeats=1': 'how often to measure each prompt',
      'peers=NAMES': 'also run hf (transformers) or llama_cpp',
      'resume': 'go on with the results in --output_dir',
    },
    examples=(
      'benchmark --limit=8 --max_new_tokens=128 --output_dir=results',
      'benchmark --modes=autoregressive,serial --output_dir=results',
    ),
  ),
  'tune': Command(
    module='experiments.tune',
    summary='find the best sizes of trees for this machine',
    about='Measures the forwards of target and draft, tries sizes of the tree '
    'by decoding\nprompts, and writes a file for --config.',
    arguments='--output=FILE',
    flags={
      'output=FILE': 'file of the configuration',
      'mode=async': 'what to tune: async, or serial',
      **_MODEL,
      'limit=4': 'how many prompts to decode',
      'repeats=3': 'how often to decode each',
    },
    examples=(
      'tune --mode=serial --output=tuned.json',
      "generate --config=tuned.json --prompt='Hello!'",
    ),
  ),
  'plan': Command(
    module='experiments.plan',
    summary='predict the speed on chips that are not there',
    about='Runs the token tree on this CPU with drafts of forced acceptance, '
    'and prices\nits rounds with predicted times of a chip.',
    arguments='--config=FILE --output_dir=DIR',
    flags={
      'config=FILE': 'Python file with a CONFIG, see configs/',
      **_RESULTS,
      'goal=throughput': 'or latency: what the best plan is chosen by',
      'measured=DIR': 'folder of experiments.accelerator_report',
      'num_requests=24': 'requests to run on this CPU',
    },
    examples=(
      'plan --config=configs/llama3_70b_3b_8xh200.py --output_dir=results',
    ),
  ),
  'report': Command(
    module='experiments.report',
    summary='one page of result folders; compare two of them',
    about='Makes a page of folders that --output_dir named. It needs no other '
    'file and no\nnetwork.',
    arguments='DIR... --output=FILE',
    flags={
      'output=FILE': 'HTML file',
      'compare': 'compare the second of two with the first',
    },
    examples=(
      'report results --output=report.html',
      'report before after --compare --output=report.html',
    ),
  ),
}


def of_all() -> str:
  """Returns the list of commands."""
  lines = [f'  {name:<13} {x.summary}' for name, x in COMMANDS.items()]
  return '\n'.join(
    [
      'swiftspec COMMAND [--flag=value ...]',
      '',
      *lines,
      '',
      'swiftspec COMMAND --help has the flags of a command, and examples.',
      'swiftspec --version prints the version.',
      'python -m experiments.NAME runs further programs; the docs list them.',
    ]
  )


def of_command(name: str) -> str:
  """Returns the help of a command, which fits on a screen."""
  command = COMMANDS[name]
  usage = f'swiftspec {name} {command.arguments}'.rstrip()
  flags = [
    f'  {f"--{flag}":<31} {text}' for flag, text in command.flags.items()
  ]
  return '\n'.join(
    [
      f'{usage} [--flag=value ...]',
      '',
      command.about,
      '',
      *([*flags, ''] if flags else []),
      *(f'  swiftspec {example}' for example in command.examples),
      '',
      f'swiftspec {name} {ALL_ASKED} lists all flags.',
    ]
  )


def of_module(module: str) -> str | None:
  """Returns the help of a program in any package; None without one here."""
  for name, command in COMMANDS.items():
    if command.module.rpartition('.')[2] == module.rpartition('.')[2]:
      return of_command(name)
  return None
