"""Clusters within a budget: traces of three kinds, prices, and how many requests a cluster serves in time."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import KVCacheCentric
from mooncake_lab.core import SLO, Request, TracedRequest, blocks_for
from mooncake_lab.metrics import effective, request_table
from mooncake_lab.simulation import Cluster

LIMITS: Final = SLO(ttft_s=5.0, tbt_s=0.06)
PRICES: Final = MappingProxyType({"node": 10.0, "million_cached_tokens": 4.0})
"""Per hour: of a node, and of the DRAM of a prefill node that holds a million tokens."""
BUDGET: Final = 80.0
"""Per hour."""
CACHES: Final = (0, 300_000, 1_000_000)
"""Tokens per prefill node that the best cluster is sought among."""
BLOCK_TOKENS: Final = 512
_CLEAR: Final = 0.3
"""The difference of two shares of requests with which it is clear which limit is broken."""
_NEARLY_ALL: Final = 0.99
"""With this share served, no other cluster is much better."""


class TraceKind(NamedTuple):
    """What tells one kind of trace from another."""

    sessions: int
    """How many users there are; each has a context of its own."""
    first_tokens: int
    """Mean length of the first prompt of a session."""
    turn_tokens: int
    """Mean number of tokens that a turn adds."""
    output_tokens: int
    """Mean length of an answer."""
    gap_s: float
    """Mean time between two arrivals."""
    requests: int
    likely: tuple[int, float]
    """Of a good cluster: cached tokens per prefill node, and the share of prefill nodes."""


KINDS: Final[Mapping[str, TraceKind]] = MappingProxyType(
    {
        "chats": TraceKind(60, 6000, 1500, 250, 0.16, 400, (300_000, 0.5)),
        "documents": TraceKind(4000, 14_000, 500, 60, 0.35, 400, (0, 0.85)),
        "reports": TraceKind(4000, 800, 500, 400, 0.05, 1000, (0, 0.5)),
    }
)

TraceRow: TypeAlias = list[Any]
"""Of a request: arrival in seconds, prompt tokens, answer tokens, and the keys of the prompt's blocks."""


ClusterChoice: TypeAlias = Mapping[str, int]
"""A cluster: `prefill` and `decode` nodes, and the `cache_tokens` of each prefill node."""
FIELDS: Final = ("prefill", "decode", "cache_tokens")


def problem_of(choice: ClusterChoice, budget: float) -> str:
    """What keeps an answer from being a cluster within the budget; empty if nothing does."""
    if {*choice} != {*FIELDS}:
        return f"a cluster has {', '.join(FIELDS)}; the answer has {', '.join(map(str, choice)) or 'nothing'}"
    small = [name for name, least in zip(FIELDS, (1, 1, 0), strict=True) if choice[name] < least]
    if small:
        return f"{small[0]} is {choice[small[0]]}; at least {int(small[0] != FIELDS[-1])} is needed"
    if cost_of(choice) > budget + 1e-9:
        return f"the cluster costs {cost_of(choice):.1f} per hour; the budget is {budget:.1f}"
    return ""


def cost_of(choice: ClusterChoice) -> float:
    """Per hour."""
    cached = choice["prefill"] * choice["cache_tokens"] / 1e6
    return PRICES["node"] * (choice["prefill"] + choice["decode"]) + PRICES["million_cached_tokens"] * cached


def affordable(kind: str, budget: float) -> Iterator[ClusterChoice]:
    """The clusters among which the best one is sought, those first that are good for this kind of trace."""
    nodes = int(budget / PRICES["node"])
    likely_cache, likely_share = KINDS[kind].likely
    for cache_tokens in sorted(CACHES, key=lambda each: abs(each - likely_cache)):
        for prefill in sorted(range(1, nodes), key=lambda each: abs(each - likely_share * nodes)):
            memory = prefill * cache_tokens / 1e6 * PRICES["million_cached_tokens"]
            decode = int((budget - memory) / PRICES["node"]) - prefill
            if decode >= 1:
                yield {"prefill": prefill, "decode": decode, "cache_tokens": cache_tokens}


def best_share(kind: str, trace: Sequence[TraceRow], budget: float) -> float:
    """The largest share of a trace that one of many clusters within the budget serves within both limits."""
    best = 0.0
    for choice in affordable(kind, budget):
        best = max(best, within_limits(choice, trace)[0])
        if best >= _NEARLY_ALL:
            break
    return best


def draw_trace(kind: str, seed: int | str | random.Random, speed: float = 1.0) -> list[TraceRow]:
    """A trace of a kind.

    Args:
        kind: one of `KINDS`.
        seed: of the draws, for instance a name; or the draws themselves.
        speed: how many times as fast the requests come.
    """
    draw = seed if isinstance(seed, random.Random) else random.Random(seed)  # noqa: S311  # a workload
    how, at_s = KINDS[kind], 0.0
    contexts = dict[int, tuple[int, list[int]]]()
    rows = list[TraceRow]()
    for number in range(how.requests):
        at_s += 2 * how.gap_s * draw.random() / speed
        user = draw.randrange(how.sessions)
        before, keys = contexts.get(user, (0, []))
        tokens = before + _about(draw, how.turn_tokens if before else how.first_tokens)
        output = _about(draw, how.output_tokens)
        full = before // BLOCK_TOKENS
        keys = [*keys[:full], *range(1000 * number, 1000 * number + blocks_for(tokens, BLOCK_TOKENS) - full)]
        rows.append([round(at_s, 3), tokens, output, keys])
        contexts[user] = (tokens, keys)
    return rows


def _about(draw: random.Random, mean: int) -> int:
    """From half to one and a half times the mean."""
    return max(1, int(mean * (0.5 + draw.random())))


def within_limits(choice: ClusterChoice, trace: Sequence[TraceRow]) -> tuple[float, float, float]:
    """The shares of a trace that keep both limits, that break the limit of TTFT, and that break that of TBT."""
    requests = list(map(_request, range(len(trace)), trace))
    spec = ClusterSpec.disaggregated(
        prefill_nodes=choice["prefill"],
        decode_nodes=choice["decode"],
        cache_tokens=max(choice["cache_tokens"], 1),
        placement=KVCacheCentric(),
        slo=LIMITS,
    )
    table = request_table(Cluster(spec, paper_node_latency()).run(requests))
    late = table["ttft_s"].to_numpy(dtype="float64") > LIMITS.ttft_s
    slow = table["tbt_fast_s"].to_numpy(dtype="float64") > LIMITS.tbt_s
    return float(effective(table, LIMITS).mean()), float(late.mean()), float(slow.mean())


def _request(number: int, row: TraceRow) -> TracedRequest:
    arrival_s, tokens, output, keys = row
    request = Request(id=number, arrival_s=arrival_s, input_tokens=tokens, block_keys=tuple(keys))
    return TracedRequest(request, output)


def clear_cases(
    draw: random.Random, count: int = 4
) -> Iterator[tuple[list[TraceRow], ClusterChoice, Literal["ttft", "tbt"]]]:
    """Clusters that break one limit much more often than the other, as many of each limit.

    Clusters with more prefill than decode nodes are among those that break the limit of TTFT, so that it is not
    enough to count nodes.
    """
    wanted = {("ttft", True): count // 2, ("ttft", False): count - count // 2, ("tbt", True): count}
    while any(wanted.values()):
        kind = draw.choice(list(KINDS))
        trace, nodes = draw_trace(kind, draw), int(BUDGET / PRICES["node"])
        prefill = draw.randrange(2, nodes)
        choice = {"prefill": prefill, "decode": nodes - prefill, "cache_tokens": draw.choice(CACHES[:2])}
        _, late, slow = within_limits(choice, trace)
        limit: Literal["ttft", "tbt"] = "ttft" if late > slow else "tbt"
        group = limit, prefill >= nodes - prefill
        if abs(late - slow) >= _CLEAR and wanted.get(group):
            wanted[group] -= 1
            yield trace, choice, limit


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """What `check_capacity` found; print it to read it."""

    lines: tuple[str, ...]
    problems: tuple[str, ...]
    """Answers that are no cluster within the budget."""
    least_share: float
    """What your clusters serve within both limits, in multiples of the best one; at the kind where it is least."""

    def __str__(self) -> str:
        return "\n".join(self.lines)


def check_capacity(
    choose: Callable[[list[TraceRow], dict[str, float], float], ClusterChoice],
    forecast: Callable[[list[TraceRow], ClusterChoice], str],
    name: str,
) -> CapacityReport:
    """Ask for a cluster for one trace of each kind, and simulate it.

    Args:
        choose: chooses a cluster for a trace, prices and a budget.
        forecast: says which limit a cluster breaks.
        name: from which the traces are drawn.
    """
    lines, problems, shares = list[str](), list[str](), list[float]()
    for kind in KINDS:
        trace = draw_trace(kind, f"{name}/{kind}")
        choice = dict(choose(trace, dict(PRICES), BUDGET))
        if problem := problem_of(choice, BUDGET):
            problems.append(problem)
            continue
        said, (share, late, slow) = forecast(trace, choice), within_limits(choice, trace)
        best = best_share(kind, trace, BUDGET)
        shares.append(share / best)
        lines.append(
            f"{kind:9} {choice} for {cost_of(choice):.1f}: {share:.0%} within both limits (best known {best:.0%});"
            f" forecast {said}; {late:.0%} break the limit of TTFT, {slow:.0%} that of TBT"
        )
    return CapacityReport((*lines, *problems), tuple(problems), min(shares, default=0.0))
