"""Chapter 02: prefill, decode and transfer in closed form, beside the papers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from mooncake_lab import perf
from mooncake_lab.book.chapters.stages.experiment import MachineCalibration, stage_columns
from mooncake_lab.book.experiments import tabulated
from mooncake_lab.book.paper import (
    Compared,
    ComparisonTable,
    claimed,
    compared,
    comparison_table,
    detail,
    fact,
    within,
)
from mooncake_lab.book.testbeds.fit_nodes import REUSED_SHARE, Array, NodeCalibration, normalised
from mooncake_lab.book.testbeds.sarathi import llama_13b_on_a6000
from mooncake_lab.core import GB, KIB, TERA


def equation_1(node: NodeCalibration) -> pd.DataFrame:
    """Eq. 1 as printed beside the exact causal count, and the share of the peak that Fig. 14's bars imply."""
    shape, peak = node.latency.shape, perf.hardware("a800-node").flops_per_s()
    alone = node.reused_tokens == 0
    tokens, seconds = node.tokens[alone], node.prefill.measured_s[alone]
    printed, exact = perf.printed_prefill_flops(shape, tokens), perf.exact_prefill_flops(shape, tokens)
    return pd.DataFrame(
        {
            "tokens": tokens.astype(int),
            "printed_pflop": printed / 1e15,
            "exact_pflop": exact / 1e15,
            "printed_over_exact": printed / exact,
            "seconds": seconds,
            "printed_mfu": printed / seconds / peak,
            "exact_mfu": exact / seconds / peak,
        }
    )


def equation_2() -> pd.DataFrame:
    """The least bandwidth at which reuse pays, over prefix lengths: LLaMA3-70B on the nodes of both editions."""
    shape = perf.model_shape("llama3-70b")
    prefixes = np.arange(512.0, 131073.0, 512.0)
    tables: list[pd.DataFrame] = []
    for name in ("a800-node", "h800-node"):
        peak = perf.hardware(name).flops_per_s()
        exact = perf.kv_bytes(shape, prefixes) / perf.exact_prefill_flops(shape, prefixes) * peak
        printed = perf.reuse_bandwidth_bytes_per_s(shape, prefixes, peak)
        columns = {"printed_gb_per_s": printed / GB, "exact_gb_per_s": exact / GB}
        tables.append(pd.DataFrame({"node": name, "prefix_tokens": prefixes, **columns}))
    return pd.concat(tables, ignore_index=True)


def shortest_useful_prefix(models: Sequence[str], gb_per_s: Sequence[float]) -> pd.DataFrame:
    """The shortest prefix that Eq. 2 finds worth loading: one row a model, one column a bandwidth (tokens)."""
    peak = perf.hardware("a800-node").flops_per_s()
    shapes = {name: perf.model_shape(name) for name in models}
    return pd.DataFrame(
        {
            f"{rate:g} GB/s": {
                name: round(perf.reuse_crossover_tokens(shape, rate * GB, peak)) for name, shape in shapes.items()
            }
            for rate in gb_per_s
        }
    ).rename_axis("model")


@tabulated
def reuse_or_compute(
    latency: perf.LatencyModel, prefixes: Sequence[int], gb_per_s: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """Loading a prefix beside computing it, at the hardware's peak (Eq. 2) and as fast as a fitted node does.

    The constant of the fitted prefill is left out: a request pays it either way.
    """
    shape, peak = latency.shape, perf.hardware("a800-node").flops_per_s()
    for rate in gb_per_s:
        for tokens in prefixes:
            load_s = float(perf.kv_bytes(shape, tokens)) / (rate * GB)
            peak_s = float(perf.printed_prefill_flops(shape, tokens)) / peak
            node_s = float(latency.prefill.compute_s(tokens)) - latency.prefill.constant_s
            pays = "yes" if load_s < min(peak_s, node_s) else "on this node" if load_s < node_s else "no"
            times = {"load_s": load_s, "peak_s": peak_s, "node_s": node_s}
            yield {"gb_per_s": rate, "prefix_tokens": tokens, **times, "pays": pays}


def calibration_misses(node: NodeCalibration) -> pd.DataFrame:
    """Every point the node was fitted to."""
    lengths = node.tokens[node.reused_tokens == 0]
    batch, _ = normalised("decode latency")
    parts = [
        _misses("prefill", node.prefill, 1, node.tokens, node.reused_tokens),
        _misses("decode step, batch 1", node.decode_alone, 1, lengths),
        _misses("decode step, 8k context", node.decode, batch, lengths[0]),
        _misses("transfer", node.transfer, 1, lengths),
        _misses("load from dram", node.dram, 1, lengths),
    ]
    return pd.concat(parts, ignore_index=True)


def _misses(
    stage: str, fitted: perf.Calibration[Any], batch: Array | int, tokens: Array | float, reused: Array | int = 0
) -> pd.DataFrame:
    points = {"batch": batch, "tokens": tokens, "reused_tokens": reused}
    places = {name: np.broadcast_to(at, fitted.measured_s.shape).astype(int) for name, at in points.items()}
    seconds = {"paper_s": fitted.measured_s, "model_s": fitted.predicted_s}
    return pd.DataFrame({"stage": stage, **places, **seconds, "miss_percent": 100 * fitted.relative_errors})


@tabulated
def machine_misses(fitted: MachineCalibration) -> Iterator[dict[str, Any]]:
    """How far this machine's own fits miss its points: stage, points, mean and largest miss in percent."""
    for stage, each in (("prefill", fitted.prefill), ("decode", fitted.decode)):
        misses = {"mean": each.mean_relative_error, "largest": each.max_relative_error}
        percent = {f"{name}_miss_percent": 100 * miss for name, miss in misses.items()}
        yield {"stage": stage, "points": len(each.measured_s), **percent}


def normalised_node(latency: perf.LatencyModel) -> pd.DataFrame:
    """ArXiv Fig. 2: the paper's points and the modelled node at the same places."""
    lengths, _ = normalised("prefill latency")
    batches, _ = normalised("decode latency")
    modelled = [
        _curves("prefill", lengths, latency.prefill.seconds(lengths), "modelled"),
        _curves("decode", batches, latency.decode.step_s(batches, batches * lengths[0]), "modelled"),
    ]
    read = [(stage, name) for stage in ("prefill", "decode") for name in ("latency", "throughput")]
    printed = [
        pd.DataFrame({"stage": stage, "quantity": name, "x": x, "value": value, "source": "paper"})
        for stage, name in read
        for x, value in (normalised(f"{stage} {name}"),)
    ]
    return pd.concat([*printed, *modelled], ignore_index=True)


def normalised_machine(measured: pd.DataFrame, fitted: MachineCalibration, context_tokens: int) -> pd.DataFrame:
    """The same for this machine, at its own lengths and one of its contexts: source is measured or modelled."""
    lengths, _, prefill_s = stage_columns(measured, "prefill")
    _, batches, step_s = stage_columns(measured, "decode", context_tokens)
    steps = fitted.decode.model.step_s(batches, batches * context_tokens)
    parts = [
        _curves("prefill", lengths, prefill_s, "measured"),
        _curves("decode", batches, step_s, "measured"),
        _curves("prefill", lengths, fitted.prefill.model.seconds(lengths), "modelled", prefill_s),
        _curves("decode", batches, steps, "modelled", step_s),
    ]
    return pd.concat(parts, ignore_index=True)


def _curves(stage: str, x: Array, seconds: Array, source: str, unit_of: Array | None = None) -> pd.DataFrame:
    """Latency and throughput over their largest (that of `unit_of`, where a model is drawn over measurements)."""
    unit_s = seconds if unit_of is None else unit_of
    values = {"latency": seconds / unit_s.max(), "throughput": x / seconds / (x / unit_s).max()}
    parts = [
        pd.DataFrame({"stage": stage, "quantity": quantity, "x": x, "value": value, "source": source})
        for quantity, value in values.items()
    ]
    return pd.concat(parts, ignore_index=True)


@tabulated
def roofline_of_paper(node: NodeCalibration) -> Iterator[dict[str, Any]]:
    """Where the paper's bars lie under the node's roof.

    Decode at batches above 1 uses the seconds that the calibration gives arXiv Fig. 2.
    """
    shape = node.latency.shape
    lengths = node.tokens[node.reused_tokens == 0].astype(int).tolist()
    rows = [
        ("prefill", f"{n // 1024}k", perf.prefill_work(shape, n), float(seconds))
        for n, seconds in zip(lengths, node.prefill_alone.measured_s, strict=True)
    ]
    batches = normalised("decode latency")[0].astype(int).tolist()
    rows += [
        ("decode", f"batch {batch}", perf.decode_work(shape, batch, batch * lengths[0]), float(seconds))
        for batch, seconds in zip(batches, node.decode.measured_s, strict=True)
        if batch in (1, 4, 16)
    ]
    for stage, label, work, seconds in rows:
        intensity = {"intensity_flops_per_byte": work.intensity_flops_per_byte}
        yield {"stage": stage, "label": label, **intensity, "tflops_per_s": work.flops / seconds / TERA}


@tabulated
def kernel_floors(*, prompt_tokens: int = 4096, batch: int = 64) -> Iterator[dict[str, Any]]:
    """What the roofline of an H200 allows each kernel of a layer of LLaMA3-8B.

    The prefill is of one prompt, the decode of a batch of requests whose contexts are as long as the prompt.
    """
    peaks, shape = perf.hardware("h200"), perf.model_shape("llama3-8b")
    context, pairs = batch * prompt_tokens, prompt_tokens * (prompt_tokens + 1) / 2
    stages = {
        "prefill": perf.kernel_work(shape, prompt_tokens, prompt_tokens, pairs),
        "decode": perf.kernel_work(shape, batch, context, context),
    }
    for stage, kernels in stages.items():
        for kernel, work in kernels.items():
            intensity = work.intensity_flops_per_byte
            yield {
                "stage": stage,
                "kernel": kernel,
                "gflops": work.flops / GB,
                "megabytes": work.bytes / 1e6,
                "intensity_flops_per_byte": intensity,
                "tflops_per_s": perf.attainable_flops_per_s(peaks, intensity) / TERA,
                "least_us": 1e6 * work.floor_s(peaks),
            }


def decode_over_prefill(batch: int, *, fitted: bool = False) -> float:
    """How much longer a decode token takes than a prefill token.

    LLaMA-13B on an A6000 with contexts of 1,024 tokens (SARATHI Fig. 3), by the roofline alone; or on the machine
    that is fitted to SARATHI Table 2 and Fig. 7 (assumption B65).
    """
    if fitted:
        cost, context = llama_13b_on_a6000(), 1024
        prompts_s = cost.linear.seconds(batch * context) + batch * cost.chunk_attention_s(context)
        return cost.step_s(0, 0, batch, batch * context) / batch / (prompts_s / (batch * context))
    shape, device, tokens = (
        replace(perf.model_shape("llama-13b"), bytes_per_element=2),
        perf.hardware("a6000"),
        1024,
    )
    prefill_s = perf.prefill_work(shape, tokens).floor_s(device) / tokens
    return perf.decode_work(shape, batch, batch * tokens).floor_s(device) / batch / prefill_s


def decode_growth(batch: int) -> float:
    """How much longer a step of `batch` requests takes than one of a single request, by the roofline alone.

    LLaMA2-70B on an A800 node with contexts of 8,192 tokens.
    """
    shape, device, tokens = perf.model_shape("llama2-70b"), perf.hardware("a800-node"), 8192
    many, one = (perf.decode_work(shape, count, count * tokens).floor_s(device) for count in (batch, 1))
    return many / one


_FITTED = within(0.05)  # the calibration's own largest miss is four percent


def beside_papers(node: NodeCalibration, *, fitted_machine: bool = False) -> ComparisonTable:
    """Equations, shapes of curves and single-request latencies: paper, ours, verdict.

    Args:
        node: of FAST'25.
        fitted_machine: whether SARATHI's machine is the one fitted to its Table 2, and not the roofline (B65).
    """
    shape, prefix = perf.model_shape("llama3-70b"), 8192  # the paper's example in §2.2
    seconds = node.latency.prefill.seconds
    ours = {
        "F28": shape.kv_bytes_per_token / KIB,
        "F43": _least_gb_per_s(shape, prefix, "a800-node"),
        "F44": _least_gb_per_s(shape, prefix, "h800-node"),
        "A25": seconds(131072.0) / seconds(8192.0),
        "A26": decode_growth(16),
        "S07": decode_over_prefill(1, fitted=fitted_machine),
        "S08": decode_over_prefill(18, fitted=fitted_machine),
    }
    return comparison_table([*(claimed(name, number) for name, number in ours.items()), *_breakdown(node)])


def _least_gb_per_s(shape: perf.ModelShape, prefix_tokens: int, node: str) -> float:
    peak = perf.hardware(node).flops_per_s()
    return float(perf.reuse_bandwidth_bytes_per_s(shape, prefix_tokens, peak)) / GB


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
        detail(claimed("F41", 100 * (1 - prefill_s[1] / prefill_s[0])), "chapter 08 decides"),
        detail(claimed("F42", 100 * (1 - ttft_s[1] / ttft_s[0])), "chapter 08 decides"),
    ]
