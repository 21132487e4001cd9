"""Chapter 02: prefill, decode and transfer in closed form, beside the papers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from mooncake_lab.chapters.stages.experiment import MachineCalibration, stage_columns
from mooncake_lab.core import GB, KIB, TERA
from mooncake_lab.paper import (
    Compared,
    ComparisonTable,
    claimed,
    compared,
    comparison_table,
    detail,
    fact,
    within,
)
from mooncake_lab.perf import (
    Calibration,
    LatencyModel,
    attainable_flops_per_s,
    decode_work,
    exact_prefill_flops,
    hardware,
    kernel_work,
    kv_bytes,
    model_shape,
    prefill_work,
    printed_prefill_flops,
    reuse_bandwidth_bytes_per_s,
    reuse_crossover_tokens,
)
from mooncake_lab.testbeds.nodes import REUSED_SHARE, Array, NodeCalibration, normalised


def equation_1(node: NodeCalibration) -> pd.DataFrame:
    """Eq. 1 as printed beside the exact causal count, and the share of the peak that Fig. 14's bars imply.

    Returns:
        One row a prompt length: tokens, printed_pflop, exact_pflop, printed_over_exact, seconds (the bar),
        printed_mfu, exact_mfu.
    """
    shape, peak = node.latency.shape, hardware("a800-node").flops_per_s()
    alone = node.reused_tokens == 0
    tokens, seconds = node.tokens[alone], node.prefill.measured_s[alone]
    printed, exact = printed_prefill_flops(shape, tokens), exact_prefill_flops(shape, tokens)
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
    """The least bandwidth at which reuse pays, over prefix lengths: LLaMA3-70B on the nodes of both editions.

    Returns:
        One row a node and prefix: node, prefix_tokens, printed_gb_per_s (Eq. 2), exact_gb_per_s (the same with
        the exact causal count).
    """
    shape = model_shape("llama3-70b")
    prefixes = np.arange(512.0, 131073.0, 512.0)
    tables: list[pd.DataFrame] = []
    for name in ("a800-node", "h800-node"):
        peak = hardware(name).flops_per_s()
        exact = kv_bytes(shape, prefixes) / exact_prefill_flops(shape, prefixes) * peak
        printed = reuse_bandwidth_bytes_per_s(shape, prefixes, peak)
        columns = {"prefix_tokens": prefixes, "printed_gb_per_s": printed / GB, "exact_gb_per_s": exact / GB}
        tables.append(pd.DataFrame({"node": name, **columns}))
    return pd.concat(tables, ignore_index=True)


def shortest_useful_prefix(models: Sequence[str], gb_per_s: Sequence[float]) -> pd.DataFrame:
    """The shortest prefix that Eq. 2 finds worth loading: one row a model, one column a bandwidth (tokens)."""
    peak = hardware("a800-node").flops_per_s()
    return pd.DataFrame(
        {
            f"{rate:g} GB/s": [
                round(reuse_crossover_tokens(model_shape(name), rate * GB, peak)) for name in models
            ]
            for rate in gb_per_s
        },
        index=pd.Index(models, name="model"),
    )


def reuse_or_compute(latency: LatencyModel, prefixes: Sequence[int], gb_per_s: Sequence[float]) -> pd.DataFrame:
    """Loading a prefix beside computing it, at the hardware's peak (Eq. 2) and as fast as a fitted node does.

    The constant of the fitted prefill is left out: a request pays it either way.

    Returns:
        One row a bandwidth and prefix: gb_per_s, prefix_tokens, load_s, peak_s, node_s and pays: "yes" where
        loading is the shortest, "on this node" where only the peak is quicker, "no" elsewhere.
    """
    shape, peak = latency.shape, hardware("a800-node").flops_per_s()
    rows: list[dict[str, Any]] = []
    for rate in gb_per_s:
        for tokens in prefixes:
            load_s = float(kv_bytes(shape, tokens)) / (rate * GB)
            peak_s = float(printed_prefill_flops(shape, tokens)) / peak
            node_s = float(latency.prefill.compute_s(tokens)) - latency.prefill.constant_s
            pays = "yes" if load_s < min(peak_s, node_s) else "on this node" if load_s < node_s else "no"
            times = {"load_s": load_s, "peak_s": peak_s, "node_s": node_s}
            rows.append({"gb_per_s": rate, "prefix_tokens": tokens, **times, "pays": pays})
    return pd.DataFrame(rows)


def calibration_misses(node: NodeCalibration) -> pd.DataFrame:
    """Every point the node was fitted to.

    Returns:
        One row a point: stage, batch, tokens, reused_tokens, paper_s, model_s, miss_percent.
    """
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
    stage: str, fitted: Calibration[Any], batch: Array | int, tokens: Array | float, reused: Array | int = 0
) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "stage": stage,
            "batch": np.broadcast_to(batch, fitted.measured_s.shape).astype(int),
            "tokens": np.broadcast_to(tokens, fitted.measured_s.shape).astype(int),
            "reused_tokens": np.broadcast_to(reused, fitted.measured_s.shape).astype(int),
            "paper_s": fitted.measured_s,
            "model_s": fitted.predicted_s,
            "miss_percent": 100 * fitted.relative_errors,
        }
    )


def machine_misses(fitted: MachineCalibration) -> pd.DataFrame:
    """How far this machine's own fits miss its points: stage, points, mean and largest miss in percent."""
    stages = {"prefill": fitted.prefill, "decode": fitted.decode}
    return pd.DataFrame(
        {
            "stage": list(stages),
            "points": [len(each.measured_s) for each in stages.values()],
            "mean_miss_percent": [100 * each.mean_relative_error for each in stages.values()],
            "largest_miss_percent": [100 * each.max_relative_error for each in stages.values()],
        }
    )


def normalised_node(latency: LatencyModel) -> pd.DataFrame:
    """ArXiv Fig. 2: the paper's points and the modelled node at the same places.

    Returns:
        Rows of stage, quantity (latency or throughput), x (tokens or requests), value (share of the largest)
        and source (paper or modelled).
    """
    lengths, _ = normalised("prefill latency")
    batches, _ = normalised("decode latency")
    modelled = [
        _curves("prefill", lengths, latency.prefill.seconds(lengths), "modelled"),
        _curves("decode", batches, latency.decode.step_s(batches, batches * lengths[0]), "modelled"),
    ]
    paper = [
        pd.DataFrame(dict(zip(("x", "value"), normalised(f"{stage} {quantity}"), strict=True))).assign(
            stage=stage, quantity=quantity, source="paper"
        )
        for stage in ("prefill", "decode")
        for quantity in ("latency", "throughput")
    ]
    return pd.concat([*paper, *modelled], ignore_index=True)


def normalised_machine(measured: pd.DataFrame, fitted: MachineCalibration, context_tokens: int) -> pd.DataFrame:
    """The same for this machine, at its own lengths and one of its contexts: source is measured or modelled.

    Raises:
        ValueError: when nothing was measured at that context.
    """
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


def roofline_of_paper(node: NodeCalibration) -> pd.DataFrame:
    """Where the paper's bars lie under the node's roof.

    Returns:
        Rows of stage, label, intensity_flops_per_byte and tflops_per_s. Decode at batches above 1 uses the
        seconds that the calibration gives arXiv Fig. 2.
    """
    shape = node.latency.shape
    lengths = node.tokens[node.reused_tokens == 0].astype(int)
    batches = normalised("decode latency")[0].astype(int)
    rows = [
        ("prefill", f"{n // 1024}k", prefill_work(shape, int(n)), float(seconds))
        for n, seconds in zip(lengths, node.prefill_alone.measured_s, strict=True)
    ]
    rows += [
        ("decode", f"batch {batch}", decode_work(shape, int(batch), int(batch * lengths[0])), float(seconds))
        for batch, seconds in zip(batches, node.decode.measured_s, strict=True)
        if batch in (1, 4, 16)
    ]
    return pd.DataFrame(
        [
            {
                "stage": stage,
                "label": label,
                "intensity_flops_per_byte": work.intensity_flops_per_byte,
                "tflops_per_s": work.flops / seconds / TERA,
            }
            for stage, label, work, seconds in rows
        ]
    )


def kernel_floors(*, prompt_tokens: int = 4096, batch: int = 64) -> pd.DataFrame:
    """What the roofline of an H200 allows each kernel of a layer of LLaMA3-8B.

    The prefill is of one prompt, the decode of a batch of requests whose contexts are as long as the prompt.

    Returns:
        Rows of stage, kernel, gflops, megabytes, intensity_flops_per_byte, tflops_per_s (attainable), least_us.
    """
    peaks, shape = hardware("h200"), model_shape("llama3-8b")
    context, pairs = batch * prompt_tokens, prompt_tokens * (prompt_tokens + 1) / 2
    stages = {
        "prefill": kernel_work(shape, prompt_tokens, prompt_tokens, pairs),
        "decode": kernel_work(shape, batch, context, context),
    }
    return pd.DataFrame(
        {
            "stage": stage,
            "kernel": kernel,
            "gflops": work.flops / GB,
            "megabytes": work.bytes / 1e6,
            "intensity_flops_per_byte": work.intensity_flops_per_byte,
            "tflops_per_s": attainable_flops_per_s(peaks, work.intensity_flops_per_byte) / TERA,
            "least_us": 1e6 * work.floor_s(peaks),
        }
        for stage, kernels in stages.items()
        for kernel, work in kernels.items()
    )


def decode_over_prefill(batch: int) -> float:
    """How much longer a decode token takes than a prefill token by the roofline alone.

    LLaMA-13B on an A6000 with contexts of 1,024 tokens (SARATHI Fig. 3).
    """
    shape, device, tokens = replace(model_shape("llama-13b"), bytes_per_element=2), hardware("a6000"), 1024
    prefill_s = prefill_work(shape, tokens).floor_s(device) / tokens
    return decode_work(shape, batch, batch * tokens).floor_s(device) / batch / prefill_s


def decode_growth(batch: int) -> float:
    """How much longer a step of `batch` requests takes than one of a single request, by the roofline alone.

    LLaMA2-70B on an A800 node with contexts of 8,192 tokens.
    """
    shape, device, tokens = model_shape("llama2-70b"), hardware("a800-node"), 8192
    many, one = (decode_work(shape, count, count * tokens).floor_s(device) for count in (batch, 1))
    return many / one


_FITTED = within(0.05)  # the calibration's own largest miss is four percent


def beside_papers(node: NodeCalibration) -> ComparisonTable:
    """Equations, shapes of curves and single-request latencies: paper, ours, verdict."""
    return comparison_table([*_equations(), *_shapes(node), *_breakdown(node)])


def _equations() -> list[Compared]:
    shape = model_shape("llama3-70b")
    prefix = 8192  # the paper's example in §2.2
    return [
        claimed("F28", shape.kv_bytes_per_token / KIB),
        *(
            claimed(name, reuse_bandwidth_bytes_per_s(shape, prefix, hardware(node).flops_per_s()) / GB)
            for name, node in (("F43", "a800-node"), ("F44", "h800-node"))
        ),
    ]


def _shapes(node: NodeCalibration) -> list[Compared]:
    seconds = node.latency.prefill.seconds
    return [
        claimed("A25", seconds(131072.0) / seconds(8192.0)),
        claimed("A26", decode_growth(16)),
        claimed("S07", decode_over_prefill(1)),
        claimed("S08", decode_over_prefill(18)),
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
        detail(claimed("F41", 100 * (1 - prefill_s[1] / prefill_s[0])), "chapter 08 decides"),
        detail(claimed("F42", 100 * (1 - ttft_s[1] / ttft_s[0])), "chapter 08 decides"),
    ]
