"""How long things take: model shapes, hardware, FLOPs and bytes, roofline, latency models, calibration."""

from typing import TYPE_CHECKING

from mooncake_lab.core.process import lazy_names
from mooncake_lab.perf.cpp import (
    CppGroup,
    chunk_seconds,
    chunk_sizes,
    cpp_finish_s,
    cpp_network_bytes,
    cpp_prefill_s,
)
from mooncake_lab.perf.hf_config import KV_DTYPES, kvcache_of_config
from mooncake_lab.perf.iteration import (
    IterationCost,
    LinearCost,
    Workload,
    balanced_ratio,
    decode_accounts,
    piggyback_round,
    separate_round,
    transferred,
)
from mooncake_lab.perf.kvcache import KVCacheShape, LayerGroup, linear_kvcache
from mooncake_lab.perf.latency import (
    DecodeLatency,
    HybridLatency,
    LatencyModel,
    LinkLatency,
    PrefillLatency,
    check_floor,
    probe_floor,
)
from mooncake_lab.perf.roofline import (
    PRINTED_A,
    PRINTED_B,
    Work,
    attainable_flops_per_s,
    decode_work,
    exact_prefill_flops,
    kernel_work,
    kv_bytes,
    prefill_work,
    printed_prefill_flops,
    reuse_bandwidth_bytes_per_s,
    reuse_crossover_tokens,
    ridge_flops_per_byte,
)
from mooncake_lab.perf.specs import HARDWARE, MODELS, Hardware, ModelShape, hardware, model_shape

if TYPE_CHECKING:
    from mooncake_lab.perf.calibration import (
        Calibration,
        as_told,
        column_sizes,
        fit_decode,
        fit_link,
        fit_prefill,
        nonnegative_fit,
        per_request_cost_s,
    )

__all__ = [
    "HARDWARE",
    "KV_DTYPES",
    "MODELS",
    "PRINTED_A",
    "PRINTED_B",
    "Calibration",
    "CppGroup",
    "DecodeLatency",
    "Hardware",
    "HybridLatency",
    "IterationCost",
    "KVCacheShape",
    "LatencyModel",
    "LayerGroup",
    "LinearCost",
    "LinkLatency",
    "ModelShape",
    "PrefillLatency",
    "Work",
    "Workload",
    "as_told",
    "attainable_flops_per_s",
    "balanced_ratio",
    "check_floor",
    "chunk_seconds",
    "chunk_sizes",
    "column_sizes",
    "cpp_finish_s",
    "cpp_network_bytes",
    "cpp_prefill_s",
    "decode_accounts",
    "decode_work",
    "exact_prefill_flops",
    "fit_decode",
    "fit_link",
    "fit_prefill",
    "hardware",
    "kernel_work",
    "kv_bytes",
    "kvcache_of_config",
    "linear_kvcache",
    "model_shape",
    "nonnegative_fit",
    "per_request_cost_s",
    "piggyback_round",
    "prefill_work",
    "printed_prefill_flops",
    "probe_floor",
    "reuse_bandwidth_bytes_per_s",
    "reuse_crossover_tokens",
    "ridge_flops_per_byte",
    "separate_round",
    "transferred",
]

__getattr__ = lazy_names(__name__, "calibration")
