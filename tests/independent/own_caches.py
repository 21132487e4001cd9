"""Prefix caches for the second simulator: one cache replayed by itself, in blocks or in tokens."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from own_traces import BLOCK, Job


class Lru:
    """Blocks of a prefix cache; the one that was used longest ago leaves first."""

    def __init__(self, room: float) -> None:
        self.room = room
        """In tokens."""
        self.held = 0
        self.sizes: OrderedDict[int, int] = OrderedDict()

    def match(self, blocks: Sequence[int]) -> int:
        """How many blocks from the front are here."""
        found = 0
        for block in blocks:
            if block not in self.sizes:
                break
            found += 1
        return found

    def touch(self, block: int, tokens: int) -> None:
        """Use a block: it comes in if it is not here, and others leave until there is room."""
        if block in self.sizes:
            self.sizes.move_to_end(block)
            return
        while self.sizes and self.held + tokens > self.room:
            self.held -= self.sizes.popitem(last=False)[1]
        if tokens <= self.room:
            self.sizes[block] = tokens
            self.held += tokens

    def use(self, job: Job) -> int:
        """Match a prompt, then use all of its blocks from front to back; the number that matched."""
        found = self.match(job.blocks)
        for i, block in enumerate(job.blocks):
            self.touch(block, min(BLOCK, job.prompt - i * BLOCK))
        return found


def whole_blocks(job: Job, matched: int) -> int:
    """Reused tokens if a hit is a whole block; one token is always computed."""
    return min(matched * BLOCK, job.prompt - 1)


def with_remainder(system_prompt: int | None) -> Callable[[Job, int], int]:
    """Reused tokens if blocks were finer than those of the trace: the matched blocks and what follows them.

    Half a block follows on average. After a single block the rest of the system prompt follows, where the workload
    has one (B11, B12).
    """

    def reused(job: Job, matched: int) -> int:
        if not matched:
            return 0
        rest = system_prompt - BLOCK if system_prompt and matched == 1 else BLOCK // 2
        return min(matched * BLOCK + rest, job.prompt - 1)

    return reused


def token_hit_rate(jobs: Iterable[tuple[Job, Callable[[Job, int], int]]], room: float) -> float:
    """Reused tokens over all tokens; every request says how its reuse is counted."""
    cache, reused, total = Lru(room), 0, 0
    for job, count in jobs:
        reused += count(job, cache.use(job))
        total += job.prompt
    return reused / total


def block_hit_rate(jobs: Sequence[Job], rooms_blocks: int) -> float:
    """Blocks that hit over all blocks, for an LRU of so many blocks of any size."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    for job in jobs:
        matching = True
        found = 0
        for block in job.blocks:
            matching = matching and block in cache
            found += matching
        hits += found
        total += len(job.blocks)
        for block in job.blocks:
            if block in cache:
                cache.move_to_end(block)
                continue
            if len(cache) >= rooms_blocks:
                cache.popitem(last=False)
            cache[block] = None
    return hits / total


def block_hit_rate_least_often(jobs: Sequence[Job], rooms_blocks: int, *, deep_first: bool) -> float:
    """The same for the block with the fewest uses since it came in; a newcomer does not push itself out.

    Among equals the least recent leaves (LFU), or the one that is deepest in its prompt (LengthAware, B25).
    """
    import heapq

    state: dict[int, tuple[int, int, int]] = {}
    queue: list[tuple[tuple[int, int, int], int]] = []
    clock = hits = total = 0
    for job in jobs:
        found = 0
        for block in job.blocks:
            if block not in state:
                break
            found += 1
        hits += found
        total += len(job.blocks)
        for depth, block in enumerate(job.blocks):
            clock += 1
            uses = state[block][0] + 1 if block in state else 1
            if block not in state:
                while len(state) >= rooms_blocks:
                    key, victim = heapq.heappop(queue)
                    if state.get(victim) == key:
                        del state[victim]
            state[block] = (uses, -depth, clock) if deep_first else (uses, clock, 0)
            heapq.heappush(queue, (state[block], block))
    return hits / total
