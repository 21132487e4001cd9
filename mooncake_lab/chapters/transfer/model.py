"""What the models say about moving KVCache: layer-wise storing, a request's latency part by part."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from mooncake_lab.paper import curve
from mooncake_lab.perf import Calibration, LinkLatency, as_told, fit_link, kv_bytes
from mooncake_lab.perf.layerwise import layerwise_times
from mooncake_lab.testbeds.paper_node import BREAKDOWN, DECODED_TOKENS, REUSED_SHARE, Array, NodeCalibration

STORING: Final = "arxiv_fig07_store_latency"
ENGINES: Final = "fast_fig12_transfer_latency"
DEMAND: Final = "fast_fig13_bandwidth_demand"
PARTS: Final = ("schedule", "prefill", "transfer", "load cache", "decode")
"""What FAST'25 Fig. 14 stacks, from below."""


@dataclass(frozen=True, slots=True, eq=False)
class StoreLatency:
    """ArXiv Fig. 7 and our model of it."""

    link: Calibration[LinkLatency]
    """Fitted to the serialized bars alone."""
    table: pd.DataFrame
    """One row a length: tokens, prefill_s, paper_serialized_s, serialized_s, paper_layerwise_s, layerwise_s."""


def store_latency(node: NodeCalibration) -> StoreLatency:
    """Storing a prompt's KVCache after computing it, and while computing it.

    The link is fitted to the paper's serialized bars; the layer-wise bars are predicted: only what is stored after
    the last layer was computed is seen, and the link's constant, which is paid once either way.
    """
    tokens, serialized_s = _series(STORING, "Serialized")
    _, layerwise_s = _series(STORING, "Layer-wise")
    shape = node.latency.shape
    link = fit_link(np.asarray(kv_bytes(shape, tokens)), serialized_s)
    prefill_s = np.asarray(node.latency.prefill.compute_s(tokens))
    rows = [
        {
            "tokens": int(length),
            "prefill_s": seconds,
            "paper_serialized_s": theirs_serialized_s,
            "serialized_s": link.model.seconds(kv_bytes(shape, length)),
            "paper_layerwise_s": theirs_layerwise_s,
            "layerwise_s": link.model.latency_s
            + exposed_s(seconds, kv_bytes(shape, length) / link.model.bytes_per_s, shape.layers),
        }
        for length, seconds, theirs_serialized_s, theirs_layerwise_s in zip(
            tokens.tolist(), prefill_s.tolist(), serialized_s.tolist(), layerwise_s.tolist(), strict=True
        )
    ]
    return StoreLatency(link, pd.DataFrame(rows))


def exposed_s(compute_s: float, store_s: float, layers: int) -> float:
    """Seconds that storing adds to a prefill when every layer is stored while later ones are computed."""
    times = layerwise_times([0.0] * layers, [compute_s / layers] * layers, [store_s / layers] * layers)
    return times.total_s - compute_s


def breakdown(node: NodeCalibration) -> pd.DataFrame:
    """FAST'25 Fig. 14: every slice of every bar beside the fitted model's, and the miss.

    Returns:
        One row a slice: reused_percent, tokens, part, paper_s, model_s, miss_percent.
    """
    latency = node.latency
    rows: list[dict[str, float | str]] = []
    for percent in (0, round(100 * REUSED_SHARE)):
        for tokens in sorted(set(node.tokens.tolist())):
            reused = float(np.floor(REUSED_SHARE * tokens)) if percent else 0.0
            model_s = {
                "schedule": latency.schedule_s,
                "prefill": latency.prefill.seconds(tokens, reused),
                "transfer": latency.transfer_s(tokens),
                "load cache": latency.dram_load_s(tokens),
                "decode": node.decode_alone.model.stretch_s(1.0, tokens + 1, DECODED_TOKENS),
            }
            for part in PARTS:
                paper_s = _at(BREAKDOWN, f"prefix {percent}%/{part}", tokens)
                rows.append(
                    {
                        "reused_percent": percent,
                        "tokens": int(tokens),
                        "part": part,
                        "paper_s": paper_s,
                        "model_s": model_s[part],
                        "miss_percent": 100 * (model_s[part] / paper_s - 1),
                    }
                )
    return pd.DataFrame(rows)


def largest_misses(slices: pd.DataFrame) -> pd.DataFrame:
    """Of `breakdown`, by part: the largest miss in percent, and in seconds."""
    percent = np.abs(np.asarray(slices["miss_percent"], dtype=float))
    seconds = np.abs(np.asarray(slices["model_s"] - slices["paper_s"], dtype=float))
    of_part = {part: np.asarray(slices["part"] == part) for part in PARTS}
    rows = [
        {
            "part": part,
            "largest_miss_percent": float(percent[chosen].max()),
            "largest_miss_s": float(seconds[chosen].max()),
        }
        for part, chosen in of_part.items()
    ]
    return pd.DataFrame(rows)


def saved_percent(slices: pd.DataFrame, *parts: str) -> float:
    """Of `breakdown`: how much a 95 % reused prefix saves of some parts together, at the longest prompt."""
    longest = slices["tokens"] == slices["tokens"].max()
    whole_s, reused_s = (
        float(
            slices.loc[
                longest & slices["part"].isin(parts) & (slices["reused_percent"] == percent), "model_s"
            ].sum()
        )
        for percent in (0, round(100 * REUSED_SHARE))
    )
    return 100 * (1 - reused_s / whole_s)


def seconds_of_ttft_per_second_of_transfer() -> float:
    """The slope of FAST'25 Fig. 13a over 13b: 0 where computing hides the transfer, 1 where nothing does."""
    _, ttft_s = _series(DEMAND, "average TTFT")
    _, transfer_s = _series(DEMAND, "transfer time real")
    return float(as_told(np.polyfit(transfer_s, ttft_s, 1))[0])


def _series(name: str, series: str) -> tuple[Array, Array]:
    table = curve(name)
    chosen = np.asarray(table["series"]) == series
    return np.asarray(table["x"], dtype=float)[chosen], np.asarray(table["y"], dtype=float)[chosen]


def _at(name: str, series: str, x: float) -> float:
    xs, ys = _series(name, series)
    return float(ys[xs == x][0])
