"""The two calls most users need: `generate` and `stream`."""

from collections.abc import Iterator, Sequence

from swiftspec_jax import errors, policies
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.api.decoding import Decoder
from swiftspec_jax.config import SamplingParams, TreeConfig
from swiftspec_jax.drafters.make_drafter import Draft
from swiftspec_jax.models.model import Model
from swiftspec_jax.requests import Request, results

Prompt = str | Sequence[tokenizer_lib.Message] | Sequence[int]


def generate(
  target: Model,
  prompts: str | Sequence[Prompt],
  *,
  draft: Draft = None,
  num_speculative_tokens: int | None = None,
  tree: TreeConfig | None = None,
  policy: policies.Policy | policies.PolicyFn | str | None = None,
  sampling: SamplingParams | Sequence[SamplingParams] | None = None,
  max_new_tokens: int | None = None,
  use_chat_template: bool | None = None,
  batch_size: int | None = None,
) -> list[results.GenerationResult]:
  """Continues each prompt.

  Args:
    target: model that defines the output.
    prompts: one text, or a sequence of texts, conversations (message dicts)
      or token id sequences.
    draft: model or drafter, such as `PromptLookup()`, that speculates; None
      for plain decoding. The output is the same.
    num_speculative_tokens: length of a draft model's chain, or as `Decoder`
      says.
    tree: sizes of the token tree that a draft model grows instead of a chain.
      If it lies on devices of its own, it does so while the target verifies.
    policy: policy that says how much to speculate, as `Decoder` takes it.
    sampling: parameters for all prompts, or one for each. Greedy by default.
    max_new_tokens: shorthand for that field of the default `sampling`.
    use_chat_template: whether a text is the user's turn of a conversation;
      None is yes if the model has a chat template.
    batch_size: rows that decode together; by default all prompts, up to 8.

  Returns:
    A result for each prompt, in their order.

  Raises:
    UserError: bad input; nothing has been decoded then.
  """
  prompts = [prompts] if isinstance(prompts, str) else list(prompts)
  requests = _requests(
    target, prompts, sampling, max_new_tokens, use_chat_template
  )
  if batch_size is None:
    batch_size = min(max(len(prompts), 1), 8)
  decoder = Decoder(
    target,
    draft,
    num_speculative_tokens=num_speculative_tokens,
    tree=tree,
    policy=policy,
    batch_size=batch_size,
  )
  finished = {
    event.index: event.result
    for event in decoder.run(requests)
    if event.result is not None
  }
  return [finished[i] for i in range(len(prompts))]


def stream(
  target: Model,
  prompt: Prompt,
  *,
  draft: Draft = None,
  num_speculative_tokens: int | None = None,
  tree: TreeConfig | None = None,
  policy: policies.Policy | policies.PolicyFn | str | None = None,
  sampling: SamplingParams | None = None,
  max_new_tokens: int | None = None,
  use_chat_template: bool | None = None,
) -> Iterator[str]:
  """Yields the text of one continuation piece by piece.

  The arguments are those of `generate`; bad input raises at the call. Closing
  the iterator early stops the decoding.
  """
  requests = _requests(
    target, [prompt], sampling, max_new_tokens, use_chat_template
  )
  decoder = Decoder(
    target,
    draft,
    num_speculative_tokens=num_speculative_tokens,
    tree=tree,
    policy=policy,
  )
  events = decoder.run(requests)
  return (event.text for event in events if event.text)


def _requests(
  target, prompts, sampling, max_new_tokens, use_chat_template
) -> list[Request]:
  if sampling is None:
    limit = {} if max_new_tokens is None else {'max_new_tokens': max_new_tokens}
    sampling = SamplingParams(**limit)
  elif max_new_tokens is not None:
    raise errors.UserError(
      f'max_new_tokens={max_new_tokens} is given twice: set it in `sampling`'
    )
  if isinstance(sampling, SamplingParams):
    sampling = [sampling] * len(prompts)
  if len(sampling) != len(prompts):
    raise errors.UserError(
      f'{len(prompts)} prompts, but {len(sampling)} sampling parameters'
    )
  return [
    Request(
      token_ids=tuple(
        tokenizer_lib.encode_prompt(
          target.tokenizer, prompt, use_chat_template=use_chat_template
        )
      ),
      sampling=params,
    )
    for prompt, params in zip(prompts, sampling, strict=True)
  ]
