"""Moving KVCache: bandwidth demand in simulation; layer-wise prefill and ways to move bytes, measured here."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pandas as pd

from mooncake_lab.bench.layerwise import LayerwiseMeasurement, measure_layerwise
from mooncake_lab.bench.transfer import TransferMeasurement, measure_transfers
from mooncake_lab.core import GB, MIB, Moved, check_scale
from mooncake_lab.metrics import ttft_s
from mooncake_lab.paper import curve
from mooncake_lab.simulation import Cluster, ClusterSpec, PrefillPool
from mooncake_lab.testbeds.paper_node import paper_node_latency
from mooncake_lab.workload import Trace, load

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


def measured_layerwise(scale: str, *, seed: int = 0) -> LayerwiseMeasurement:
    """Serialized against layer-wise prefill, measured now: in seconds, half a minute or minutes, or on a GPU.

    Raises:
        ValueError: when there is no such scale.
    """
    media = ("dram", "ssd", "tcp")
    by_scale: dict[str, dict[str, Any]] = {
        "smoke": {"model": "lab-tiny", "prompt_tokens": (128,), "new_tokens": 32, "block_tokens": 64, "rounds": 1},
        "classroom": {
            "model": "lab-8m", "prompt_tokens": (256, 512), "new_tokens": 64, "block_tokens": 128, "rounds": 3
        },
        "full": {"model": "lab-30m", "prompt_tokens": (512, 1024, 2048, 4096), "rounds": 7},
        "gpu": {
            "model": "llama3-8b", "prompt_tokens": (4096, 8192, 16384, 32768), "rounds": 5, "device": "cuda",
            "threads": None,
        },
    }  # fmt: skip  # one line of numbers a scale
    with tempfile.TemporaryDirectory() as folder:
        return measure_layerwise(Path(folder), media=media, seed=seed, **by_scale[check_scale(scale)])


def layerwise_table(measured: LayerwiseMeasurement) -> pd.DataFrame:
    """One row a medium, operation and length: what transfer adds to computing, both ways, and the share hidden.

    Where serializing cost nothing that could be measured, or the share lies outside 0 to 1, the run was too noisy
    to say, and `reading` says that.
    """
    rows = [
        {
            "medium": each.medium,
            "operation": each.operation,
            "tokens": each.moved_tokens,
            "megabytes": each.moved_bytes / 1e6,
            "compute_ms": 1e3 * each.compute_s,
            "serialized_extra_ms": 1e3 * each.serialized_extra_s,
            "layerwise_extra_ms": 1e3 * each.layerwise_extra_s,
            "hidden_share": each.hidden_share,
            "reading": _reading(each.serialized_extra_s, each.hidden_share),
        }
        for each in measured.times
    ]
    return pd.DataFrame(rows)


def _reading(serialized_extra_s: float, hidden_share: float) -> str:
    return "clear" if serialized_extra_s > 0 and 0 <= hidden_share <= 1 else "too noisy"


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
