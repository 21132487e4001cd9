"""The best slices of KV-Runahead, exactly: by the suffixes of the chain that no other suffix dominates.

What the processes from `i` on make of the time to first token, whatever processes precede them, follows from three
numbers: the longest path inside the suffix, its chain of sends, and its slowest slice or link. A suffix that is no
better in any of them than another one from the same token is dropped. The published search refines a grid.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mooncake_lab.perf.runahead import Runahead, equal_work_bounds, even_bounds, require_pieces, runahead_s


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
