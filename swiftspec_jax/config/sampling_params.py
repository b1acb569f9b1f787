"""How the tokens of a request are chosen."""

import dataclasses
import math
from collections.abc import Mapping

from swiftspec_jax import errors
from swiftspec_jax.config.structured_outputs import StructuredOutputs

MAX_TOP_LOGPROBS = 20  # as OpenAI has it
_LEAST_TEMPERATURE = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
  """How the tokens of one request are chosen; names as in vLLM.

  Attributes:
    temperature: divisor of the logits; 0 is greedy, 1 the model's own
      distribution. Below 1e-5 it becomes 0, as in vLLM's sampler: such a
      distribution is greedy in float32, or overflows.
    top_k: number of the most probable tokens that are kept; 0 keeps all.
    top_p: least sum of probabilities that the kept tokens have, the most
      probable ones first; 1 keeps all.
    min_p: least probability of a kept token, as a share of the most probable
      one's.
    repetition_penalty: factor against tokens seen in prompt or output: positive
      logits are divided by it, negative ones multiplied; 1 is off (CTRL paper,
      section 4).
    presence_penalty: number subtracted from logits of tokens seen in the
      output, as in OpenAI's API.
    frequency_penalty: number subtracted from the logit of a token for each time
      that it was seen in the output.
    logit_bias: numbers added to logits, by token.
    banned_token_ids: tokens that are never emitted.
    forced_token_ids: tokens that the output starts with.
    seed: seed of the noise. The same seed, prompt, models and mode give the
      same tokens whatever else is in the batch.
    stop: strings that end the output. One that names a special token is found
      though the text does not show it.
    stop_token_ids: tokens that end the output, beside those of the model.
    include_stop_str_in_output: whether the text has the stop string or the
      token that ended it.
    min_tokens: number of first tokens among which there is none that ends the
      output, and no end of a stop string.
    max_new_tokens: token limit; None is up to the context limit.
    ignore_eos: whether to go on after an end token of the model
      (`ModelConfig.eos_token_ids`); `stop_token_ids` still end the output.
    skip_special_tokens: whether the text leaves special tokens out.
    logprobs: whether to return the log-probability of each token under the
      model's own distribution (before temperature, penalties and truncation).
    top_logprobs: number of the most probable tokens at each position that are
      returned, too, with their log-probabilities; needs `logprobs`.
    structured_outputs: grammar that the output follows. What it forbids has no
      probability, in `logprobs` neither, before anything else changes the
      distribution. The output ends where the grammar allows nothing more.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  repetition_penalty: float = 1.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
  banned_token_ids: tuple[int, ...] = ()
  forced_token_ids: tuple[int, ...] = ()
  seed: int = 0
  stop: tuple[str, ...] = ()
  stop_token_ids: tuple[int, ...] = ()
  include_stop_str_in_output: bool = False
  min_tokens: int = 0
  max_new_tokens: int | None = 256
  ignore_eos: bool = False
  skip_special_tokens: bool = True
  logprobs: bool = False
  top_logprobs: int = 0
  structured_outputs: StructuredOutputs | None = None

  def __post_init__(self):
    checks = {
      'temperature': (0 <= self.temperature < math.inf, 'finite and >= 0'),
      'top_k': (0 <= self.top_k < 2**31, '>= 0 (0 keeps all tokens)'),
      'top_p': (0 < self.top_p <= 1, 'in (0, 1]'),
      'min_p': (0 <= self.min_p < 1, 'in [0, 1)'),
      'repetition_penalty': (
        0 < self.repetition_penalty < math.inf,
        'finite and > 0',
      ),
      'presence_penalty': (-2 <= self.presence_penalty <= 2, 'in [-2, 2]'),
      'frequency_penalty': (-2 <= self.frequency_penalty <= 2, 'in [-2, 2]'),
      'seed': (0 <= self.seed < 2**32, 'in [0, 2**32)'),
      'max_new_tokens': (
        self.max_new_tokens is None or self.max_new_tokens >= 1,
        '>= 1, or None for the context limit',
      ),
      'min_tokens': (
        0 <= self.min_tokens <= (self.max_new_tokens or 2**31 - 1),
        '>= 0, and at most max_new_tokens',
      ),
      'top_logprobs': (
        0 <= self.top_logprobs <= (MAX_TOP_LOGPROBS if self.logprobs else 0),
        f'0 to {MAX_TOP_LOGPROBS}, and 0 without logprobs',
      ),
      'stop': (
        not isinstance(self.stop, str) and all(self.stop),
        'a sequence of non-empty strings',
      ),
    }
    if self.structured_outputs is not None:
      empty = 'empty with structured_outputs, which may allow nothing else'
      checks |= {
        'banned_token_ids': (not self.banned_token_ids, empty),
        'forced_token_ids': (not self.forced_token_ids, empty),
        'logit_bias': (
          all(map(math.isfinite, self.logit_bias.values())),
          'finite with structured_outputs, which may allow nothing else',
        ),
      }
    errors.check_fields(self, checks)
    if self.temperature < _LEAST_TEMPERATURE:
      object.__setattr__(self, 'temperature', 0.0)

  def check_vocabulary(self, vocab_size: int) -> None:
    """Raises UserError if a token id lies outside the vocabulary."""
    for field in (
      'logit_bias',
      'banned_token_ids',
      'forced_token_ids',
      'stop_token_ids',
    ):
      for token_id in getattr(self, field):
        if not 0 <= token_id < vocab_size:
          raise errors.UserError(
            f'{field} names token {token_id}; ids are 0 to {vocab_size - 1}'
          )
