"""Chapter 08: layer-wise prefill, transfer engines, and bandwidth, beside both editions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pandas as pd

from mooncake_lab.bench.transfer import TransferMeasurement, measure_transfers
from mooncake_lab.core import GB, MIB, Moved, check_scale
from mooncake_lab.experiments import records, where
from mooncake_lab.metrics import ttft_s
from mooncake_lab.paper import (
    Compared,
    ComparisonTable,
    claimed,
    comparison_table,
    curve,
    detail,
    marked_if_twin,
    unless_twin,
)
from mooncake_lab.perf import Calibration, LinkLatency, as_told, fit_link, kv_bytes
from mooncake_lab.perf.layerwise import layerwise_times
from mooncake_lab.simulation import Cluster, ClusterSpec, PrefillPool
from mooncake_lab.testbeds.nodes import (
    BREAKDOWN,
    DECODED_TOKENS,
    REUSED_SHARE,
    Array,
    NodeCalibration,
    paper_node_latency,
)
from mooncake_lab.workload import Trace, load

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


FIRST_REQUESTS: Final[Mapping[str, int | None]] = MappingProxyType(
    {"smoke": 300, "classroom": None, "full": None, "gpu": None}
)
"""How many requests of the trace a scale replays; None is all of them."""
BITS_PER_BYTE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthDemand:
    """One trace on a cluster whose network has a given bandwidth (FAST'25 Fig. 13)."""

    workload: str = "synthetic"
    gbps: float = 100.0
    """Bandwidth of each node's network, in 10^9 bits per second, in both directions at once."""
    streams_layers: bool = True
    """Whether KVCache leaves for the decode instance while the prompt is computed."""
    reuses: bool = True
    """Whether prefixes are kept; otherwise every prompt is computed in full."""
    prefill_nodes: int = 16
    """Assumption B46."""
    decode_nodes: int = 16
    first: int | None = None
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row: mean TTFT, what is left of the transfer after the prefill, and how busy senders are."""
        trace = _whole(self.workload, self.seed)
        trace = trace if self.first is None else trace.head(self.first)
        model = paper_node_latency()
        bytes_per_s = self.gbps * GB / BITS_PER_BYTE
        spec = ClusterSpec.disaggregated(
            prefill_nodes=self.prefill_nodes,
            decode_nodes=self.decode_nodes,
            cache_tokens=PrefillPool().cache_tokens if self.reuses else trace.block_size_tokens,
            streams_layers=self.streams_layers,
            block_size_tokens=trace.block_size_tokens,
        )
        network = replace(model.transfer, bytes_per_s=bytes_per_s)
        log = Cluster(spec, replace(model, transfer=network)).run(trace.requests())
        sent = [record for record in log if isinstance(record, Moved)]
        handed = [record for record in sent if record.destination.startswith("decode")]
        by_sender: dict[str, int] = {}
        for record in sent:
            by_sender[record.source] = by_sender.get(record.source, 0) + record.bytes
        could_send = bytes_per_s * (float(trace.arrival_s[-1]) or np.nan)
        yield {
            "mean_ttft_s": float(np.mean(list(ttft_s(log).values()))),
            "exposed_s": float(np.mean([record.at_s - record.start_s for record in handed])),
            "alone_s": float(np.mean([record.bytes for record in handed])) / bytes_per_s,
            "busiest_card": max(by_sender.values()) / could_send,
            "mean_card": sum(by_sender.values()) / self.prefill_nodes / could_send,
            "requests": len(trace),
            "origin": trace.origin,
            "source": trace.source,
        }


@cache
def _whole(workload: str, seed: int) -> Trace:
    return load(workload, seed=seed)


def bandwidths_of_fig_13() -> tuple[float, ...]:
    """The bandwidths at which FAST'25 Fig. 13 has points (Gbps), upwards."""
    drawn = curve("fast_fig13_bandwidth_demand")
    return tuple(sorted(set(drawn[drawn["series"] == "average TTFT"]["x"].tolist())))


def busy_prefill_nodes(*, seed: int = 0) -> float:
    """How many nodes the synthetic trace keeps busy on average when every prompt is computed whole."""
    trace = _whole("synthetic", seed)
    seconds = paper_node_latency().prefill.seconds(np.asarray(trace.input_tokens, dtype=float))
    return float(np.sum(seconds)) / float(trace.arrival_s[-1])


def measured_transfers(scale: str, *, seed: int = 0) -> TransferMeasurement:
    """Bytes moved between two processes of this machine, way by way, measured now.

    Raises:
        ValueError: when there is no such scale.
    """
    by_scale: dict[str, dict[str, Any]] = {
        "smoke": {"sizes_bytes": (1 * MIB, 4 * MIB), "rounds": 1},
        "classroom": {"sizes_bytes": tuple(mib * MIB for mib in (1, 4, 16)), "rounds": 5},
        "full": {"sizes_bytes": tuple(mib * MIB for mib in (1, 4, 16, 64, 256, 1024)), "rounds": 9},
    }
    chosen = by_scale.get(check_scale(scale), by_scale["full"])
    return measure_transfers(seed=seed, **chosen)


def transfer_table(measured: TransferMeasurement) -> pd.DataFrame:
    """One row a way and size: seconds with their extremes, GB/s, and seconds over the plain socket's."""
    rows = [
        {
            "way": each.way,
            "megabytes": each.size_bytes / 1e6,
            "pieces": each.pieces,
            "seconds": each.seconds,
            "least_s": each.least_s,
            "most_s": each.most_s,
            "gb_per_s": each.size_bytes / each.seconds / GB,
            "over_socket": each.over_socket,
        }
        for each in measured.times
    ]
    return pd.DataFrame(rows)


LIMIT_S: Final = 2.0
"""The mean TTFT that §5.4.2 asks for."""


def beside_papers(storing: StoreLatency, slices: pd.DataFrame, demand: pd.DataFrame) -> ComparisonTable:
    """Layer-wise storing, transfer engines, bandwidth demand and latency breakdown: paper, ours, verdict.

    Args:
        storing: of `store_latency`.
        slices: rows of `breakdown`.
        demand: rows of `BandwidthDemand` at every bandwidth of Fig. 13, streamed by layers and not.
    """
    return comparison_table(
        [*_storing(storing), *_engines(), *_demand(demand), *_slow_networks(demand), *_breakdown(slices)]
    )


def _storing(storing: StoreLatency) -> Iterator[Compared]:
    """A27 by what is predicted: the link's constant is fitted to the same figure, so it does not decide."""
    last = storing.table.iloc[-1]
    layerwise_s, serialized_s = float(last["layerwise_s"]), float(last["serialized_s"])
    yield claimed("A27", (layerwise_s - storing.link.model.latency_s) / serialized_s)
    yield detail(claimed("A27", layerwise_s / serialized_s), "with the constant fitted to the same figure")


def _engines() -> Iterator[Compared]:
    for number in range(34, 40):
        yield claimed(f"F{number}", None)  # two nodes and their network cards


def _demand(demand: pd.DataFrame) -> Iterator[Compared]:
    for streams, words in ((True, "streamed layer by layer"), (False, "sent after the prefill")):
        rows = where(demand, streams_layers=streams, reuses=True)
        row = claimed("F40", least_bandwidth_gbps(rows))
        told = replace(row, quantity=f"{row.quantity}; {words}") if streams else detail(row, words)
        yield unless_twin(told, str(rows["origin"].to_list()[0]))


def _slow_networks(demand: pd.DataFrame) -> Iterator[Compared]:
    by_gbps = {float(row["gbps"]): row for row in records(demand, streams_layers=True, reuses=True)}
    for identifier, gbps in (("F72", 24.0), ("F73", 40.0)):
        row = by_gbps[gbps]
        yield marked_if_twin(claimed(identifier, float(row["mean_ttft_s"])), row["origin"] != "released")


def least_bandwidth_gbps(rows: pd.DataFrame) -> float:
    """The smallest bandwidth from which on the mean TTFT stays below two seconds.

    Raises:
        ValueError: when the largest one is too small.
    """
    enough: list[float] = []
    found = zip(rows["gbps"].to_list(), rows["mean_ttft_s"].to_list(), strict=True)
    for gbps, mean_ttft_s in sorted(found, reverse=True):
        if mean_ttft_s >= LIMIT_S:
            break
        enough.append(float(gbps))
    if not enough:
        raise ValueError(
            f"the mean TTFT is above {LIMIT_S} s at every bandwidth up to {rows['gbps'].max():g} Gbps"
        )
    return enough[-1]


def _breakdown(slices: pd.DataFrame) -> Iterator[Compared]:
    yield claimed("F41", saved_percent(slices, "prefill"))
    yield claimed("F42", saved_percent(slices, "schedule", "prefill", "transfer", "load cache"))
