"""The statistics of the traces held against what both editions print about them."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import pandas as pd

from mooncake_lab.paper import (
    Compared,
    ComparisonTable,
    claim,
    claimed,
    compared,
    comparison_table,
    detail,
    fact,
    unless_twin,
    within,
)

FAST_TABLE_2: Final[Mapping[str, str]] = MappingProxyType(
    {"Conversation": "conversation", "Tool&Agent": "toolagent", "Synthetic": "synthetic"}
)
"""The workloads of FAST'25 Table 2 and our names for them."""

_EXACT = within(0)
_ROUNDED = within(0.005)  # printed without decimals: half a token of a hundred
_PERCENT = within(0.02)  # printed in whole percent: a point of fifty


def beside_papers(numbers: pd.DataFrame) -> ComparisonTable:
    """FAST'25 Table 2, arXiv §4 and arXiv Table 2 beside ours; a twin is shown but never judged.

    Args:
        numbers: the rows of `TraceNumbers` for all four workloads.

    Raises:
        ValueError: when a workload is missing.
    """
    ours = {row["workload"]: row for row in numbers.to_dict(orient="records")}
    needed = (*FAST_TABLE_2.values(), "arxiv")
    if missing := [name for name in needed if name not in ours]:
        raise ValueError(f"the numbers lack {', '.join(missing)}; needed are {', '.join(needed)}")
    rows = [*_fast_table_2(ours), *_arxiv_section_4(ours["arxiv"]), *_block_uses(ours), *_arxiv_table_2()]
    return comparison_table(rows)


def same_bins(histogram: pd.DataFrame, paper: pd.DataFrame) -> pd.DataFrame:
    """The bins of arXiv Fig. 5 with our counts, theirs, and whether they are equal.

    Args:
        histogram: rows of `LengthHistogram` for one workload, of input or output.
        paper: the curve of the same panel.

    Raises:
        ValueError: when the two have different numbers of bins.
    """
    if len(histogram) != len(paper):
        raise ValueError(f"ours has {len(histogram)} bins and the paper's {len(paper)}; they must be as many")
    ours, theirs = histogram["requests"].to_numpy(), paper["y"].to_numpy()
    return pd.DataFrame(
        {"from_tokens": histogram["left"].to_numpy(), "ours": ours, "paper": theirs, "same": ours == theirs}
    )


def _fast_table_2(ours: Mapping[str, Mapping[str, Any]]) -> Iterator[Compared]:
    for series, workload in FAST_TABLE_2.items():
        row = ours[workload]
        pairs = (
            ("requests", "num_requests", row["requests"], _EXACT),
            ("mean input", "avg_input_tokens", row["mean_input_tokens"], _ROUNDED),
            ("mean output", "avg_output_tokens", row["mean_output_tokens"], _ROUNDED),
            ("cache ratio", "cache_ratio_percent", 100 * row["ideal_token_hit_rate"], _PERCENT),
        )
        for quantity, x, value, yardstick in pairs:
            printed = fact("fast_table2_workloads", series=series, x=x)
            yield unless_twin(
                compared(f"{series}: {quantity}", printed, value, yardstick, evidence="measured"), row["origin"]
            )


def _arxiv_section_4(row: Mapping[str, Any]) -> Iterator[Compared]:
    pairs = (
        ("requests", "entries", row["requests"], _EXACT),
        ("mean input", "mean_input_tokens", row["mean_input_tokens"], _ROUNDED),
        ("mean output", "mean_output_tokens", row["mean_output_tokens"], _ROUNDED),
        ("mean of input / output", "mean_input_output_ratio", row["mean_input_output_ratio"], _PERCENT),
        ("duration", "duration_s", row["duration_s"], _PERCENT),
    )
    for quantity, x, value, yardstick in pairs:
        printed = fact("arxiv_sec4_trace_statistics", series="printed", x=x)
        yield unless_twin(
            compared(f"open trace: {quantity}", printed, value, yardstick, evidence="measured"), row["origin"]
        )


def _block_uses(ours: Mapping[str, Mapping[str, Any]]) -> Iterator[Compared]:
    """Both claims are about the open trace; the conversation trace, which is released, stands beside it."""
    open_trace, chat = ours["arxiv"], ours["conversation"]
    asked = claim("A12")
    yield unless_twin(claimed(asked, 100 * open_trace["single_use_share"]), open_trace["origin"])
    other = detail(claimed(asked, 100 * chat["single_use_share"]), "conversation trace instead")
    yield unless_twin(other, chat["origin"])
    yield unless_twin(claimed(claim("A13"), open_trace["max_uses"]), open_trace["origin"])


def _arxiv_table_2() -> Iterator[Compared]:
    for series in ("ArXiv Summarization", "L-Eval", "Real data"):
        for quantity, x in (("mean input", "avg_input_tokens"), ("mean output", "avg_output_tokens")):
            printed = fact("arxiv_table2_datasets", series=series, x=x)
            yield compared(
                f"{series}: {quantity} (no released trace)",
                printed,
                None,
                _ROUNDED,
                evidence="measured",
                reach="scope",
            )
