"""Fast, exact LLM decoding in JAX: speculation that changes no output."""

import importlib
import os
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from swiftspec_jax.api.decoding import Decoder
  from swiftspec_jax.api.generation import generate, stream
  from swiftspec_jax.checkpoint.builtin import BUILTIN_DRAFTS, BUILTIN_MODELS
  from swiftspec_jax.checkpoint.drafts.speculators import save_draft
  from swiftspec_jax.checkpoint.load import load
  from swiftspec_jax.checkpoint.orbax import save
  from swiftspec_jax.config import (
    ModelConfig,
    SamplingParams,
    StructuredOutputs,
    TreeConfig,
  )
  from swiftspec_jax.drafters.grammar_draft import GrammarDraft
  from swiftspec_jax.drafters.models.draft_tree import TreeDraft
  from swiftspec_jax.drafters.models.self_draft import SelfDraft
  from swiftspec_jax.drafters.texts.datastore import Datastore
  from swiftspec_jax.drafters.texts.prompt_lookup import PromptLookup
  from swiftspec_jax.drafters.texts.suffix_lookup import SuffixLookup
  from swiftspec_jax.errors import UserError
  from swiftspec_jax.models.model import Model
  from swiftspec_jax.requests import Event, Request
  from swiftspec_jax.requests.results import GenerationResult, GenerationStats
  from swiftspec_jax.runtime.timeline import Timeline

# transformers reads tokenizers here: it need not say that torch is missing.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')

__version__ = '0.2.0'

__all__ = [
  'BUILTIN_DRAFTS',
  'BUILTIN_MODELS',
  'Datastore',
  'Decoder',
  'Event',
  'GenerationResult',
  'GenerationStats',
  'GrammarDraft',
  'Model',
  'ModelConfig',
  'PromptLookup',
  'Request',
  'SamplingParams',
  'SelfDraft',
  'StructuredOutputs',
  'SuffixLookup',
  'Timeline',
  'TreeConfig',
  'TreeDraft',
  'UserError',
  'generate',
  'load',
  'save',
  'save_draft',
  'stream',
]

# Where a name is imported from when it is first used, as JAX takes a second.
_MODULES = {
  'BUILTIN_DRAFTS': 'checkpoint.builtin',
  'BUILTIN_MODELS': 'checkpoint.builtin',
  'Datastore': 'drafters.texts.datastore',
  'Decoder': 'api.decoding',
  'Event': 'requests',
  'GenerationResult': 'requests.results',
  'GenerationStats': 'requests.results',
  'GrammarDraft': 'drafters.grammar_draft',
  'Model': 'models.model',
  'ModelConfig': 'config',
  'PromptLookup': 'drafters.texts.prompt_lookup',
  'Request': 'requests',
  'SamplingParams': 'config',
  'SelfDraft': 'drafters.models.self_draft',
  'StructuredOutputs': 'config',
  'SuffixLookup': 'drafters.texts.suffix_lookup',
  'Timeline': 'runtime.timeline',
  'TreeConfig': 'config',
  'TreeDraft': 'drafters.models.draft_tree',
  'UserError': 'errors',
  'generate': 'api.generation',
  'load': 'checkpoint.load',
  'save': 'checkpoint.orbax',
  'save_draft': 'checkpoint.drafts.speculators',
  'stream': 'api.generation',
}


if not TYPE_CHECKING:  # to a type checker, any name would be there

  def __getattr__(name: str) -> Any:
    """Returns one of `__all__`."""
    if name == 'AdaptiveLookup':
      warnings.warn(
        'ss.AdaptiveLookup is ss.PromptLookup now, with a `policy` if its '
        'length is to be chosen; the old name goes in 0.4',
        DeprecationWarning,
        stacklevel=2,
      )
      name = 'PromptLookup'
    if name == 'drafting':
      warnings.warn(
        'swiftspec_jax.drafting is swiftspec_jax.drafters now; the old name '
        'goes in 0.4',
        DeprecationWarning,
        stacklevel=2,
      )
      return importlib.import_module(f'{__name__}.drafters')
    if name not in _MODULES:
      raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    module = importlib.import_module(f'{__name__}.{_MODULES[name]}')
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
