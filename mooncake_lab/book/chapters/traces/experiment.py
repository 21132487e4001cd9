"""Chapter 01: the statistics of the traces, beside both editions."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from mooncake_lab.book.experiments import OfTrace
from mooncake_lab.book.paper import (
    Compared,
    ComparisonTable,
    claim,
    claimed,
    compared,
    comparison_table,
    curve,
    detail,
    fact,
    unless_twin,
    within,
)
from mooncake_lab.workload import (
    Trace,
    conversation_sizes,
    reuse_gaps_s,
    statistics,
    use_counts,
    with_larger_blocks,
)

FIRST_REQUESTS: Final = {"smoke": 500, "classroom": None, "full": None, "gpu": None}
"""How many requests of each trace a scale reads; None is all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceNumbers(OfTrace):
    """One row: the statistics of a trace, those of a spread as `input_tokens_p50`, and where it came from."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """Read the trace and count."""
        trace = self.trace()
        row: dict[str, Any] = {"origin": trace.origin, "source": trace.source, "tick_s": tick_s(trace)}
        for name, value in asdict(statistics(trace)).items():
            row |= {f"{name}_{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
        yield row


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLengths(OfTrace):
    """Requests in each of the 40 bins of arXiv Fig. 5; lengths outside fall into the outer bins."""

    of: Literal["input", "output"] = "input"

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row a bin: left and right edge (tokens), requests."""
        trace, edges = self.trace(), bin_edges(self.of)
        lengths = trace.input_tokens if self.of == "input" else trace.output_tokens
        counts = np.histogram(np.clip(lengths, edges[0], edges[-1]), edges)[0]
        for left, right, count in zip(edges, edges[1:], counts, strict=False):
            yield {"left": left, "right": right, "requests": count}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockUses(OfTrace):
    """How often blocks are used: the share of unique blocks with at most a given number of uses (arXiv Fig. 6)."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row for each number of uses that occurs."""
        uses, blocks = np.unique(use_counts(self.trace()), return_counts=True)
        for count, share in zip(uses, np.cumsum(blocks) / blocks.sum(), strict=True):
            yield {"uses": count, "share_at_most": share}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals(OfTrace):
    """Requests at each distinct timestamp of the first minute."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row a timestamp."""
        arrival_s = self.trace().arrival_s
        at_s, counts = np.unique(arrival_s[arrival_s <= arrival_s[0] + 60.0], return_counts=True)
        for time_s, count in zip(at_s, counts, strict=True):
            yield {"at_s": time_s, "arriving": count}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations(OfTrace):
    """Requests by the number of turns of the conversation they belong to, as inferred from shared blocks."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row per number of turns: share of requests in conversations with at least that many turns."""
        turns, conversations = np.unique(conversation_sizes(self.trace()), return_counts=True)
        held = turns * conversations
        share = np.cumsum(held[::-1])[::-1] / held.sum()
        for k, number, at_least in zip(turns, conversations, share, strict=True):
            yield {"turns": k, "conversations": number, "share_at_least": at_least}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseGaps(OfTrace):
    """How long until a block is used again: the gaps at each percent of all reuses."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row a percent; none where nothing is used again."""
        gaps_s = reuse_gaps_s(self.trace())
        shares = np.linspace(0, 1, 101)
        for share, gap_s in zip(shares, np.quantile(gaps_s, shares) if len(gaps_s) else (), strict=False):
            yield {"share": share, "gap_s": gap_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class LargerBlocks(OfTrace):
    """What an endless cache could reuse of a trace if `factor` blocks were one."""

    factor: int = 1

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row: the block size and both ideal hit rates."""
        numbers = statistics(with_larger_blocks(self.trace(), self.factor))
        columns = ("block_size_tokens", "ideal_block_hit_rate", "ideal_token_hit_rate")
        yield {name: getattr(numbers, name) for name in columns}


def tick_s(trace: Trace) -> float | None:
    """The median step between distinct timestamps; None when all requests arrive at once."""
    steps_s = np.diff(np.unique(trace.arrival_s))
    return float(np.median(steps_s)) if len(steps_s) else None


def bin_edges(of: Literal["input", "output"]) -> npt.NDArray[np.float64]:
    """Shape (41,): the edges of the equal bins of arXiv Fig. 5, in tokens."""
    left = curve(f"arxiv_fig05_{of}_length_histogram")["x"].to_numpy(dtype=np.float64)
    return np.linspace(left[0], left[-1] + (left[-1] - left[0]) / (len(left) - 1), len(left) + 1)


FAST_TABLE_2: Final = {"Conversation": "conversation", "Tool&Agent": "toolagent", "Synthetic": "synthetic"}
"""The workloads of FAST'25 Table 2 and our names for them."""

_EXACT = within(0)
_ROUNDED = within(0.005)  # printed without decimals: half a token of a hundred
_PERCENT = within(0.02)  # printed in whole percent: a point of fifty


def beside_papers(numbers: pd.DataFrame) -> ComparisonTable:
    """FAST'25 Table 2, arXiv §4 and arXiv Table 2 beside ours; a twin is shown but never judged."""
    ours = {row["workload"]: row for row in numbers.to_dict(orient="records")}
    rows = [*_fast_table_2(ours), *_arxiv_section_4(ours["arxiv"]), *_block_uses(ours), *_arxiv_table_2()]
    return comparison_table(rows)


def same_bins(histogram: pd.DataFrame, paper: pd.DataFrame) -> pd.DataFrame:
    """The bins of arXiv Fig. 5 with our counts, theirs, and whether they are equal.

    Raises:
        ValueError: when the two have different numbers of bins.
    """
    if len(histogram) != len(paper):
        raise ValueError(f"ours has {len(histogram)} bins and the paper's {len(paper)}; they must be as many")
    ours, theirs = histogram["requests"].to_numpy(), paper["y"].to_numpy()
    return pd.DataFrame(
        {"from_tokens": histogram["left"].to_numpy(), "ours": ours, "paper": theirs, "same": ours == theirs}
    )


_COLUMNS: Final = {
    "requests": ("requests", 1, _EXACT),
    "mean input": ("mean_input_tokens", 1, _ROUNDED),
    "mean output": ("mean_output_tokens", 1, _ROUNDED),
    "cache ratio": ("ideal_token_hit_rate", 100, _PERCENT),
    "mean of input / output": ("mean_input_output_ratio", 1, _PERCENT),
    "duration": ("duration_s", 1, _PERCENT),
}
"""By quantity: our column, its factor into the paper's unit, and how closely they must match."""
_TABLE_2: Final = {
    "requests": "num_requests",
    "mean input": "avg_input_tokens",
    "mean output": "avg_output_tokens",
    "cache ratio": "cache_ratio_percent",
}
_SECTION_4: Final = {
    "requests": "entries",
    "mean input": "mean_input_tokens",
    "mean output": "mean_output_tokens",
    "mean of input / output": "mean_input_output_ratio",
    "duration": "duration_s",
}
_CLAIMS: Final = {
    "Conversation: cache ratio": "F101",
    "Tool&Agent: cache ratio": "F102",
    "Synthetic: cache ratio": "F103",
    "open trace: mean input": "A101",
    "open trace: mean of input / output": "A102",
}
"""The rows that decide a claim."""


def _fast_table_2(ours: Mapping[str, Mapping[str, Any]]) -> Iterator[Compared]:
    for series, workload in FAST_TABLE_2.items():
        yield from _printed("fast_table2_workloads", series, _TABLE_2, series, ours[workload])


def _arxiv_section_4(row: Mapping[str, Any]) -> Iterator[Compared]:
    return _printed("arxiv_sec4_trace_statistics", "printed", _SECTION_4, "open trace", row)


def _printed(
    name: str, series: str, quantities: Mapping[str, str], words: str, row: Mapping[str, Any]
) -> Iterator[Compared]:
    for quantity, x in quantities.items():
        column, unit, yardstick = _COLUMNS[quantity]
        said, number = f"{words}: {quantity}", unit * row[column]
        if said in _CLAIMS:
            found = replace(claimed(_CLAIMS[said], number), quantity=said)
        else:
            printed = fact(name, series=series, x=x)
            found = compared(said, printed, number, yardstick, evidence="measured")
        yield unless_twin(found, row["origin"])


def _block_uses(ours: Mapping[str, Mapping[str, Any]]) -> Iterator[Compared]:
    """Both claims are about the open trace; the conversation trace, which is released, stands beside it."""
    open_trace, chat = ours["arxiv"], ours["conversation"]
    asked = claim("A12")
    yield unless_twin(claimed(asked, 100 * open_trace["single_use_share"]), open_trace["origin"])
    other = detail(claimed(asked, 100 * chat["single_use_share"]), "conversation trace instead")
    yield unless_twin(other, chat["origin"])
    yield unless_twin(claimed("A13", open_trace["max_uses"]), open_trace["origin"])


def _arxiv_table_2() -> Iterator[Compared]:
    for series in ("ArXiv Summarization", "L-Eval", "Real data"):
        for quantity in ("mean input", "mean output"):
            printed = fact("arxiv_table2_datasets", series=series, x=_TABLE_2[quantity])
            words = f"{series}: {quantity} (no released trace)"
            yield compared(words, printed, None, _ROUNDED, evidence="measured", reach="scope")
