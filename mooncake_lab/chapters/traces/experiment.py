"""Chapter 01: the statistics of the traces, beside both editions."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from mooncake_lab.paper import (
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
    load,
    reuse_gaps_s,
    statistics,
    use_counts,
    with_larger_blocks,
)

FIRST_REQUESTS: Final[Mapping[str, int | None]] = MappingProxyType(
    {"smoke": 500, "classroom": None, "full": None, "gpu": None}
)
"""How many requests of each trace a scale reads; None is all of them."""


@dataclass(frozen=True, slots=True)
class TraceNumbers:
    """One row: the statistics of a trace, those of a spread as `input_tokens_p50`, and where it came from."""

    workload: str = "conversation"
    first: int | None = None
    """Number of requests from the start of the trace; None takes all."""
    seed: int = 0
    """Seed of the twin, which is used where there is no released file."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """Read the trace and count."""
        trace = _trace(self.workload, self.first, self.seed)
        row: dict[str, Any] = {"origin": trace.origin, "source": trace.source, "tick_s": tick_s(trace)}
        for name, value in asdict(statistics(trace)).items():
            row |= {f"{name}_{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
        yield row


@dataclass(frozen=True, slots=True)
class TraceLengths:
    """Requests in each of the 40 bins of arXiv Fig. 5; lengths outside fall into the outer bins."""

    workload: str = "conversation"
    of: Literal["input", "output"] = "input"
    first: int | None = None
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row a bin: left and right edge (tokens), requests."""
        trace = _trace(self.workload, self.first, self.seed)
        edges = bin_edges(self.of)
        lengths = trace.input_tokens if self.of == "input" else trace.output_tokens
        counts = np.histogram(np.clip(lengths, edges[0], edges[-1]), edges)[0]
        for left, right, count in zip(edges, edges[1:], counts, strict=False):
            yield {"left": left, "right": right, "requests": count}


@dataclass(frozen=True, slots=True)
class BlockUses:
    """How often blocks are used: the share of unique blocks with at most a given number of uses (arXiv Fig. 6)."""

    workload: str = "conversation"
    first: int | None = None
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row for each number of uses that occurs."""
        uses, blocks = np.unique(use_counts(_trace(self.workload, self.first, self.seed)), return_counts=True)
        for count, share in zip(uses, np.cumsum(blocks) / blocks.sum(), strict=True):
            yield {"uses": count, "share_at_most": share}


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests at each distinct timestamp of the first `window_s` seconds."""

    workload: str = "conversation"
    window_s: float = 60.0
    first: int | None = None
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row a timestamp."""
        arrival_s = _trace(self.workload, self.first, self.seed).arrival_s
        at_s, counts = np.unique(arrival_s[arrival_s <= arrival_s[0] + self.window_s], return_counts=True)
        for time_s, count in zip(at_s, counts, strict=True):
            yield {"at_s": time_s, "arriving": count}


@dataclass(frozen=True, slots=True)
class Conversations:
    """Requests by the number of turns of the conversation they belong to, as inferred from shared blocks."""

    workload: str = "conversation"
    first: int | None = None
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row per number of turns: share of requests in conversations with at least that many turns."""
        turns, conversations = np.unique(
            conversation_sizes(_trace(self.workload, self.first, self.seed)), return_counts=True
        )
        held = turns * conversations
        share = np.cumsum(held[::-1])[::-1] / held.sum()
        for k, number, at_least in zip(turns, conversations, share, strict=True):
            yield {"turns": k, "conversations": number, "share_at_least": at_least}


@dataclass(frozen=True, slots=True)
class ReuseGaps:
    """How long until a block is used again: the gaps at each percent of all reuses."""

    workload: str = "conversation"
    first: int | None = None
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row a percent; none where nothing is used again."""
        gaps_s = reuse_gaps_s(_trace(self.workload, self.first, self.seed))
        shares = np.linspace(0, 1, 101) if len(gaps_s) else np.zeros(0)
        for share, gap_s in zip(shares, np.quantile(gaps_s, shares) if len(gaps_s) else (), strict=True):
            yield {"share": share, "gap_s": gap_s}


@dataclass(frozen=True, slots=True)
class LargerBlocks:
    """What an endless cache could reuse of a trace if `factor` blocks were one."""

    workload: str = "conversation"
    factor: int = 1
    first: int | None = None
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row: the block size and both ideal hit rates."""
        numbers = statistics(with_larger_blocks(_trace(self.workload, self.first, self.seed), self.factor))
        yield {
            "block_size_tokens": numbers.block_size_tokens,
            "ideal_block_hit_rate": numbers.ideal_block_hit_rate,
            "ideal_token_hit_rate": numbers.ideal_token_hit_rate,
        }


def tick_s(trace: Trace) -> float | None:
    """The median step between distinct timestamps; None when all requests arrive at once."""
    steps_s = np.diff(np.unique(trace.arrival_s))
    return float(np.median(steps_s)) if len(steps_s) else None


def bin_edges(of: Literal["input", "output"]) -> npt.NDArray[np.float64]:
    """Shape (41,): the edges of the equal bins of arXiv Fig. 5, in tokens."""
    left = curve(f"arxiv_fig05_{of}_length_histogram")["x"].to_numpy(dtype=np.float64)
    return np.linspace(left[0], left[-1] + (left[-1] - left[0]) / (len(left) - 1), len(left) + 1)


def _trace(workload: str, first: int | None, seed: int) -> Trace:
    trace = load(workload, seed=seed)
    return trace if first is None else trace.head(first)


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
        histogram: rows of `TraceLengths` for one workload, of input or output.
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
    yield unless_twin(claimed("A13", open_trace["max_uses"]), open_trace["origin"])


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
