"""End-to-end results held against FAST'25 Figs. 1, 6, 7, 8 and 15 and arXiv Figs. 11, 12 and 13."""

from collections.abc import Iterator, Mapping
from typing import Final

import pandas as pd

from mooncake_lab.book import paper
from mooncake_lab.book.chapters.endtoend.experiment import LIMITS_MS
from mooncake_lab.book.chapters.endtoend.rates import SIMULATED, highest_rate
from mooncake_lab.book.experiments import records, value, where
from mooncake_lab.core import sum_in_order

SYSTEMS: Final = {
    "mooncake": "Mooncake",
    "vllm": "vLLM",
    "vllm_prefix": "vLLM Prefix Caching",
    "vllm_chunked": "vLLM Chunked Prefill",
}
"""Our systems and the series of FAST'25 Figs. 1 and 6 to 8."""
WORKLOADS: Final = {"conversation": "Conversation", "toolagent": "Tool&Agent", "synthetic": "Synthetic"}
"""Our workloads and the groups of FAST'25 Fig. 8."""
CURVES: Final = {
    "conversation": "fast_fig01_tbt_cdf_conversation",
    "toolagent": "fast_fig06_tbt_cdf_toolagent",
    "synthetic": "fast_fig07_tbt_cdf_synthetic",
}
"""The capacity curves by workload."""
AT_LIMITS: Final = {
    "conversation": "fast_fig01_capacity_at_thresholds",
    "toolagent": "fast_fig06_capacity_at_thresholds",
    "synthetic": "fast_fig07_capacity_at_thresholds",
}
"""What the paper reads off them at its three limits."""
REAL: Final = {"mooncake": "Mooncake-[10P+10D]", "vllm": "vLLM-[20M]"}
"""Our systems and the series of arXiv Fig. 13."""

_GAINS: Final = {
    "conversation": ("vllm", ("F01", "F02", "F03")),
    "toolagent": ("vllm_prefix", ("F04", "F05", "F06")),
    "synthetic": ("vllm", ("F07", "F08", "F09")),
}
"""By workload: over which baseline, and the claims at the three limits."""
_GPU_TIME: Final = {"conversation": ("F17", "F50", "F51"), "toolagent": ("F18", "F52", "F53")} | {
    "synthetic": ("F19", "F54", "F55")
}
"""What Mooncake saves over vLLM, and what vLLM takes over Mooncake with prefix caching and in chunks."""
_CAPACITIES: Final[Mapping[tuple[str, str], Mapping[str, int]]] = {
    ("conversation", "mooncake"): {"F201": 100, "F202": 200, "F203": 300},
    ("conversation", "vllm"): {"F204": 100, "F205": 200, "F206": 300},
    ("conversation", "vllm_prefix"): {"F56": 100, "F57": 300},
    ("conversation", "vllm_chunked"): {"F58": 100, "F59": 300},
    ("toolagent", "mooncake"): {"F207": 100, "F208": 200, "F209": 300},
    ("toolagent", "vllm"): {"F210": 100, "F211": 200, "F212": 300},
    ("toolagent", "vllm_prefix"): {"F60": 100, "F61": 300},
    ("toolagent", "vllm_chunked"): {"F62": 100, "F63": 300},
    ("synthetic", "mooncake"): {"F213": 100, "F214": 200, "F215": 300},
    ("synthetic", "vllm"): {"F216": 100, "F217": 200, "F218": 300},
    ("synthetic", "vllm_prefix"): {"F64": 100, "F65": 300},
    ("synthetic", "vllm_chunked"): {"F66": 100, "F67": 300},
}
"""The shares of effective requests in FAST'25 Figs. 1, 6 and 7: by workload and system, the limits (ms)."""
_MEDIANS: Final = {"F219": "conversation", "F220": "toolagent", "F221": "synthetic"}
"""The workloads by claims on Mooncake's median TBT."""
_FIG_13: Final = {
    "A126": ("vllm", "within_200_ms", 100),
    "A127": ("vllm", "within_300_ms", 100),
    "A128": ("vllm", "within_500_ms", 100),
    "A129": ("mooncake", "ttft_p50_s", 1),
    "A130": ("mooncake", "ttft_p90_s", 1),
    "A131": ("vllm", "ttft_p50_s", 1),
    "A132": ("vllm", "ttft_p90_s", 1),
}
"""Points of the curves of arXiv Fig. 13: system, our column, and its factor into the paper's unit."""
_FIG_15: Final = {
    "F74": (11, "effective", 100),
    "F75": (5, "tbt_fast_mean_s", 1000),
    "F76": (11, "tbt_fast_mean_s", 1000),
    "F77": (5, "ttft_mean_s", 1),
    "F78": (8, "ttft_mean_s", 1),
    "F108": (5, "effective", 100),
}
"""Prefill nodes, our column, and its factor into the paper's unit."""
_THROUGHPUT: Final = {
    "A01": ("16k", "3P+1D", "percent", False),
    "A02": ("64k", "3P+1D", "percent", False),
    "A33": ("32k", "3P+1D", "ratio", False),
    "A34": ("128k", "3P+1D", "ratio", False),
    "A117": ("16k", "2P+2D", "ratio", False),
    "A118": ("32k", "2P+2D", "ratio", False),
    "A119": ("64k", "2P+2D", "ratio", False),
    "A120": ("128k", "2P+2D", "ratio", False),
    "A07": ("ArXiv Summarization", "3P+1D", "percent", True),
    "A08": ("L-Eval", "3P+1D", "percent", True),
    "A121": ("ArXiv Summarization", "2P+2D", "ratio", True),
    "A122": ("L-Eval", "2P+2D", "ratio", True),
}
"""The dataset, the split of Mooncake, the unit of the gain, and whether a rate has to pass both SLOs."""


def beside_papers(
    traces: pd.DataFrame, splits: pd.DataFrame, real: pd.DataFrame, rates: pd.DataFrame
) -> paper.ComparisonTable:
    """Every claim of this topic with our number.

    Args:
        traces: rows of `EndToEnd`, four systems on three workloads, chunked prefill with its documented chunk.
        splits: rows of `EndToEnd` of Mooncake on the synthetic workload, one a number of prefill nodes.
        real: rows of `EndToEnd` of Mooncake and vLLM, as `REAL` names them.
        rates: what `rates.normalised` made of all datasets.
    """
    fast = [*_gains(traces), *_gpu_time(traces), *_shares(traces), *_medians(traces), *_split(splits)]
    production = [each for each in paper.claims() if each.chapter == "10_endtoend" and each.reach == "scope"]
    unseen = [paper.claimed(each, None) for each in production]  # listed, so that nothing is left out in silence
    return paper.comparison_table([*fast, *_real(real), *_throughput(rates), *unseen])


def gain_percent(traces: pd.DataFrame, workload: str, over: str, limit_ms: int) -> float:
    """By how much Mooncake's effective request capacity exceeds a baseline's, in percent of the baseline's."""
    column = f"capacity_{limit_ms}_ms"
    return 100 * (_cell(traces, workload, "mooncake", column) / _cell(traces, workload, over, column) - 1)


def throughput_gain(
    rates: pd.DataFrame, dataset: str, *, split: str = "3P+1D", both: bool = False
) -> tuple[float, paper.Bound]:
    """By how much Mooncake's highest passing rate exceeds vLLM's, in percent of vLLM's, by one SLO or both.

    Returns:
        The gain, and whether it is only a lower bound: Mooncake passed the highest tested rate.
    """
    ours, theirs = (highest_rate(rates, dataset, name, both=both) for name in (split, "4M"))
    tested = where(rates, dataset=dataset)["requests_per_s"]
    bound: paper.Bound = "at least" if ours == max(tested.tolist()) else "exact"
    return (100 * (ours / theirs - 1) if theirs else -100.0), bound


def best_split(splits: pd.DataFrame) -> tuple[float, paper.Bound]:
    """Prefill over decode nodes where most requests are effective; on a plateau, the middle of it.

    The plateau is whatever lies within half a point of the best, about what seven numbers of FAST'25 Fig. 15
    differ by on theirs.

    Returns:
        The ratio, and whether it is only a lower bound: a sweep that ends on the plateau does not show its end.
    """
    plateau = splits[splits["effective"] > splits["effective"].max() - 0.005]["prefill_nodes"].astype(float)
    prefill = sum_in_order(plateau) / len(plateau)
    first = splits.iloc[0]
    ratio = prefill / (first["prefill_nodes"] + first["decode_nodes"] - prefill)
    return float(ratio), "at least" if max(plateau) == max(splits["prefill_nodes"]) else "exact"


def _gains(traces: pd.DataFrame) -> Iterator[paper.Compared]:
    for workload, (over, identifiers) in _GAINS.items():
        for identifier, limit_ms in zip(identifiers, LIMITS_MS, strict=True):
            yield _on(traces, workload, identifier, gain_percent(traces, workload, over, limit_ms))
    yield _on(traces, "synthetic", "F10", 100 * (1 - _cell(traces, "synthetic", "vllm", "capacity_300_ms")))
    vllm, chunked = (_cell(traces, "synthetic", name, "capacity_100_ms") for name in ("vllm", "vllm_chunked"))
    yield _on(traces, "synthetic", "F49", vllm / chunked)


def _shares(traces: pd.DataFrame) -> Iterator[paper.Compared]:
    for (workload, system), limits_ms in _CAPACITIES.items():
        for identifier, limit_ms in limits_ms.items():
            share = _cell(traces, workload, system, f"capacity_{limit_ms}_ms")
            yield _on(traces, workload, identifier, 100 * share)


def _medians(traces: pd.DataFrame) -> Iterator[paper.Compared]:
    for identifier, workload in _MEDIANS.items():
        yield _on(traces, workload, identifier, 1e3 * _cell(traces, workload, "mooncake", "tbt_fast_p50_s"))


def _on(traces: pd.DataFrame, workload: str, identifier: str, ours: float) -> paper.Compared:
    """A claim on one workload's replays, which the released trace decides: a gain depends on each arrival."""
    requests = int(_cell(traces, workload, "mooncake", "requests"))
    return paper.unless_twin(paper.claimed(identifier, ours, requests=requests), _origin(traces, workload))


def _origin(traces: pd.DataFrame, workload: str) -> str:
    found = where(traces, workload=workload)["origin"]
    return "released" if all(found == "released") else "twin"


def _gpu_time(traces: pd.DataFrame) -> Iterator[paper.Compared]:
    """What is saved follows from lengths and sharing, which a twin is made to have."""
    for workload, identifiers in _GPU_TIME.items():
        rows = where(traces, workload=workload).set_index("system")
        spent: dict[str, float] = rows["prefill_gpu_s"].to_dict()
        mooncake, requests = spent["mooncake"], int(_cell(traces, workload, "mooncake", "requests"))
        ours = [100 * (1 - mooncake / spent["vllm"]), spent["vllm_prefix"] / mooncake]
        ours.append(spent["vllm_chunked"] / mooncake)
        origin = _origin(traces, workload)
        for identifier, number in zip(identifiers, ours, strict=True):
            yield paper.unless_twin(paper.claimed(identifier, number, requests=requests), origin)


def _split(splits: pd.DataFrame) -> Iterator[paper.Compared]:
    twin = splits["origin"].iloc[0] != "released"
    ratio, bound = best_split(splits)
    yield paper.marked_if_twin(paper.claimed("F45", ratio, bound=bound), twin)
    for identifier, (prefill_nodes, column, scale) in _FIG_15.items():
        (row,) = records(splits, prefill_nodes=prefill_nodes)
        judged = paper.claimed(identifier, scale * float(row[column]), requests=int(row["requests"]))
        yield paper.marked_if_twin(judged, twin)


def _real(real: pd.DataFrame) -> Iterator[paper.Compared]:
    twin = real["origin"].iloc[0] != "released"
    rows = real.set_index("system").loc[list(REAL)]
    mooncake, vllm = rows["within_tbt"].tolist()
    ours = {
        "A03": 100 * (mooncake / vllm - 1),
        "A04": 100 * mooncake,
        "A05": 100 * vllm,
        "A06": 100 * min(rows["within_ttft"].tolist()),
        **{name: scale * value(real, column, system=of) for name, (of, column, scale) in _FIG_13.items()},
    }
    for identifier, number in ours.items():
        judged = paper.claimed(identifier, number, requests=min(real["requests"].tolist()))
        yield paper.marked_if_twin(judged, twin)


def _throughput(rates: pd.DataFrame) -> Iterator[paper.Compared]:
    length = min(rates["requests"].tolist())
    for identifier, (dataset, split, unit, both) in _THROUGHPUT.items():
        gain, bound = throughput_gain(rates, dataset, split=split, both=both)
        number = gain if unit == "percent" else 1 + gain / 100
        yield paper.claimed(identifier, number, requests=length, bound=bound)
    mine = rates[(rates["system"] != "4M") & rates["dataset"].isin(SIMULATED)]
    yield paper.claimed("A23", max(mine["tbt"].tolist()), requests=length)


def _cell(rows: pd.DataFrame, workload: str, system: str, column: str) -> float:
    return float(value(rows, column, workload=workload, system=system))
