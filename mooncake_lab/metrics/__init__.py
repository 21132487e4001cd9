"""From logs and counts to numbers: latencies by both papers' definitions, hit rates, distributions."""

from typing import TYPE_CHECKING

from mooncake_lab.core.averages import mean, percentile, wilson
from mooncake_lab.core.process import lazy_names
from mooncake_lab.metrics.conservation import check_log
from mooncake_lab.metrics.latency import (
    effective,
    effective_request_capacity,
    highest_passing,
    request_table,
    step_ends_s,
    tbt_longest_gaps_s,
    tbt_mean_gap_s,
    token_times_s,
    ttft_s,
)
from mooncake_lab.metrics.perfetto import trace_events, write_perfetto
from mooncake_lab.metrics.summary import RunningSummary, prefill_gpu_s, reused_share, run_summary

if TYPE_CHECKING:
    from mooncake_lab.metrics.hits import (
        covered_tokens,
        replicas_at,
        tier_hit_rates,
        token_hit_rate,
    )
    from mooncake_lab.metrics.load import (
        decode_load_series,
        lagged_correlation,
        period_s,
        prefill_load_series,
        swing,
        wasted_prefill_gpu_s,
    )

__all__ = [
    "RunningSummary",
    "check_log",
    "covered_tokens",
    "decode_load_series",
    "effective",
    "effective_request_capacity",
    "highest_passing",
    "lagged_correlation",
    "mean",
    "percentile",
    "period_s",
    "prefill_gpu_s",
    "prefill_load_series",
    "replicas_at",
    "request_table",
    "reused_share",
    "run_summary",
    "step_ends_s",
    "swing",
    "tbt_longest_gaps_s",
    "tbt_mean_gap_s",
    "tier_hit_rates",
    "token_hit_rate",
    "token_times_s",
    "trace_events",
    "ttft_s",
    "wasted_prefill_gpu_s",
    "wilson",
    "write_perfetto",
]

__getattr__ = lazy_names(__name__, "hits", "load")
