"""How much of the gap between LRU and the optimum each eviction policy closes; prints a table of hit rates.

Run: python -m mooncake_lab.book.chapters.store.gap

Token hit rates of the second half of a released trace, whose first half fills the cache. `lru on prefixes` and
`optimum on prefixes` hold whole prefixes only (`leaves`); the others are those of `replay`, in which a block
leaves whatever continues it. The capacities are those at which `data/measured/kvcache_simulator.json` has the
numbers of Mooncake's authors.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_lab.book.chapters.store.leaves import replay_leaves
from mooncake_lab.book.paper.facts import data_dir
from mooncake_lab.store import EVICTION_POLICIES
from mooncake_lab.store.replay import replay
from mooncake_lab.workload import Trace, load

TRACES: Final = ("conversation", "synthetic")


def second_half_tokens(trace: Trace, blocks: Sequence[int] | npt.NDArray[np.int64]) -> int:
    """Tokens of the prefixes that the second half of the requests found; a last block counts what it holds.

    Args:
        trace: what was replayed.
        blocks: of each request, found at the front of its prompt.
    """
    tokens = np.minimum(np.asarray(blocks) * trace.block_size_tokens, trace.input_tokens)
    return int(tokens[len(trace) // 2 :].sum())


def hit_rates(trace: Trace, capacity_blocks: int) -> dict[str, float]:
    """The share of the second half's prompt tokens that each policy finds."""
    requests = [trace.blocks_of(i).tolist() for i in range(len(trace))]
    found: dict[str, Sequence[int] | npt.NDArray[np.int64]] = {
        name: replay(requests, name, capacity_blocks).prefix_hits_by_request for name in EVICTION_POLICIES
    }
    found["lru on prefixes"] = replay_leaves(requests, capacity_blocks)
    found["optimum on prefixes"] = replay_leaves(requests, capacity_blocks, optimum=True)
    total = int(trace.input_tokens[len(trace) // 2 :].sum())
    return {name: second_half_tokens(trace, blocks) / total for name, blocks in found.items()}


def gap_rows(names: Sequence[str] = TRACES, capacities: Sequence[int] | None = None) -> Iterator[dict[str, Any]]:
    """A row for each trace and capacity: `trace`, `capacity_blocks`, and the hit rate of each policy."""
    recorded = msgspec.json.decode((data_dir().parent / "measured" / "kvcache_simulator.json").read_bytes())[
        "traces"
    ]
    for name in names:
        trace = load(name)
        for capacity in capacities or [int(each) for each in recorded[name]["hits"]["lru"]]:
            yield {"trace": name, "capacity_blocks": capacity, **hit_rates(trace, capacity)}


def main() -> None:
    """Print the table as CSV."""
    header: list[str] | None = None
    for row in gap_rows():
        if header is None:
            header = [*row]
            sys.stdout.write(",".join(header) + "\n")
        cells = [f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values()]
        sys.stdout.write(",".join(cells) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
