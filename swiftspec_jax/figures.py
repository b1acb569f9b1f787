"""The figures of decoding: one list, and what each is called in each place.

In Python a figure is a field or property of `GenerationStats`, and a benchmark
writes it to results.jsonl under the same name. `HOST_SECONDS` alone is no
request's, as requests share rounds: it is that of a `Decoder`.
"""

import dataclasses

HOST_SECONDS = 'host_seconds'
_VERDICTS = 'swiftspec:spec_decode_num_tree_verdicts'
_PER_LENGTH = 'swiftspec:spec_decode_num_rounds_per_length'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
  """Where else a figure is.

  Attributes:
    metric: name in /metrics, without the `_total` of counters; None if it is
      not there.
    column: column of rows.jsonl, which `serve_load` writes, that says the same
      or follows from it; None if there is none.
  """

  metric: str | None = None
  column: str | None = None


FIGURES = {
  'prompt_tokens': Figure(metric='vllm:prompt_tokens'),
  'new_tokens': Figure(metric='vllm:generation_tokens', column='throughput'),
  'num_rounds': Figure(metric=_PER_LENGTH, column='chosen_lengths'),
  'num_plain_rounds': Figure(metric=_PER_LENGTH, column='chosen_lengths'),
  'num_tree_rounds': Figure(),
  'chosen_lengths': Figure(metric=_PER_LENGTH, column='chosen_lengths'),
  'num_drafted': Figure(
    metric='vllm:spec_decode_num_draft_tokens',
    column='mean_num_speculative_tokens',
  ),
  'num_accepted': Figure(
    metric='vllm:spec_decode_num_accepted_tokens', column='acceptance_length'
  ),
  'drafted_per_position': Figure(
    metric='swiftspec:spec_decode_num_draft_tokens_per_pos',
    column='acceptance_rate_per_position',
  ),
  'accepted_per_position': Figure(
    metric='vllm:spec_decode_num_accepted_tokens_per_pos',
    column='acceptance_rate_per_position',
  ),
  'num_hits': Figure(metric=_VERDICTS, column='hit_rate'),
  'num_late_hits': Figure(metric=_VERDICTS, column='late_hit_rate'),
  'num_misses': Figure(metric=_VERDICTS, column='miss_rate'),
  'num_draft_forwards': Figure(
    metric='swiftspec:spec_decode_num_draft_forwards_waited'
  ),
  'ttft_seconds': Figure(
    metric='vllm:time_to_first_token_seconds', column='mean_ttft'
  ),
  'tpot_seconds': Figure(
    metric='vllm:request_time_per_output_token_seconds', column='mean_tpot'
  ),
  'latency_seconds': Figure(
    metric='vllm:e2e_request_latency_seconds', column='mean_e2e_latency'
  ),
  'decode_seconds': Figure(),
  'decoded_tokens': Figure(),
  HOST_SECONDS: Figure(
    metric='swiftspec:step_host_seconds', column='host_seconds_per_step'
  ),
}
