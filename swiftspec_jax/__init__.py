"""Fast, exact LLM decoding in JAX: speculation that changes no output."""

import warnings
from typing import Any

from swiftspec_jax.checkpoint.builtin import BUILTIN_DRAFTS, BUILTIN_MODELS
from swiftspec_jax.checkpoint.drafts.speculators import save_draft
from swiftspec_jax.checkpoint.load import load
from swiftspec_jax.checkpoint.orbax import save
from swiftspec_jax.config import ModelConfig, SamplingParams, TreeConfig
from swiftspec_jax.decoding import Decoder
from swiftspec_jax.drafting.texts.prompt_lookup import PromptLookup
from swiftspec_jax.errors import UserError
from swiftspec_jax.generate import generate, stream
from swiftspec_jax.model import Model
from swiftspec_jax.requests import Event, Request
from swiftspec_jax.results import GenerationResult, GenerationStats
from swiftspec_jax.serving.drafters.models.beam_search import BeamDraft
from swiftspec_jax.serving.drafters.models.draft_tree import TreeDraft
from swiftspec_jax.serving.drafters.models.self_draft import SelfDraft
from swiftspec_jax.serving.drafters.models.snapkv_draft import SnapKVDraft
from swiftspec_jax.serving.drafters.texts.datastore import Datastore
from swiftspec_jax.serving.drafters.texts.phrase_draft import PhraseDraft
from swiftspec_jax.serving.drafters.texts.suffix_lookup import SuffixLookup
from swiftspec_jax.timeline import Timeline

__version__ = '0.2.0'

__all__ = [
  'BUILTIN_DRAFTS',
  'BUILTIN_MODELS',
  'BeamDraft',
  'Datastore',
  'Decoder',
  'Event',
  'GenerationResult',
  'GenerationStats',
  'Model',
  'ModelConfig',
  'PhraseDraft',
  'PromptLookup',
  'Request',
  'SamplingParams',
  'SelfDraft',
  'SnapKVDraft',
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


def __getattr__(name: str) -> Any:
  """Finds what had another name in 0.2."""
  if name == 'AdaptiveLookup':
    warnings.warn(
      'ss.AdaptiveLookup is ss.PromptLookup, with a `policy` if its length is '
      'to be chosen; the old name goes in 0.4',
      DeprecationWarning,
      stacklevel=2,
    )
    return PromptLookup
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
