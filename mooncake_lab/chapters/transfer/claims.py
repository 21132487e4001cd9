"""Chapter 08's numbers held against what the papers print and draw."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, cast

import pandas as pd

from mooncake_lab.chapters.transfer.model import StoreLatency, saved_percent
from mooncake_lab.paper import Compared, ComparisonTable, claim, claimed, comparison_table, detail, unless_twin

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
    yield claimed(claim("A27"), (layerwise_s - storing.link.model.latency_s) / serialized_s)
    yield detail(claimed(claim("A27"), layerwise_s / serialized_s), "with the constant fitted to the same figure")


def _engines() -> Iterator[Compared]:
    for number in range(34, 40):
        yield claimed(claim(f"F{number}"), None)  # two nodes and their network cards


def _demand(demand: pd.DataFrame) -> Iterator[Compared]:
    for streams, words in ((True, "streamed layer by layer"), (False, "sent after the prefill")):
        chosen = (demand["streams_layers"] == streams) & demand["reuses"]
        rows = cast("pd.DataFrame", demand[chosen])
        row = claimed(claim("F40"), least_bandwidth_gbps(rows))
        told = replace(row, quantity=f"{row.quantity}; {words}") if streams else detail(row, words)
        yield unless_twin(told, str(rows["origin"].to_list()[0]))


def _slow_networks(demand: pd.DataFrame) -> Iterator[Compared]:
    rows = [row for row in demand.to_dict(orient="records") if row["streams_layers"] and row["reuses"]]
    by_gbps = {float(row["gbps"]): row for row in rows}
    for identifier, gbps in (("F72", 24.0), ("F73", 40.0)):
        row = claimed(claim(identifier), float(by_gbps[gbps]["mean_ttft_s"]))
        yield (
            row
            if by_gbps[gbps]["origin"] == "released"
            else replace(row, quantity=f"{row.quantity} (on the twin)")
        )


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
    yield claimed(claim("F41"), saved_percent(slices, "prefill"))
    yield claimed(claim("F42"), saved_percent(slices, "schedule", "prefill", "transfer", "load cache"))
