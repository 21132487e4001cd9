"""Chapter 08: layer-wise prefill, transfer engines, and bandwidth, beside both editions."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from mooncake_lab.bench.machine import Machine
from mooncake_lab.bench.transfer import TransferMeasurement, measure_transfers
from mooncake_lab.book import paper
from mooncake_lab.book.experiments import OfTrace, records, tabulated, where, whole_trace
from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.book.testbeds.fit_nodes import BREAKDOWN, DECODED_TOKENS, REUSED_SHARE, Array, NodeCalibration
from mooncake_lab.cluster import ClusterSpec, PrefillPool
from mooncake_lab.core import GB, MIB, Moved, carried_folder, check_scale
from mooncake_lab.metrics import ttft_s
from mooncake_lab.perf import Calibration, LinkLatency, as_told, fit_link, kv_bytes
from mooncake_lab.perf.layerwise import layerwise_times
from mooncake_lab.simulation import Cluster

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
    stored_bytes = np.asarray(kv_bytes(shape, tokens))
    link = fit_link(stored_bytes, serialized_s)
    table = pd.DataFrame({"tokens": tokens.astype(int), "prefill_s": node.latency.prefill.compute_s(tokens)})
    store_s = stored_bytes / link.model.bytes_per_s
    left_s = [exposed_s(*each, shape.layers) for each in zip(table["prefill_s"], store_s, strict=True)]
    return StoreLatency(
        link,
        table.assign(
            paper_serialized_s=serialized_s,
            serialized_s=link.model.seconds(stored_bytes),
            paper_layerwise_s=layerwise_s,
            layerwise_s=link.model.latency_s + np.asarray(left_s),
        ),
    )


def exposed_s(compute_s: float, store_s: float, layers: int) -> float:
    """Seconds that storing adds to a prefill when every layer is stored while later ones are computed."""
    times = layerwise_times([0.0] * layers, [compute_s / layers] * layers, [store_s / layers] * layers)
    return times.total_s - compute_s


@tabulated
def breakdown(node: NodeCalibration) -> Iterator[dict[str, Any]]:
    """FAST'25 Fig. 14: every slice of every bar beside the fitted model's, and the miss."""
    latency = node.latency
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
                yield {
                    "reused_percent": percent,
                    "tokens": int(tokens),
                    "part": part,
                    "paper_s": paper_s,
                    "model_s": model_s[part],
                    "miss_percent": 100 * (model_s[part] / paper_s - 1),
                }


def largest_misses(slices: pd.DataFrame) -> pd.DataFrame:
    """Of `breakdown`, by part: the largest miss in percent, and in seconds."""
    seconds = (slices["model_s"] - slices["paper_s"]).abs()
    table = slices.assign(largest_miss_percent=slices["miss_percent"].abs(), largest_miss_s=seconds)
    columns = ["largest_miss_percent", "largest_miss_s"]
    return table.pivot_table(columns, "part", aggfunc="max").loc[list(PARTS), columns].reset_index()


def saved_percent(slices: pd.DataFrame, *parts: str) -> float:
    """Of `breakdown`: how much a 95 % reused prefix saves of some parts together, at the longest prompt."""
    longest = slices[(slices["tokens"] == slices["tokens"].max()) & slices["part"].isin(parts)]
    whole_s, reused_s = longest.pivot_table("model_s", "reused_percent", aggfunc="sum")["model_s"].tolist()
    return 100 * (1 - reused_s / whole_s)


def seconds_of_ttft_per_second_of_transfer() -> float:
    """The slope of FAST'25 Fig. 13a over 13b: 0 where computing hides the transfer, 1 where nothing does."""
    _, ttft_s = _series(DEMAND, "average TTFT")
    _, transfer_s = _series(DEMAND, "transfer time real")
    return float(as_told(np.polyfit(transfer_s, ttft_s, 1))[0])


def _series(name: str, series: str) -> tuple[Array, Array]:
    table = paper.curve(name)
    chosen = np.asarray(table["series"]) == series
    return np.asarray(table["x"], dtype=float)[chosen], np.asarray(table["y"], dtype=float)[chosen]


def _at(name: str, series: str, x: float) -> float:
    xs, ys = _series(name, series)
    return float(ys[xs == x][0])


FIRST_REQUESTS: Final = {"smoke": 300, "classroom": None, "full": None, "gpu": None}
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
    cache_tokens: int = PrefillPool().cache_tokens
    """KVCache that a prefill node keeps (assumption B08)."""
    reuses: bool = True
    """Whether prefixes are kept; otherwise every prompt is computed in full."""
    prefill_nodes: int = 16
    """Assumption B46."""
    decode_nodes: int = 16
    speed: float = 1.0
    """Speed of the replay relative to the recording (assumption B07)."""
    first: int | None = None
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row: mean TTFT, what is left of the transfer after the prefill, and how busy senders are."""
        recorded = OfTrace(workload=self.workload, first=self.first, seed=self.seed).trace()
        trace = replace(recorded, arrival_s=recorded.arrival_s / self.speed)
        model = paper_node_latency()
        bytes_per_s = self.gbps * GB / BITS_PER_BYTE
        spec = ClusterSpec.disaggregated(
            prefill_nodes=self.prefill_nodes,
            decode_nodes=self.decode_nodes,
            cache_tokens=self.cache_tokens if self.reuses else trace.block_size_tokens,
            streams_layers=self.streams_layers,
            block_size_tokens=trace.block_size_tokens,
        )
        network = replace(model.transfer, bytes_per_s=bytes_per_s)
        log = Cluster(spec, replace(model, transfer=network)).run(trace.requests())
        sent = [record for record in log if isinstance(record, Moved)]
        handed = [record for record in sent if record.destination.startswith("decode")]
        sent_bytes: dict[str, int] = {}
        for record in sent:
            sent_bytes[record.source] = sent_bytes.get(record.source, 0) + record.bytes
        could_send = bytes_per_s * (float(trace.arrival_s[-1]) or np.nan)
        yield {
            "mean_ttft_s": float(np.mean(list(ttft_s(log).values()))),
            "exposed_s": float(np.mean([record.at_s - record.start_s for record in handed])),
            "alone_s": float(np.mean([record.bytes for record in handed])) / bytes_per_s,
            "busiest_card": max(sent_bytes.values()) / could_send,
            "mean_card": sum(sent_bytes.values()) / self.prefill_nodes / could_send,
            "requests": len(trace),
            "origin": trace.origin,
            "source": trace.source,
        }


def bandwidths_of_fig_13() -> tuple[float, ...]:
    """The bandwidths at which FAST'25 Fig. 13 has points (Gbps), upwards."""
    drawn = paper.curve("fast_fig13_bandwidth_demand")
    return tuple(sorted(set(drawn[drawn["series"] == "average TTFT"]["x"].tolist())))


def busy_prefill_nodes(*, seed: int = 0) -> float:
    """How many nodes the synthetic trace keeps busy on average when every prompt is computed whole."""
    trace = whole_trace("synthetic", seed)
    seconds = paper_node_latency().prefill.seconds(np.asarray(trace.input_tokens, dtype=float))
    return float(np.sum(seconds)) / float(trace.arrival_s[-1])


def measured_transfers(scale: str, *, seed: int = 0) -> TransferMeasurement:
    """Bytes moved between two processes of this machine, way by way, measured now."""
    sizes, rounds = {"smoke": ((1, 4), 1), "classroom": ((1, 4, 16), 5)}.get(
        check_scale(scale), ((1, 4, 16, 64, 256, 1024), 9)
    )
    return measure_transfers(seed=seed, sizes_bytes=tuple(mib * MIB for mib in sizes), rounds=rounds)


@tabulated
def transfer_table(measured: TransferMeasurement) -> Iterator[dict[str, Any]]:
    """One row a way and size: seconds with their extremes, GB/s, and seconds over the plain socket's."""
    for each in measured.times:
        columns = ("way", "pieces", "seconds", "least_s", "most_s", "over_socket")
        size_bytes = each.size_bytes
        speed = {"megabytes": size_bytes / 1e6, "gb_per_s": size_bytes / each.seconds / GB}
        yield {name: getattr(each, name) for name in columns} | speed


LIMIT_S: Final = 2.0
"""The mean TTFT that §5.4.2 asks for."""


def beside_papers(storing: StoreLatency, slices: pd.DataFrame, demand: pd.DataFrame) -> paper.ComparisonTable:
    """Layer-wise storing, transfer engines, bandwidth demand and latency breakdown: paper, ours, verdict."""
    return paper.comparison_table(
        [*_storing(storing), *_engines(), *_demand(demand), *_slow_networks(demand), *_breakdown(slices)]
    )


def _storing(storing: StoreLatency) -> Iterator[paper.Compared]:
    """A27 by what is predicted: the link's constant is fitted to the same figure, so it does not decide."""
    last = storing.table.iloc[-1]
    layerwise_s, serialized_s = float(last["layerwise_s"]), float(last["serialized_s"])
    yield paper.claimed("A27", (layerwise_s - storing.link.model.latency_s) / serialized_s)
    yield paper.detail(
        paper.claimed("A27", layerwise_s / serialized_s), "with the constant fitted to the same figure"
    )


def _engines() -> Iterator[paper.Compared]:
    for number in range(34, 40):
        yield paper.claimed(f"F{number}", None)  # two nodes and their network cards


def _demand(demand: pd.DataFrame) -> Iterator[paper.Compared]:
    for streams, words in ((True, "streamed layer by layer"), (False, "sent after the prefill")):
        rows = where(demand, streams_layers=streams, reuses=True)
        row = paper.claimed("F40", least_bandwidth_gbps(rows))
        told = replace(row, quantity=f"{row.quantity}; {words}") if streams else paper.detail(row, words)
        yield paper.unless_twin(told, str(rows["origin"].to_list()[0]))


def _slow_networks(demand: pd.DataFrame) -> Iterator[paper.Compared]:
    by_gbps = {float(row["gbps"]): row for row in records(demand, streams_layers=True, reuses=True)}
    for identifier, gbps in (("F72", 24.0), ("F73", 40.0)):
        row = by_gbps[gbps]
        yield paper.marked_if_twin(
            paper.claimed(identifier, float(row["mean_ttft_s"])), row["origin"] != "released"
        )
    (whole,) = records(demand, reuses=False)
    yield paper.marked_if_twin(paper.claimed("F106", float(whole["mean_ttft_s"])), whole["origin"] != "released")
    # the figure hides no transfer, so ours is one that begins when the prefill ends
    (late,) = records(demand, streams_layers=False, reuses=True, gbps=24.0)
    yield paper.marked_if_twin(paper.claimed("F107", float(late["exposed_s"])), late["origin"] != "released")


def least_bandwidth_gbps(rows: pd.DataFrame) -> float:
    """The smallest bandwidth from which on the mean TTFT stays below two seconds.

    Raises:
        ValueError: when the largest one is too small.
    """
    enough = None
    for gbps, mean_ttft_s in (
        rows.sort_values("gbps", ascending=False)[["gbps", "mean_ttft_s"]].to_numpy().tolist()
    ):
        if mean_ttft_s >= LIMIT_S:
            break
        enough = gbps
    if enough is None:
        most = rows["gbps"].max()
        raise ValueError(f"the mean TTFT is above {LIMIT_S} s at every bandwidth up to {most:g} Gbps")
    return enough


def _breakdown(slices: pd.DataFrame) -> Iterator[paper.Compared]:
    yield paper.claimed("F41", saved_percent(slices, "prefill"))
    yield paper.claimed("F42", saved_percent(slices, "schedule", "prefill", "transfer", "load cache"))


_KEPT: Final = carried_folder("measured") / "second_turn.json"
_PREFIX_IN: Final = {
    "dram": "DRAM",
    "ssd": "SSD",
    "worker": "other worker",
    "remote": "pool",
    "mooncake": "Mooncake pool",
    "paced-worker": "other worker, slow network",
    "paced-remote": "pool, slow network",
}
_SECOND_TURN: Final = [
    "prefix_in", "second_turn_ms", "least_ms", "most_ms", "recomputed_ms", "predicted_ms", "error_percent",
    "read_ms", "hidden_percent", "same_tokens",
]  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class SecondTurns:
    """Second turns of conversations in a live cluster, kept from a run of `benchmarks/second_turn.py`."""

    table: pd.DataFrame
    """One row a place of the prefix: prefix_in, second_turn_ms, least_ms, most_ms, recomputed_ms, predicted_ms,
    error_percent (of the prediction), read_ms, hidden_percent and same_tokens. What was not measured is NaN."""
    tokens: int
    """Of the prefix."""
    new_tokens: int
    """Behind it."""
    made: str
    """Machine, date, commit and load average of the run."""

    def shown(self) -> pd.DataFrame:
        """Whole milliseconds and percent by place; a cell is empty where nothing was measured."""
        columns = ["recomputed_ms", "second_turn_ms", "predicted_ms", "read_ms", "hidden_percent"]
        cells = {name: [_whole(number) for number in self.table[name].to_list()] for name in columns}
        return pd.DataFrame(cells, index=pd.Index(self.table["prefix_in"]))


def second_turns(path: Path = _KEPT) -> SecondTurns:
    """TTFT of a second turn by the place of its prefix, beside recomputation and the model's prediction.

    Raises:
        ValueError: when the file has no row.
    """
    kept = json.loads(path.read_text("utf-8"))
    if not kept["rows"]:
        raise ValueError(f"{path} has no row; benchmarks/second_turn.py writes one for each place")
    rows = [
        {"prefix_in": _PREFIX_IN[row["place"]], **row, "hidden_percent": _percent(row["hidden_share"])}
        for row in kept["rows"]
    ]
    machine = Machine(**kept["machine"])
    made = (
        f"kept: {machine}, commit {kept['commit']}, load average {kept['load_average'][0]:.1f},"
        f" {kept['rounds']} round{'' if kept['rounds'] == 1 else 's'}"
    )
    return SecondTurns(pd.DataFrame(rows, columns=_SECOND_TURN), kept["tokens"], kept["new_tokens"], made)


def _percent(share: float | None) -> float:
    return np.nan if share is None else 100 * share


def _whole(number: float) -> str:
    return "" if np.isnan(number) else f"{number:.0f}"
