"""Files for --config, which `experiments.tune` and `experiments.plan` write.

`configs/` has some for several hosts.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from swiftspec_jax.cli import output_files, provenance

# What the settings are for, and what was chosen.
FIXED = (
  'target',
  'dtype',
  'weight_dtype',
  'draft',
  'draft_layers',
  'draft_weight_dtype',
  'target_devices',
  'draft_devices',
  'target_processes',
  'draft_processes',
)
TUNED = (
  'mode',
  'num_nodes',
  'width',
  'num_draft_steps',
  'branching',
  'num_restart_steps',
  'waits_for_misses',
  'min_leaf_mass',
  'tree_prompt_lookup',
  'run_ahead',
)
ENTRIES = ('flags', 'device_kind', 'forced_acceptance', 'provenance', 'trials')


def write(
  path: pathlib.Path,
  settings: Mapping[str, Any],
  trials: Sequence[Mapping[str, Any]],
  device_kind: str | None,
) -> None:
  """Makes or replaces a configuration.

  Args:
    path: path of the file.
    settings: values of flags, by name; None stands for the default.
    trials: trials that led to them, for the record.
    device_kind: kind of the devices that they were measured on; None if they
      were measured on none.
  """
  values = {
    'flags': {name: settings.get(name) for name in FIXED + TUNED},
    'device_kind': device_kind,
    'forced_acceptance': settings.get('forced_acceptance'),
    'provenance': provenance.collect(),
    'trials': trials,
  }
  output_files.write_json(path, values)
