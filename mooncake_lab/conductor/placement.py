"""Placement policies: the paper's Algorithm 1 and the policies it is compared with.

A policy is a frozen dataclass of its parameters. It uses only the request, the view and the estimator. Unless a
policy states otherwise, ties break on the order of the view: that in which the instances' names first came up.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import ClassVar, Final, Literal

from mooncake_lab.conductor.decide import Need, Placement, PlacementPolicy, select_decode
from mooncake_lab.conductor.estimator import Estimator
from mooncake_lab.conductor.view import ClusterView, DecodeView, PrefillView
from mooncake_lab.core import Request, keyed_uniform


@dataclass(frozen=True, slots=True)
class Random:
    """Any prefill instance with equal chance, drawn from the seed and the request's id."""

    seed: int = 0

    def place(self, request: Request, view: ClusterView, estimate: Estimator) -> Placement:
        """A random instance; the prefix that it holds is reused."""
        chosen = int(keyed_uniform(self.seed, request.id) * len(view.prefill))
        return _local(request, view, estimate, chosen, "drawn by chance")


@dataclass(frozen=True, slots=True)
class LoadBalance:
    """The least loaded prefill instance. The papers do not define load, so its metric is a parameter.

    On the conversation trace, the mean TTFTs under the three metrics differ by a factor of 2.5. Ties, which are
    frequent among idle instances, go to the instance with the fewest assignments so far. Otherwise the first
    instance would get every request while traffic is light, and a coupled instance would then decode all of them.
    """

    metric: Literal["backlog_s", "queued_requests", "assigned_requests"] = "backlog_s"

    def place(self, request: Request, view: ClusterView, estimate: Estimator) -> Placement:
        """The instance with the smallest load, wherever the prefix is."""
        loads = [(getattr(instance, self.metric), instance.assigned_requests) for instance in view.prefill]
        return _local(request, view, estimate, loads.index(min(loads)), f"least {self.metric}")


@dataclass(frozen=True, slots=True)
class SessionAffinity:
    """One prefill instance for all turns of a session, drawn by its name: a router that knows no cache.

    When an instance is gone, its sessions alone are drawn again (rendezvous hashing). A request without a session
    goes to the least loaded instance.
    """

    seed: int = 0

    def place(self, request: Request, view: ClusterView, estimate: Estimator) -> Placement:
        """The instance of the session, whatever its load; the prefix that it holds is reused."""
        session = request.session
        if session is None:
            return LoadBalance().place(request, view, estimate)
        drawn = [keyed_uniform(self.seed, session, instance.name) for instance in view.prefill]
        return _local(request, view, estimate, drawn.index(max(drawn)), "drawn by the session")


@dataclass(frozen=True, slots=True)
class LongestPrefix:
    """The prefill instance that holds the longest prefix, regardless of its queue: a baseline.

    It sends every request to one instance: after the first request no other instance ever holds a prefix.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"local_prefixes"})

    def place(self, request: Request, view: ClusterView, estimate: Estimator) -> Placement:
        """The longest match."""
        matches = [instance.matched_blocks for instance in view.prefill]
        return _local(request, view, estimate, matches.index(max(matches)), "longest prefix")


@dataclass(frozen=True, slots=True)
class CacheAware:
    """The shortest expected TTFT over instances, each with the prefix it holds itself.

    FAST'25 calls it local cache-aware scheduling; it is Algorithm 1 with an infinite threshold.
    """

    def place(self, request: Request, view: ClusterView, estimate: Estimator) -> Placement:
        """The instance with the least queue plus computation."""
        return KVCacheCentric(math.inf).place(request, view, estimate)


@dataclass(frozen=True, slots=True)
class KVCacheCentric:
    """Algorithm 1: the shortest expected TTFT; a much longer prefix of another instance may be fetched first.

    The two papers differ at one point. arXiv compares with `<` where it estimates and with `>` where it acts,
    so at exact equality it estimates a transfer that it then does not make; FAST'25 uses `>` in both places.
    """

    balancing_threshold: float = 1.5
    """kvcache_balancing_threshold: the ratio of the best to the local match above which the prefix is fetched."""
    edition: Literal["fast", "arxiv"] = "fast"

    @property
    def needs(self) -> frozenset[Need]:
        """A store to fetch from, unless the threshold is infinite."""
        return frozenset() if math.isinf(self.balancing_threshold) else frozenset({"remote_prefixes"})

    def place(self, request: Request, view: ClusterView, estimate: Estimator) -> Placement:
        """Line by line as printed (line numbers: FAST'25 Algorithm 1)."""
        best_blocks, holder = _best_match(view)  # lines 1-2: FindBestPrefixMatch
        best_tokens = _tokens(request, best_blocks)
        best_ttft_s, instance, fetches = math.inf, view.prefill[0], False  # line 3
        estimated = dict[tuple[int, int, int], tuple[float, bool]]()  # seconds, and whether the prefix is fetched
        for each in view.prefill:  # line 4
            if each.backlog_s >= best_ttft_s:
                continue  # its backlog alone exceeds the minimum
            holds = each.matched_blocks, each.matched_on_ssd, each.matched_in_dram
            if holds not in estimated:  # most instances hold nothing, and need the same time
                ratio = _ratio(best_blocks, each.matched_blocks)
                above = ratio > self.balancing_threshold
                if above or (self.edition == "arxiv" and ratio == self.balancing_threshold):  # line 5
                    # lines 13-14, and line 7: EstimateKVCacheTransferTime
                    estimated[holds] = fetched_prefill_s(request, each, holder, estimate), above
                else:  # lines 8-9
                    estimated[holds] = local_prefill(request, each, estimate)[0], above
            seconds, above = estimated[holds]
            if each.backlog_s + seconds < best_ttft_s:  # lines 10 and 15: strict, so the first minimum wins
                best_ttft_s, instance, fetches = each.backlog_s + seconds, each, above
        decode, tbt_s = select_decode(request, _candidates(view, instance), estimate)  # line 17
        _, local, ssd = local_prefill(request, instance, estimate)
        held = _tokens(request, instance.matched_blocks)
        copied = max(0, best_tokens - held) if fetches else 0  # lines 20-21: TransferKVCache
        return Placement(
            request_id=request.id,
            prefill=instance.name,
            decode=decode.name,
            reused_tokens=best_tokens if copied else local,
            fetch_from=holder.name if copied else None,
            fetched_tokens=copied,
            ssd_tokens=_tokens(request, instance.matched_on_ssd) if copied else ssd,
            expected_ttft_s=best_ttft_s,
            expected_tbt_s=tbt_s,
            reason="shortest expected TTFT, prefix fetched" if fetches else "shortest expected TTFT, local prefix",
        )


def local_prefill(request: Request, instance: PrefillView, estimate: Estimator) -> tuple[float, int, int]:
    """T_prefill with what an instance holds itself (s), the tokens that it reuses, and those it reads from SSD.

    Of reading what is on SSD and computing it again, the shorter counts (FAST'25 Eq. 2).
    """
    reused = _tokens(request, instance.matched_blocks)
    compute_s = estimate.prefill_s(request.id, request.input_tokens, reused)
    if not instance.matched_on_ssd:
        return compute_s, reused, 0
    ssd, in_dram = _tokens(request, instance.matched_on_ssd), _tokens(request, instance.matched_in_dram)
    reading_s = estimate.beside_ssd_s(compute_s, ssd)
    again_s = estimate.prefill_s(request.id, request.input_tokens, in_dram)
    if in_dram < reused and again_s < reading_s:
        return again_s, in_dram, 0
    return reading_s, reused, ssd


def fetched_prefill_s(request: Request, instance: PrefillView, holder: PrefillView, estimate: Estimator) -> float:
    """T_transfer and T_prefill with a prefix of another instance, which reads what of it is on its SSD (s).

    Algorithm 1 adds reading, sending and computing. Where prefixes come layer by layer, the three overlap.
    """
    best, local = _tokens(request, holder.matched_blocks), _tokens(request, instance.matched_blocks)
    seconds = estimate.prefill_s(request.id, request.input_tokens, best)
    if instance.matched_on_ssd:
        seconds = estimate.beside_ssd_s(seconds, _tokens(request, instance.matched_on_ssd))
    loads_s = list[float]()
    if holder.matched_on_ssd:
        loads_s.append(estimate.beside_ssd_s(0.0, min(best - local, _tokens(request, holder.matched_on_ssd))))
    loads_s.append(estimate.transfer_s(best - local, holder.outgoing_flows))
    for load_s in loads_s:
        seconds = estimate.beside_load_s(seconds, load_s) if estimate.fetches_by_layer else seconds + load_s
    return seconds


def _candidates(view: ClusterView, prefill: PrefillView) -> tuple[DecodeView, ...]:
    """The instances that may decode a request prefilled here: only this one if it does both, else all."""
    own = [instance for instance in view.decode if instance.name == prefill.name]
    return tuple(own) or view.decode


def _local(request: Request, view: ClusterView, estimate: Estimator, chosen: int, reason: str) -> Placement:
    """Prefill on one instance with what it holds itself."""
    instance = view.prefill[chosen]
    prefill_s, reused, ssd = local_prefill(request, instance, estimate)
    decode, tbt_s = select_decode(request, _candidates(view, instance), estimate)
    return Placement(
        request_id=request.id,
        prefill=instance.name,
        decode=decode.name,
        reused_tokens=reused,
        ssd_tokens=ssd,
        expected_ttft_s=instance.backlog_s + prefill_s,
        expected_tbt_s=tbt_s,
        reason=reason,
    )


def _best_match(view: ClusterView) -> tuple[int, PrefillView]:
    """The longest match and its holder; among equal holders, the one that sends the fewest transfers."""
    holder = view.prefill[0]
    for instance in view.prefill:
        longer = instance.matched_blocks - holder.matched_blocks
        if longer > 0 or (longer == 0 and instance.outgoing_flows < holder.outgoing_flows):
            holder = instance
    return holder.matched_blocks, holder


def _ratio(best_blocks: int, local_blocks: int) -> float:
    """The best match divided by the local one; 0 where both are empty (assumption B01)."""
    if local_blocks:
        return best_blocks / local_blocks
    return math.inf if best_blocks else 0.0


def _tokens(request: Request, blocks: int) -> int:
    """Tokens of the first blocks; the last token of the prompt is always computed, since its output is sampled."""
    return min(blocks * request.block_size_tokens, request.input_tokens - 1)


@dataclass(frozen=True, slots=True)
class FewestRequests:
    """The instance with the fewest requests that wait, prefill or decode; ties go to the fewest assignments.

    For coupled instances, whose prefill and decode views are of the same instances in the same order.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"coupled_instances"})

    def place(self, request: Request, view: ClusterView, estimate: Estimator) -> Placement:
        """The instance with the fewest connections, as a load balancer of web servers counts them."""
        return _least(request, view, estimate, [here.requests for here in view.decode], "fewest requests")


@dataclass(frozen=True, slots=True)
class LeastTokens:
    """The instance with the fewest tokens of KVCache, those of requests that wait there included.

    The tokens of a request are its prompt and what was shown of its answer. Ties go to the fewest assignments.
    Like `FewestRequests`, it is for coupled instances.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"coupled_instances"})

    def place(self, request: Request, view: ClusterView, estimate: Estimator) -> Placement:
        """The instance that holds least."""
        return _least(request, view, estimate, [here.context_tokens for here in view.decode], "least tokens")


def _least(
    request: Request, view: ClusterView, estimate: Estimator, loads: Sequence[int], reason: str
) -> Placement:
    """The coupled instance with the least load, and the fewest assignments so far among those."""
    sent = [instance.assigned_requests for instance in view.prefill]
    pairs = list(zip(loads, sent, strict=True))
    return _local(request, view, estimate, pairs.index(min(pairs)), reason)


PLACEMENT_POLICIES: Final[Mapping[str, Callable[[], PlacementPolicy]]] = MappingProxyType(
    {
        "random": Random,
        "round_robin": partial(LoadBalance, "assigned_requests"),
        "load_balance": LoadBalance,
        "fewest_requests": FewestRequests,
        "least_tokens": LeastTokens,
        "longest_prefix": LongestPrefix,
        "session_affinity": SessionAffinity,
        "cache_aware": CacheAware,
        "kvcache_centric": KVCacheCentric,
    }
)
"""Every placement policy by the name the command line uses."""


def named_placement(name: str, seed: int) -> PlacementPolicy:
    """The placement policy of a name, with its own defaults; chance, where it plays a part, by the seed.

    Raises:
        KeyError: when there is no policy of that name.
    """
    return Random(seed) if name == "random" else PLACEMENT_POLICIES[name]()
