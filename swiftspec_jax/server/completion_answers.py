"""Answers of /v1/completions."""

from collections.abc import Sequence
from typing import ClassVar

from swiftspec_jax.server import answer_types, answers
from swiftspec_jax.server import echo as echo_lib
from swiftspec_jax.server.echo import Echo
from swiftspec_jax.tree import types


class CompletionFormat(answers.Format):
  """Answers of /v1/completions."""

  _prefix, _whole, _part = 'cmpl-', 'text_completion', 'text_completion'
  _empty: ClassVar = {'text': ''}

  def __init__(self, service, body, requests):
    super().__init__(service, body, requests)
    self._num_top = body.num_top_logprobs
    self._ratings: Sequence[types.Logprobs] = ()
    self._begun: set[int] = set()  # choices whose prompt is told
    self._echoes: list[Echo] = []  # of the prompts that texts begin with
    if body.echo:
      self._opening = self._empty
      self._echoes = [
        echo_lib.echo_of(
          service.model.tokenizer,
          prompt,
          request.token_ids,
          skip_special_tokens=body.skip_special_tokens,
        )
        for prompt, request in zip(
          body.prompts, requests[:: body.n], strict=True
        )
      ]

  def rate(self, ratings):
    self._ratings = ratings

  def _message(self, index, text):
    return {'text': text}

  def _deltas(self, index, text, is_last):
    return [{'text': text}] if text else []

  def _choice(self, index, content, tokens, result):
    choice = super()._choice(index, content, tokens, result)
    if not self._echoes:
      return choice
    number = index // self._n
    echo = self._echoes[number]
    own = choice['logprobs']
    if own is not None:
      own['text_offset'] = [len(echo.text) + x for x in own['text_offset']]
    if index in self._begun:
      return choice
    self._begun.add(index)
    choice['text'] = echo.text + choice['text']
    if self._ratings:
      of_prompt = self._of_prompt(echo, self._ratings[number])
      # Either both have `top_logprobs`, or none.
      choice['logprobs'] = (
        of_prompt
        if own is None
        else {
          key: values and values + own[key] for key, values in of_prompt.items()
        }
      )
    return choice

  def _of_prompt(
    self, echo: Echo, rating: types.Logprobs
  ) -> answer_types.CompletionLogprobs:
    """Returns what is said of the tokens of a prompt, nothing of the first."""
    chosen = zip(echo.token_ids[1:], rating.chosen.tolist(), strict=True)
    top = None
    if self._num_top:
      pairs = zip(
        rating.top_token_ids[:, : self._num_top].tolist(),
        rating.top[:, : self._num_top].tolist(),
        strict=True,
      )
      top = [self._named(zip(*pair, strict=True)) for pair in pairs]
    found = self._logprobs(self._named(chosen), top, echo.offsets)
    found['tokens'].insert(0, self._names[echo.token_ids[0]].text)
    found['token_logprobs'].insert(0, None)
    if top is not None:
      found['top_logprobs'].insert(0, None)
    return found

  def _logprobs(self, chosen, top, offsets):
    names = [name.text for name, _ in chosen]
    values = [value for _, value in chosen]
    if top is not None:
      # With the token itself, which need not be among the most probable.
      top = [
        {**{name.text: value for name, value in pairs}, name: value}
        for name, value, pairs in zip(names, values, top, strict=True)
      ]
    return {
      'tokens': names,
      'token_logprobs': values,
      'top_logprobs': top,
      'text_offset': list(offsets),
    }
