"""End-to-end results held against FAST'25 Figs. 1, 6, 7, 8 and 15 and arXiv Figs. 11, 12 and 13."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import pandas as pd

from mooncake_lab.chapters.endtoend.experiment import LIMITS_MS
from mooncake_lab.chapters.endtoend.rates import PUBLIC, SIMULATED, highest_rate
from mooncake_lab.experiments import records, value, where
from mooncake_lab.paper import (
    Bound,
    Compared,
    ComparisonTable,
    claimed,
    claims,
    comparison_table,
    fact,
    marked_if_twin,
    unless_twin,
)

SYSTEMS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "mooncake": "Mooncake",
        "vllm": "vLLM",
        "vllm_prefix": "vLLM Prefix Caching",
        "vllm_chunked": "vLLM Chunked Prefill",
    }
)
"""Our systems and the series of FAST'25 Figs. 1 and 6 to 8."""
WORKLOADS: Final[Mapping[str, str]] = MappingProxyType(
    {"conversation": "Conversation", "toolagent": "Tool&Agent", "synthetic": "Synthetic"}
)
"""Our workloads and the groups of FAST'25 Fig. 8."""
CURVES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "conversation": "fast_fig01_tbt_cdf_conversation",
        "toolagent": "fast_fig06_tbt_cdf_toolagent",
        "synthetic": "fast_fig07_tbt_cdf_synthetic",
    }
)
"""The capacity curves by workload."""
AT_LIMITS: Final[Mapping[str, str]] = MappingProxyType(
    {"conversation": "fast_fig01_capacity_at_thresholds", "synthetic": "fast_fig07_capacity_at_thresholds"}
)
"""What the paper reads off them at its three limits, for the released traces."""
REAL: Final[Mapping[str, str]] = MappingProxyType({"mooncake": "Mooncake-[10P+10D]", "vllm": "vLLM-[20M]"})
"""Our systems and the series of arXiv Fig. 13."""

_GAINS = MappingProxyType(
    {
        "conversation": ("vllm", ("F01", "F02", "F03")),
        "toolagent": ("vllm_prefix", ("F04", "F05", "F06")),
        "synthetic": ("vllm", ("F07", "F08", "F09")),
    }
)
_RATIOS = MappingProxyType(
    {
        "conversation": {"vllm_prefix": "F50", "vllm_chunked": "F51"},
        "toolagent": {"vllm_prefix": "F52", "vllm_chunked": "F53"},
        "synthetic": {"vllm_prefix": "F54", "vllm_chunked": "F55"},
    }
)
_CAPACITIES = MappingProxyType(
    {
        ("conversation", "vllm_prefix"): ("F56", "F57"),
        ("conversation", "vllm_chunked"): ("F58", "F59"),
        ("toolagent", "vllm_prefix"): ("F60", "F61"),
        ("toolagent", "vllm_chunked"): ("F62", "F63"),
        ("synthetic", "vllm_prefix"): ("F64", "F65"),
        ("synthetic", "vllm_chunked"): ("F66", "F67"),
    }
)
_FIG_15 = MappingProxyType(
    {
        "F74": (11, "effective", 100),
        "F75": (5, "tbt_fast_mean_s", 1000),
        "F76": (11, "tbt_fast_mean_s", 1000),
        "F77": (5, "ttft_mean_s", 1),
        "F78": (8, "ttft_mean_s", 1),
    }
)
"""Prefill nodes, our column, and its factor into the paper's unit."""
_SAVINGS = MappingProxyType({"conversation": "F17", "toolagent": "F18", "synthetic": "F19"})


def beside_papers(
    traces: pd.DataFrame, splits: pd.DataFrame, real: pd.DataFrame, rates: pd.DataFrame
) -> ComparisonTable:
    """Every claim of this topic with our number.

    Args:
        traces: rows of `EndToEnd`, four systems on three workloads, chunked prefill with its documented chunk.
        splits: rows of `EndToEnd` of Mooncake on the synthetic workload, one a number of prefill nodes.
        real: rows of `EndToEnd` of Mooncake and vLLM, as `REAL` names them.
        rates: what `rates.normalised` made of all datasets.
    """
    fast = [*_gains(traces), *_gpu_time(traces), *_shares(traces), *_split(splits)]
    return comparison_table([*fast, *_real(real), *_throughput(rates), *_production()])


def gain_percent(traces: pd.DataFrame, workload: str, over: str, limit_ms: int) -> float:
    """By how much Mooncake's effective request capacity exceeds a baseline's, in percent of the baseline's."""
    column = f"capacity_{limit_ms}_ms"
    return 100 * (_cell(traces, workload, "mooncake", column) / _cell(traces, workload, over, column) - 1)


def attainment(rows: pd.DataFrame) -> pd.DataFrame:
    """Effective requests of vLLM in percent, one row per router, host, workload and limit, and the paper's.

    Args:
        rows: rows of `EndToEnd` of vLLM on the workloads of `AT_LIMITS`.
    """
    ours = [
        {
            "router": row["router"],
            "host": f"{1e3 * row['host_s']:g} ms",
            "workload": row["workload"],
            "limit_ms": limit,
        }
        | {"percent": 100 * row[f"capacity_{limit}_ms"]}
        for row in rows.to_dict(orient="records")
        for limit in LIMITS_MS
    ]
    theirs = [
        {"router": "FAST'25", "host": "unknown", "workload": workload, "limit_ms": limit}
        | {"percent": fact(name, series=SYSTEMS["vllm"], x=limit).value}
        for workload, name in AT_LIMITS.items()
        for limit in LIMITS_MS
    ]
    return pd.DataFrame([*ours, *theirs])


def throughput_gain(rates: pd.DataFrame, dataset: str, *, both: bool = False) -> tuple[float, Bound]:
    """By how much Mooncake's highest passing rate exceeds vLLM's, in percent of vLLM's.

    Args:
        rates: what `rates.normalised` made.
        dataset: which.
        both: whether a rate passes both SLOs, or that on TTFT alone.

    Returns:
        The gain, and whether it is only a lower bound: Mooncake passed the highest tested rate.
    """
    ours, theirs = (highest_rate(rates, dataset, name, both=both) for name in ("3P+1D", "4M"))
    tested = rates[rates["dataset"] == dataset]["requests_per_s"]
    bound: Bound = "at least" if ours == max(tested.tolist()) else "exact"
    return (100 * (ours / theirs - 1) if theirs else -100.0), bound


def best_split(splits: pd.DataFrame) -> tuple[float, Bound]:
    """Prefill over decode nodes where most requests are effective; on a plateau, the middle of it.

    The plateau is whatever lies within half a point of the best, about what seven numbers of FAST'25 Fig. 15
    differ by on theirs.

    Returns:
        The ratio, and whether it is only a lower bound: a sweep that ends on the plateau does not show its end.
    """
    rows = splits.to_dict(orient="records")
    most = max(float(row["effective"]) for row in rows)
    plateau = [float(row["prefill_nodes"]) for row in rows if row["effective"] > most - 0.005]
    prefill = sum(plateau) / len(plateau)
    ratio = prefill / (rows[0]["prefill_nodes"] + rows[0]["decode_nodes"] - prefill)
    ends_on_it = max(plateau) == max(float(row["prefill_nodes"]) for row in rows)
    return ratio, "at least" if ends_on_it else "exact"


def _gains(traces: pd.DataFrame) -> Iterator[Compared]:
    for workload, (over, identifiers) in _GAINS.items():
        for identifier, limit_ms in zip(identifiers, (100, 200, 300), strict=True):
            yield _on(traces, workload, identifier, gain_percent(traces, workload, over, limit_ms))
    over_300 = 100 * (1 - _cell(traces, "synthetic", "vllm", "capacity_300_ms"))
    yield _on(traces, "synthetic", "F10", over_300)
    vllm, chunked = (_cell(traces, "synthetic", name, "capacity_100_ms") for name in ("vllm", "vllm_chunked"))
    yield _on(traces, "synthetic", "F49", vllm / chunked)


def _gpu_time(traces: pd.DataFrame) -> Iterator[Compared]:
    for workload, identifier in _SAVINGS.items():
        origin = "twin" if _is_twin(traces, workload) else "released"
        ours = {name: _cell(traces, workload, name, "prefill_gpu_s") for name in SYSTEMS}
        saved = 100 * (1 - ours["mooncake"] / ours["vllm"])
        requests = int(_cell(traces, workload, "mooncake", "requests"))
        # what is saved follows from lengths and sharing, which a twin is made to have
        yield unless_twin(claimed(identifier, saved, requests=requests), origin)
        for name, number in _RATIOS[workload].items():
            yield unless_twin(claimed(number, ours[name] / ours["mooncake"], requests=requests), origin)


def _shares(traces: pd.DataFrame) -> Iterator[Compared]:
    """The capacities of FAST'25 Figs. 1, 6 and 7 that are no gain of Mooncake's."""
    for (workload, system), identifiers in _CAPACITIES.items():
        for identifier, limit_ms in zip(identifiers, (100, 300), strict=True):
            share = _cell(traces, workload, system, f"capacity_{limit_ms}_ms")
            yield _on(traces, workload, identifier, 100 * share)


def _split(splits: pd.DataFrame) -> Iterator[Compared]:
    twin = splits["origin"].iloc[0] != "released"
    ratio, bound = best_split(splits)
    yield marked_if_twin(claimed("F45", ratio, bound=bound), twin)
    for identifier, (prefill_nodes, column, scale) in _FIG_15.items():
        (row,) = records(splits, prefill_nodes=prefill_nodes)
        judged = claimed(identifier, scale * float(row[column]), requests=int(row["requests"]))
        yield marked_if_twin(judged, twin)


def _real(real: pd.DataFrame) -> Iterator[Compared]:
    twin = real["origin"].iloc[0] != "released"
    rows = {str(row["system"]): row for row in real.to_dict(orient="records")}
    mooncake, vllm = (float(rows[name]["within_tbt"]) for name in REAL)
    least_ttft = min(float(rows[name]["within_ttft"]) for name in REAL)
    ours = {
        "A03": 100 * (mooncake / vllm - 1),
        "A04": 100 * mooncake,
        "A05": 100 * vllm,
        "A06": 100 * least_ttft,
    }
    for identifier, number in ours.items():
        yield marked_if_twin(claimed(identifier, number, requests=min(real["requests"].tolist())), twin)


def _throughput(rates: pd.DataFrame) -> Iterator[Compared]:
    length = min(rates["requests"].tolist())
    for identifier, dataset in (("A01", "16k"), ("A02", "64k")):
        gain, bound = throughput_gain(rates, dataset)
        yield claimed(identifier, gain, requests=length, bound=bound)
    for identifier, dataset in (("A33", "32k"), ("A34", "128k")):
        gain, bound = throughput_gain(rates, dataset)
        yield claimed(identifier, 1 + gain / 100, requests=length, bound=bound)
    for identifier, dataset in zip(("A07", "A08"), PUBLIC, strict=True):
        gain, bound = throughput_gain(rates, dataset, both=True)
        yield claimed(identifier, gain, requests=length, bound=bound)
    mine = [r for r in rates.to_dict(orient="records") if r["system"] != "4M" and r["dataset"] in SIMULATED]
    yield claimed("A23", max(float(row["tbt"]) for row in mine), requests=length)


def _production() -> Iterator[Compared]:
    """What only production could show: listed, so that nothing is left out in silence."""
    for each in claims():
        if each.chapter == "10_endtoend" and each.reach == "scope":
            yield claimed(each, None)


def _on(traces: pd.DataFrame, workload: str, identifier: str, ours: float) -> Compared:
    """A claim judged on one workload's replays."""
    requests = int(_cell(traces, workload, "mooncake", "requests"))
    return marked_if_twin(claimed(identifier, ours, requests=requests), _is_twin(traces, workload))


def _cell(rows: pd.DataFrame, workload: str, system: str, column: str) -> float:
    return float(value(rows, column, workload=workload, system=system))


def _is_twin(rows: pd.DataFrame, workload: str) -> bool:
    return any(where(rows, workload=workload)["origin"] != "released")
