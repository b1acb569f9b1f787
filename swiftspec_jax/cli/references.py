"""Outputs of plain decoding, which --forced_acceptance tells the draft."""

import dataclasses

import swiftspec_jax as ss


class References:
  """Decodes each request plainly, once."""

  def __init__(self, target: ss.Model):
    """Decodes nothing yet."""
    self.decoder = ss.Decoder(target)
    self._token_ids: dict[tuple[tuple[int, ...], str], tuple[int, ...]] = {}

  def add_to(self, request: ss.Request) -> ss.Request:
    """Returns `request` with its reference."""
    key = request.token_ids, repr(request.sampling)
    if key not in self._token_ids:
      *_, last = self.decoder.run([request])
      self._token_ids[key] = last.result.token_ids
    return dataclasses.replace(
      request, reference_token_ids=self._token_ids[key]
    )
