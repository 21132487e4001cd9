"""Which whole traces are replayed for chapter 11, and the rule by which the order of arXiv Table 3 is judged.

The settings and the rule were written down before the replays were made.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from mooncake_lab.book.chapters.overload.experiment import Overload, PolicyName
from mooncake_lab.book.experiments import vary
from mooncake_lab.book.testbeds.arxiv import arxiv_fit

POLICIES: Final[tuple[PolicyName, ...]] = ("after_prefill", "early", "predictive", "committed")
"""The three policies of Table 3, and *counting prefills*."""
JUDGED_THRESHOLD: Final = 0.98
"""The arrival threshold at which the order is judged."""
ARRIVAL_THRESHOLDS: Final = (0.95, JUDGED_THRESHOLD, 1.0)
"""Loads at which a request is refused on arrival; the second check refuses at 1."""
TTFT_LIMITS_S: Final = (15.0, 30.0)
PREFILL_FACTORS: Final = (1.3, 1.5, 1.7, 1.9, 2.1)
DECODE_FACTORS: Final = (5.5, 6.5, 7.5, 8.5, 9.5)
REPLAY: Final = Overload(workload="toolagent", first=23_000, prefill_factor=1.7)
"""arXiv Table 3: 23,000 requests of the tool&agent kind at twice their speed on 8 prefill and 8 decode nodes."""
POINT_A: Final = replace(REPLAY, decode_factor=6.5, ttft_limit_s=15.0)
"""A point that meets the level of Table 3; it was found by a search that looked at Table 3."""
POINT_B: Final = replace(REPLAY, decode_factor=7.5, ttft_limit_s=30.0)
"""A point that meets the ratios of Table 3, found likewise."""

ONLY_DECODE_SCARCE: Final = Overload(workload="toolagent", first=23_000, decode_nodes=3, tbt_limit_s=0.04)
"""FAST'25's node with three decode nodes and a short TBT limit, where prefill is not scarce."""


def with_policies(
    point: Overload, policies: Sequence[PolicyName], thresholds: Sequence[float]
) -> Iterator[Overload]:
    """The replays of a point under each policy and arrival threshold; the baseline has no check that uses it."""
    for policy in policies:
        if policy == "after_prefill":
            yield replace(point, policy=policy, arrival_threshold=None)
        else:
            yield from vary(replace(point, policy=policy), arrival_threshold=tuple(thresholds))


def fitted_points() -> list[Overload]:
    """The testbed that was fitted to arXiv Figs. 8 and 13, at both limits on TTFT."""
    fitted = arxiv_fit().optimum
    point = replace(
        REPLAY,
        prefill_factor=fitted.prefill,
        decode_factor=fitted.decode,
        decode_constant_s=fitted.constant_s,
    )
    return list(vary(point, ttft_limit_s=TTFT_LIMITS_S))


def only_decode_scarce(twins: Sequence[int]) -> list[Overload]:
    """FAST'25's node with three decode nodes and a TBT limit of 0.04 s, where prefill is not scarce."""
    points = [*vary(ONLY_DECODE_SCARCE, twin=tuple(twins)), replace(ONLY_DECODE_SCARCE, workload="conversation")]
    return [each for point in points for each in with_policies(point, POLICIES, (JUDGED_THRESHOLD,))]


KEY: Final = (
    "workload",
    "policy",
    "twin",
    "decode_nodes",
    "tbt_limit_s",
    "prefill_factor",
    "decode_factor",
    "decode_constant_s",
    "ttft_limit_s",
    "arrival_threshold",
)
"""The settings that differ among the recorded replays; the others are those of `REPLAY`."""


def key_of(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """By what a replay is found in the table, whether its settings are values or text."""
    return tuple(_same(settings[name]) for name in KEY)


def _same(value: Any) -> str:
    try:
        return f"{float(value):g}"
    except (TypeError, ValueError):
        return "" if value is None else str(value)


OrderVerdict = Literal["reproduced", "conditional", "not reproduced"]


def judged_order(upper_ends: Mapping[float, Sequence[float]], region_has_it: bool) -> OrderVerdict:
    """The verdict on the order of arXiv Table 3: early rejection and prediction reject less than the baseline.

    The rule was fixed before the replays. The order is reproduced if at the fitted point, over at least seven
    twins and at an arrival threshold of 0.98, the 95 % intervals of both ratios to the baseline lie below 1 at
    both limits of TTFT. It is conditional if they do at one of the limits, or if cells of the map in the region of
    the fit have the order. Otherwise it is not reproduced.

    Args:
        upper_ends: by TTFT limit (s), the upper ends of the intervals of early and prediction over the baseline.
        region_has_it: whether a cell of the map within the region of the fit has the order.
    """
    holds = [max(ends) < 1 for ends in upper_ends.values()]
    if all(holds):
        return "reproduced"
    return "conditional" if any(holds) or region_has_it else "not reproduced"
