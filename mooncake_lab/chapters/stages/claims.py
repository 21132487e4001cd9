"""Chapter 02's numbers held against what the papers print and draw."""

from mooncake_lab.chapters.stages.model import decode_growth, decode_over_prefill
from mooncake_lab.core import GB, KIB
from mooncake_lab.paper import (
    Compared,
    ComparisonTable,
    claim,
    claimed,
    compared,
    comparison_table,
    detail,
    fact,
    within,
)
from mooncake_lab.perf import hardware, model_shape, reuse_bandwidth_bytes_per_s
from mooncake_lab.testbeds.paper_node import REUSED_SHARE, NodeCalibration

_FITTED = within(0.05)  # the calibration's own largest miss is four percent


def beside_papers(node: NodeCalibration) -> ComparisonTable:
    """Equations, shapes of curves and single-request latencies: paper, ours, verdict."""
    return comparison_table([*_equations(), *_shapes(node), *_breakdown(node)])


def _equations() -> list[Compared]:
    shape = model_shape("llama3-70b")
    prefix = 8192  # the paper's example in §2.2
    return [
        claimed(claim("F28"), shape.kv_bytes_per_token / KIB),
        *(
            claimed(claim(name), reuse_bandwidth_bytes_per_s(shape, prefix, hardware(node).flops_per_s()) / GB)
            for name, node in (("F43", "a800-node"), ("F44", "h800-node"))
        ),
    ]


def _shapes(node: NodeCalibration) -> list[Compared]:
    seconds = node.latency.prefill.seconds
    return [
        claimed(claim("A25"), seconds(131072.0) / seconds(8192.0)),
        claimed(claim("A26"), decode_growth(16)),
        claimed(claim("S07"), decode_over_prefill(1)),
        claimed(claim("S08"), decode_over_prefill(18)),
    ]


def _breakdown(node: NodeCalibration) -> list[Compared]:
    latency, tokens = node.latency, 131072.0
    reused_tokens = REUSED_SHARE * tokens
    prefill_s = [latency.prefill.seconds(tokens, reused) for reused in (0, reused_tokens)]
    rest_s = latency.schedule_s + latency.transfer_s(tokens) + latency.dram_load_s(tokens)
    ttft_s = [seconds + rest_s for seconds in prefill_s]
    load_gb_per_s = latency.shape.kv_bytes_per_token / latency.prefill.load_s_per_token / GB
    return [
        compared(
            "host link, recovered from the prefill bars of Figure 14",
            fact("fast_table1_constants", x="B_h2d_GBps"),
            load_gb_per_s,
            _FITTED,
            evidence="calibrated",
        ),
        detail(claimed(claim("F41"), 100 * (1 - prefill_s[1] / prefill_s[0])), "chapter 08 decides"),
        detail(claimed(claim("F42"), 100 * (1 - ttft_s[1] / ttft_s[0])), "chapter 08 decides"),
    ]
