"""How much of the gap between LRU and the optimum each eviction policy closes; prints a table of hit rates.

Run: python -m mooncake_lab.book.chapters.store.gap

Token hit rates of the second half of a released trace, whose first half fills the cache. `lru on prefixes`, `slru
on prefixes` and `optimum on prefixes` hold whole prefixes only (`leaves`); the others are those of `replay`, in
which a block leaves whatever continues it. The capacities are those at which the numbers of Mooncake's authors are
in `data/measured/kvcache_simulator.json`.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_lab.book.chapters.store.experiment import OfStore
from mooncake_lab.book.chapters.store.leaves import LeafOrder, replay_leaves
from mooncake_lab.book.paper.facts import data_dir
from mooncake_lab.core import BlockKey
from mooncake_lab.store import EVICTION_POLICIES
from mooncake_lab.store.replay import replay
from mooncake_lab.workload import Trace, load

TRACES: Final = ("conversation", "synthetic")
ON_PREFIXES: Final[dict[str, LeafOrder]] = {
    "lru on prefixes": "lru",
    "slru on prefixes": "slru",
    "optimum on prefixes": "optimum",
}
"""The replays that hold whole prefixes, and which leaf leaves first."""
NODE_BLOCKS: Final = 6_553
"""Blocks of 512 tokens in about a node's DRAM: the capacity of `kvcache-simulator` for 1 TiB of LLaMA3-70B."""
Blocks: TypeAlias = Sequence[int] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionGap(OfStore):
    """One row per policy: its hit rate under two rules, and how much of LRU's gap to the optimum it closes.

    `hit_rate` is under the rules of `kvcache-simulator`: tokens, over the second half of the requests.
    `own_hit_rate` is this chapter's: blocks, over all requests. Both count whole prefixes only.
    """

    capacity_blocks: int = NODE_BLOCKS

    def rows(self) -> Iterator[dict[str, Any]]:
        """Replay the trace through each policy."""
        trace, _ = self.replayable()
        found = found_blocks(_lists(trace), self.capacity_blocks)
        rates = {name: second_half_rate(trace, blocks) for name, blocks in found.items()}
        least, most = rates["lru on prefixes"], rates["optimum on prefixes"]
        for name, blocks in found.items():
            yield {
                "origin": trace.origin,
                "source": trace.source,
                "policy": name,
                "hit_rate": rates[name],
                "own_hit_rate": int(np.sum(blocks)) / len(trace.block_ids),
                "gap_closed": (rates[name] - least) / (most - least) if most > least else None,
            }


def found_blocks(requests: Sequence[Sequence[BlockKey]], capacity_blocks: int) -> dict[str, Blocks]:
    """Of each policy, the blocks that it finds at the front of each prompt."""
    found: dict[str, Blocks] = {
        name: replay(requests, name, capacity_blocks).prefix_hits_by_request for name in EVICTION_POLICIES
    }
    for name, order in ON_PREFIXES.items():
        found[name] = replay_leaves(requests, capacity_blocks, order)
    return found


def second_half_tokens(trace: Trace, blocks: Blocks) -> int:
    """Tokens of the prefixes that the second half of the requests found; a last block counts what it holds.

    Args:
        trace: what was replayed.
        blocks: of each request, found at the front of its prompt.
    """
    tokens = np.minimum(np.asarray(blocks) * trace.block_size_tokens, trace.input_tokens)
    return int(tokens[len(trace) // 2 :].sum())


def second_half_rate(trace: Trace, blocks: Blocks) -> float:
    """The share of the second half's prompt tokens that was found; arguments as above."""
    return second_half_tokens(trace, blocks) / int(trace.input_tokens[len(trace) // 2 :].sum())


def hit_rates(trace: Trace, capacity_blocks: int) -> dict[str, float]:
    """The share of the second half's prompt tokens that each policy finds."""
    found = found_blocks(_lists(trace), capacity_blocks)
    return {name: second_half_rate(trace, blocks) for name, blocks in found.items()}


def _lists(trace: Trace) -> list[list[BlockKey]]:
    return [trace.blocks_of(i).tolist() for i in range(len(trace))]


@cache
def recorded() -> Mapping[str, Any]:
    """By trace: what `kvcache-simulator` found, the simulator of Mooncake's authors."""
    return msgspec.json.decode((data_dir().parent / "measured" / "kvcache_simulator.json").read_bytes())["traces"]


def recorded_rate(name: str, policy: str, capacity_blocks: int) -> float:
    """The hit rate of `kvcache-simulator` on a released trace, by its own name of the policy."""
    return recorded()[name]["hits"][policy][str(capacity_blocks)] / recorded()[name]["measured_tokens"]


def gap_rows(names: Sequence[str] = TRACES, capacities: Sequence[int] | None = None) -> Iterator[dict[str, Any]]:
    """A row for each trace and capacity: `trace`, `capacity_blocks`, and the hit rate of each policy."""
    for name in names:
        trace = load(name)
        for capacity in capacities or [int(each) for each in recorded()[name]["hits"]["lru"]]:
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
