"""KV-Runahead: one prompt over processes that each prefill a run of its tokens (Cho et al., arXiv 2405.05329).

Process `i` computes tokens `b[i-1]` to `b[i]` through all layers. In every layer it needs the keys and values of
all tokens before its own, which come down a chain: it waits for those of process `i-1`, adds its own, sends them
on, and only then attends. Communication runs beside attention; the last process ends up with the whole KVCache.

All layers cost the same, so the wavefront through layers and processes is a longest path with a closed form, and
the work of tokens `s` to `e` is a difference of one convex function, `g(e) - g(s)`. Where the network is free,
equal work is therefore best (`equal_work_bounds`); where it is not, `best_bounds` finds the exact best.

The search: what the processes from `i` on make of the time to first token, whatever processes precede them,
follows from three numbers: the longest path inside the suffix, its chain of sends, and its slowest slice or link.
A suffix that is no better in any of them than another one from the same token is dropped. The published search
refines a grid.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

from mooncake_lab.perf.latency import LinkLatency


@dataclass(frozen=True, slots=True, kw_only=True)
class Runahead:
    """What one layer costs each of the processes, and the link from each to the next.

    Raises:
        ValueError: when a cost is negative, or there is no layer.
    """

    layers: int
    project_s_per_token: float
    """Queries, keys and values: what comes before the KVCache of the layer can be sent."""
    rest_s_per_token: float
    """Output projection and feed-forward: what comes after its attention."""
    pair_s: float
    """Attention, for each pair of a token and one it attends to."""
    kv_bytes_per_token: float
    """Keys and values of a token in one layer."""
    link: LinkLatency

    def __post_init__(self) -> None:
        costs = (self.project_s_per_token, self.rest_s_per_token, self.pair_s, self.kv_bytes_per_token)
        if self.layers < 1 or min(costs) < 0:
            raise ValueError(f"{self} has no layer or a negative cost; at least 1 layer and 0 s are needed")

    @property
    def linear_s_per_token(self) -> float:
        """All matrices of a layer, for one token."""
        return self.project_s_per_token + self.rest_s_per_token

    def work_s(self, tokens: float) -> float:
        """`g`: seconds of one layer over a whole prompt on one process; convex in its tokens."""
        return self.linear_s_per_token * tokens + self.pair_s * tokens * (tokens + 1) / 2

    def slice_s(self, start: float, stop: float) -> float:
        """Seconds of one layer over tokens `start` to `stop`."""
        return self.work_s(stop) - self.work_s(start)

    def send_s(self, tokens: float) -> float:
        """Seconds for which the keys and values of `tokens` tokens of a layer occupy a link."""
        return self.kv_bytes_per_token * tokens / self.link.bytes_per_s


def runahead_s(cost: Runahead, bounds: Sequence[int]) -> float:
    """The same in closed form: the longest path through the wavefront.

    A path enters at some process `j`, goes once down the chain from there, and takes each step to a deeper layer
    where it costs most, at a process or at a link of the chain it is on:
    `max_j [project_j + sum_{k>=j} send_k + (L-1) max_{k>=j} (slice_k, send_k) + after_last]`.
    """
    slices = _slices(bounds)
    start, stop = slices[-1]
    after_s = cost.slice_s(start, stop) - cost.project_s_per_token * (stop - start)
    longest = chain_s = slowest = 0.0
    for process in reversed(range(len(slices))):
        start, stop = slices[process]
        if process + 1 < len(slices):
            chain_s += cost.send_s(stop) + cost.link.latency_s
            slowest = max(slowest, cost.send_s(stop))
        slowest = max(slowest, cost.slice_s(start, stop))
        path_s = cost.project_s_per_token * (stop - start) + chain_s + (cost.layers - 1) * slowest
        longest = max(longest, path_s)
    return longest + after_s


def even_bounds(tokens: int, processes: int) -> list[int]:
    """Slices of equally many tokens (the paper's KVR-E).

    Raises:
        ValueError: when there are more processes than tokens.
    """
    require_pieces(tokens, processes)
    return [tokens * (process + 1) // processes for process in range(processes)]


def equal_work_bounds(cost: Runahead, tokens: int, processes: int) -> list[int]:
    """Slices of equal work, `g(b_i) = i/p g(C)`: the best ones when sending is free, and earlier ones are longer.

    Raises:
        ValueError: when there are more processes than tokens.
    """
    require_pieces(tokens, processes)
    half, linear = cost.pair_s / 2, cost.linear_s_per_token + cost.pair_s / 2
    whole_s, bounds = cost.work_s(tokens), list[int]()
    for process in range(1, processes):
        target_s = whole_s * process / processes
        # zero also where the work is too little for a float
        slope = linear + sqrt(linear * linear + 4 * half * target_s)
        root = 2 * target_s / slope if slope else 0.0
        low = bounds[-1] + 1 if bounds else 1
        bounds.append(min(max(round(root), low), tokens - processes + process))
    return [*bounds, tokens]


def traffic_tokens(bounds: Sequence[int]) -> int:
    """Tokens whose keys and values cross a link, in each layer: every end but the last, `sum of b_i`."""
    return sum(bounds[:-1])


def gathered_s(cost: Runahead, tokens: int, processes: int, *, causal: bool = False) -> float:
    """Seconds to the first token of the paper's baseline (TSP): even slices, and all gather all keys and values.

    The baseline's last slice attends to all tokens; a `causal` one only to what precedes each token.
    """
    each = tokens / processes
    pairs = each * (tokens - (each - 1) / 2) if causal else each * tokens
    gather_s = cost.send_s((processes - 1) * each) + cost.link.latency_s * (processes > 1)
    return cost.layers * (cost.linear_s_per_token * each + gather_s + cost.pair_s * pairs)


def _slices(bounds: Sequence[int]) -> list[tuple[int, int]]:
    slices = list(pairwise([0, *bounds]))
    if not slices or any(start >= stop for start, stop in slices):
        raise ValueError(f"slices that end at {list(bounds)}; every slice needs a token")
    return slices


def require_pieces(tokens: int, processes: int) -> None:
    """Refuse to share fewer pieces than there are processes.

    Raises:
        ValueError: naming both.
    """
    if not 1 <= processes <= tokens:
        raise ValueError(f"{tokens} pieces for {processes} processes; each needs one, and there must be a process")


@dataclass(frozen=True, slots=True)
class _Suffix:
    """The processes from some token on."""

    path_s: float
    """The longest path that enters here or later."""
    chain_s: float
    """Sends down the chain, and what the last process does after its projection."""
    slowest_s: float
    ends: tuple[int, ...]
    """Where its slices end, in grains."""


def best_bounds(cost: Runahead, tokens: int, processes: int, *, grain_tokens: int = 1) -> list[int]:
    """The slices of the least time to first token, each end but the last a multiple of the grain.

    Raises:
        ValueError: when there are more processes than grains.
    """
    grains = -(-tokens // grain_tokens)
    require_pieces(grains, processes)
    ends = [min(grain * grain_tokens, tokens) for grain in range(grains + 1)]
    best = _first_guess(cost, ends, processes, grain_tokens)
    best_s = runahead_s(cost, best)
    suffixes = {start: [_last(cost, ends, start)] for start in range(processes - 1, grains)}
    for before in range(processes - 2, -1, -1):  # as many processes stand before this one
        starts = range(before, grains) if before else (0,)
        suffixes = {start: _lengthened(cost, ends, start, before, suffixes, best_s) for start in starts}
    for suffix in suffixes.get(0, ()):
        if suffix.path_s < best_s:
            best_s, best = suffix.path_s, [ends[end] for end in suffix.ends]
    return best


def _first_guess(cost: Runahead, ends: Sequence[int], processes: int, grain_tokens: int) -> list[int]:
    """Even slices or equal work, rounded to grains: whichever is faster bounds the search."""
    grains = len(ends) - 1
    even = even_bounds(grains, processes)
    equal = [round(bound / grain_tokens) for bound in equal_work_bounds(cost, ends[-1], processes)]
    equal = [min(max(bound, place + 1), grains - processes + place + 1) for place, bound in enumerate(equal)]
    rising = all(low < high for low, high in pairwise(equal))
    guesses = [[ends[bound] for bound in guess] for guess in ([even, [*equal[:-1], grains]] if rising else [even])]
    return min(guesses, key=lambda bounds: runahead_s(cost, bounds))


def _last(cost: Runahead, ends: Sequence[int], start: int) -> _Suffix:
    tokens = ends[-1] - ends[start]
    whole_s = cost.slice_s(ends[start], ends[-1])
    after_s = whole_s - cost.project_s_per_token * tokens
    return _Suffix(whole_s + (cost.layers - 1) * whole_s, after_s, whole_s, (len(ends) - 1,))


def _lengthened(
    cost: Runahead,
    ends: Sequence[int],
    start: int,
    before: int,
    suffixes: dict[int, list[_Suffix]],
    best_s: float,
) -> list[_Suffix]:
    """One more process in front of every suffix that begins after `start`, unless it cannot beat `best_s`."""
    found: list[_Suffix] = []
    share_s = cost.work_s(ends[start]) / before if before else 0.0
    for stop, behind in suffixes.items():
        if stop <= start:
            continue
        slice_s, send_s = cost.slice_s(ends[start], ends[stop]), cost.send_s(ends[stop])
        project_s = cost.project_s_per_token * (ends[stop] - ends[start])
        for suffix in behind:
            chain_s = suffix.chain_s + send_s + cost.link.latency_s
            slowest_s = max(suffix.slowest_s, slice_s, send_s)
            path_s = max(suffix.path_s, project_s + chain_s + (cost.layers - 1) * slowest_s)
            floor_s = chain_s + (cost.layers - 1) * max(slowest_s, share_s)
            if max(path_s, floor_s) < best_s:
                found.append(_Suffix(path_s, chain_s, slowest_s, (stop, *suffix.ends)))
    return _undominated(found)


def _undominated(found: Iterable[_Suffix]) -> list[_Suffix]:
    kept: list[_Suffix] = []
    for suffix in sorted(found, key=lambda each: (each.path_s, each.chain_s, each.slowest_s)):
        if not any(other.chain_s <= suffix.chain_s and other.slowest_s <= suffix.slowest_s for other in kept):
            kept.append(suffix)
    return kept
