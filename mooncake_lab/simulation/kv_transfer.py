"""KVCache on the network in virtual time: prefixes between prefill nodes, and prompts from prefill to decode."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from mooncake_lab.cluster import Attempt, Event, events
from mooncake_lab.conductor import Placement
from mooncake_lab.core import BlockKey, Request
from mooncake_lab.perf import LatencyModel
from mooncake_lab.simulation.clock import EventLoop
from mooncake_lab.simulation.network import Flow, Network
from mooncake_lab.simulation.prefix_caches import PrefixCaches


@dataclass(slots=True, eq=False)
class PrefillJob:
    """An attempt on its way through prefill. Mutable: it is followed by those who carry it out."""

    attempt: Attempt
    request: Request
    placement: Placement
    fetching: int = 0
    """How many fetches of prefix blocks it waits for."""
    most_blocks: int = sys.maxsize
    """Leading blocks that it may reuse: in a shared store those that its node has or gets."""
    fetched: Callable[[], None] | None = None
    """Called when they have ended."""
    stream: Flow | None = None
    """KVCache on the way to the decode node."""
    cancelled: bool = False

    def end_fetching(self) -> None:
        """What of the prefix comes by one fetch is there, or will never be."""
        self.fetching -= 1
        if not self.fetching and self.fetched is not None:
            self.fetched()


@dataclass(slots=True, eq=False)
class _Fetch:
    """Prefix blocks on their way to the node of a prompt. Mutable: further prompts may wait for it."""

    job: PrefillJob
    source: str
    places: Sequence[int]
    """Places of the blocks in the prompt."""
    tokens: int
    stays: bool
    """Whether the copies stay on the node, where prompts that want the same blocks wait for them."""
    waiting: list[PrefillJob] = field(default_factory=list[PrefillJob])
    flow: Flow | None = None
    """The bytes on the network, once they are sent."""

    @property
    def keys(self) -> list[BlockKey]:
        return [self.job.request.block_keys[place] for place in self.places]


class KVTransfer:
    """Moves KVCache between nodes (arXiv §5.2, FAST'25 §4.2 and Fig. 14), and reports what arrived.

    A node reads from its disk for one prompt at a time, its own or another node's, and loads KVCache into its GPU
    memory for one request at a time.

    Args:
        loop: the virtual time.
        model: how long reading takes, and how large a token is.
        network: what KVCache travels by.
        caches: where prefixes are, and will be.
        fetch_timeout_s: after which time a prompt no longer waits for a prefix.
        streams_layers: whether the KVCache of a prompt leaves layer by layer while it is computed.
        report: told what arrived.
        decode_model: how long a decode node takes to load KVCache into its GPU memory.
    """

    def __init__(
        self,
        loop: EventLoop,
        model: LatencyModel,
        network: Network,
        caches: PrefixCaches,
        *,
        fetch_timeout_s: float,
        streams_layers: bool,
        report: Callable[[Event], None],
        decode_model: LatencyModel,
    ) -> None:
        self._loop = loop
        self._model = model
        self._dram = decode_model.dram
        self._network = network
        self._caches = caches
        self._fetch_timeout_s = fetch_timeout_s
        self._streams_layers = streams_layers
        self._report = report
        self._token_bytes = model.shape.kv_bytes_per_token
        self._computed_share = 1 - 1 / model.shape.layers  # of a prompt's KVCache, when its last layer is computed
        self._fetches: dict[_Fetch, None] = {}  # under way
        self._ssd_free_s: dict[str, float] = {}
        self._link_free_s: dict[str, float] = {}  # into GPU memory
        self._down: set[str] = set()

    def fetch(self, job: PrefillJob) -> None:
        """Copy the blocks of a prefix that lie on another node, by its placement or in a shared store."""
        if job.placement.fetch_from is not None:
            self._fetch_copies(job, job.placement.fetch_from)
        elif self._caches.is_shared:
            self._read_shared(job)

    def _fetch_copies(self, job: PrefillJob, source: str) -> None:
        """Copy blocks from their holder. The copies stay, which is how hot blocks spread (FAST'25 §4.2)."""
        if source in self._down:
            return
        request, placed, keys = job.request, job.placement, job.request.block_keys
        first = local = (placed.reused_tokens - placed.fetched_tokens) // request.block_size_tokens
        end = -(-placed.reused_tokens // request.block_size_tokens)
        for other in self._fetches:  # blocks that are on their way already
            if other.job.placement.prefill == placed.prefill:
                begun, coming = first, set(other.keys)
                while first < end and keys[first] in coming:
                    first += 1
                if first > begun:
                    other.waiting.append(job)
                    job.fetching += 1
        if first == end:
            self._prefix_fetched(job, source, self._loop.now_s, 0)
            return
        tokens = placed.fetched_tokens - (first - local) * request.block_size_tokens
        self._begin(_Fetch(job, source, range(first, end), tokens, stays=True))

    def _read_shared(self, job: PrefillJob) -> None:
        """Read the blocks that a shared store holds on other nodes; the copies do not stay.

        What is on SSD is read where the placement counts on it.
        """
        request, instance = job.request, job.placement.prefill
        held = self._caches.matched(instance, request)
        if not job.placement.ssd_tokens:
            in_dram = self._caches.before_ssd(instance, request)
            held = held if in_dram is None else in_dram
        job.most_blocks = held
        for owner, places in self._caches.elsewhere(instance, request.block_keys[:held]).items():
            size, most = request.block_size_tokens, request.input_tokens - 1
            tokens = sum([min(size, most - place * size) for place in places])
            fetch = _Fetch(job, owner, places, tokens, stays=False)
            self._report(
                events.FetchStarted(
                    at_s=self._loop.now_s,
                    attempt=job.attempt,
                    instance=instance,
                    source=owner,
                    from_ssd=self._caches.on_ssd(owner, fetch.keys) > 0,
                )
            )
            self._begin(fetch)

    def _begin(self, fetch: _Fetch) -> None:
        """What lies on its holder's SSD is read into DRAM first; all is sent when it has been read."""
        job, source, now_s = fetch.job, fetch.source, self._loop.now_s
        job.fetching += 1
        fetch.waiting.append(job)
        self._fetches[fetch] = None
        self._loop.call_later(self._fetch_timeout_s, self._end_fetch, fetch, now_s, 0)
        below = self._caches.on_ssd(source, fetch.keys)
        if not below:
            self._send_prefix(fetch)
            return
        tokens = min(below * job.request.block_size_tokens, fetch.tokens)
        start_s = _take(self._ssd_free_s, source, now_s, self._model.ssd_load_s(tokens))
        self._loop.call_later(self._ssd_free_s[source] - now_s, self._prefix_read, fetch, start_s, tokens)

    def _prefix_read(self, fetch: _Fetch, start_s: float, tokens: int) -> None:
        if fetch not in self._fetches:
            return
        wanted = not all(job.cancelled for job in fetch.waiting)
        if not wanted or not self._leave_out_evicted(fetch):
            self._end_fetch(fetch, start_s, 0)
            return
        tokens = min(tokens, fetch.tokens)
        self._report(
            events.TierRead(
                at_s=self._loop.now_s,
                attempt=fetch.job.attempt,
                instance=fetch.source,
                start_s=start_s,
                bytes=tokens * self._token_bytes,
            )
        )
        self._send_prefix(fetch)

    def _leave_out_evicted(self, fetch: _Fetch) -> int:
        """The blocks that are left of a fetch: those before the first that its holder evicted meanwhile."""
        job, places = fetch.job, fetch.places
        held = self._caches.use(fetch.source, job.request, places)
        if 0 < held < len(places):
            fetch.places = places[:held]
            fetch.tokens = min(fetch.tokens, held * job.request.block_size_tokens)
            if not fetch.stays:
                job.most_blocks = min(job.most_blocks, places[held])
        return held

    def _send_prefix(self, fetch: _Fetch) -> None:
        job, size = fetch.job, fetch.tokens * self._token_bytes
        arrived = partial(self._end_fetch, fetch, self._loop.now_s, size)
        sent = self._when_sent(job, fetch.source)
        fetch.flow = self._network.transfer(fetch.source, job.placement.prefill, size, arrived, sent=sent)

    def _end_fetch(self, fetch: _Fetch, start_s: float, size_bytes: int) -> None:
        """A prefix has arrived; or one of its nodes is down or it is late (0 bytes), and its blocks are computed.

        The rest of what is late is not sent, as in the live cluster.
        """
        if fetch not in self._fetches:
            return
        del self._fetches[fetch]
        flow, fetch.flow = fetch.flow, None  # which refers to this fetch
        if flow is not None and not size_bytes:
            self._network.stop(flow)
        job, first = fetch.job, fetch.places[0]
        if fetch.stays and size_bytes:
            self._caches.keep(job.placement.prefill, job.request, fetch.places[-1] + 1, first=first)
        elif not size_bytes and not fetch.stays:
            job.most_blocks = min(job.most_blocks, first)
        self._prefix_fetched(job, fetch.source, start_s, size_bytes)
        for each in fetch.waiting:
            each.end_fetching()

    def _prefix_fetched(self, job: PrefillJob, source: str, start_s: float, size_bytes: int) -> None:
        self._report(
            events.PrefixFetched(
                at_s=self._loop.now_s,
                attempt=job.attempt,
                source=source,
                instance=job.placement.prefill,
                start_s=start_s,
                bytes=size_bytes,
            )
        )

    def disk_wait_s(self, node: str) -> float:
        """How long a node's disk still reads for others."""
        return max(0.0, self._ssd_free_s.get(node, 0.0) - self._loop.now_s)

    def read_disk(self, node: str, tokens: int) -> None:
        """A node reads from its disk for its own prompt, after what it reads for others."""
        _take(self._ssd_free_s, node, self._loop.now_s, self._model.ssd_load_s(tokens))

    def load(self, instance: str, tokens: int, loaded: Callable[[], None]) -> None:
        """Copy KVCache from the host memory of a decode node into its GPU memory, one request after the other."""
        now_s, load_s = self._loop.now_s, self._dram.seconds(tokens * self._token_bytes)
        wait_s = _take(self._link_free_s, instance, now_s, load_s) - now_s
        self._loop.call_later(wait_s + load_s, loaded)

    def stream(self, job: PrefillJob, seconds: float) -> None:
        """A prompt begins: each layer's KVCache leaves while the next layer is computed (arXiv §5.2).

        It leaves no faster than layers are computed: when the prompt is, the last one is still to be sent.
        """
        if self._streams_layers:
            computed_bytes = job.request.input_tokens * self._token_bytes * self._computed_share
            job.stream = self._send_prompt(job, computed_bytes / seconds if seconds else inf)

    def drop(self, job: PrefillJob) -> None:
        """An attempt is cancelled: what is computed of its prompt is not sent any more."""
        stream, job.stream = job.stream, None
        if stream is not None:
            self._network.stop(stream)

    def finish(self, jobs: Sequence[PrefillJob]) -> None:
        """Prompts of one iteration are computed: the rest of their KVCache leaves, in order to each decode node.

        The record of a move begins now, whatever has left before: it shows what computation did not hide.
        """
        queues = dict[str, list[PrefillJob]]()
        for job in jobs:
            queues.setdefault(job.placement.decode, []).append(job)
        for queue in queues.values():
            self._finish_next(queue, self._loop.now_s)

    def _finish_next(self, queue: Sequence[PrefillJob], start_s: float) -> None:
        """Send the rest of the first prompt, and then of the others."""
        job, *others = queue
        if job.placement.prefill in self._down or job.placement.decode in self._down:
            return
        stream, job.stream = job.stream or self._send_prompt(job), None  # else each holds the other in memory
        stream.arrived = partial(self._kv_arrived, job, start_s)
        if others:
            report_sent = stream.sent

            def sent() -> None:
                if report_sent is not None:
                    report_sent()
                self._finish_next(others, start_s)

            stream.sent = sent
        self._network.release(stream)

    def _send_prompt(self, job: PrefillJob, most_bytes_per_s: float = inf) -> Flow:
        size, placed = job.request.input_tokens * self._token_bytes, job.placement
        return self._network.transfer(
            placed.prefill,
            placed.decode,
            size,
            sent=self._when_sent(job, placed.prefill),
            most_bytes_per_s=most_bytes_per_s,
        )

    def _when_sent(self, job: PrefillJob, source: str) -> Callable[[], None] | None:
        """Reports that the last byte has left, where that is not when it arrives."""
        if not self._model.transfer.latency_s:
            return None
        return lambda: self._report(events.KVSent(at_s=self._loop.now_s, attempt=job.attempt, instance=source))

    def _kv_arrived(self, job: PrefillJob, start_s: float) -> None:
        if not job.cancelled:
            size = job.request.input_tokens * self._token_bytes
            self._report(events.KVArrived(at_s=self._loop.now_s, attempt=job.attempt, start_s=start_s, bytes=size))

    def keep_answer(self, attempt: Attempt, placement: Placement, grown: Request, first: int) -> None:
        """Send the blocks of an answer to the prefill node of its prompt, which keeps them.

        Args:
            attempt: that gave the answer.
            placement: of it.
            grown: the prompt with the whole blocks of the answer.
            first: the first block with tokens of the answer.
        """
        size = (grown.input_tokens - first * grown.block_size_tokens) * self._token_bytes
        kept = partial(self._answer_kept, attempt, placement, grown, first, self._loop.now_s, size)
        self._network.transfer(placement.decode, placement.prefill, size, kept)

    def _answer_kept(
        self, attempt: Attempt, placement: Placement, grown: Request, first: int, start_s: float, size_bytes: int
    ) -> None:
        if placement.prefill in self._down or placement.decode in self._down:
            return
        self._caches.keep(placement.prefill, grown, first=first)
        self._report(
            events.AnswerKept(
                at_s=self._loop.now_s,
                attempt=attempt,
                instance=placement.prefill,
                source=placement.decode,
                start_s=start_s,
                bytes=size_bytes,
            )
        )

    def cancel(self, node: str) -> None:
        """A node is down: nothing more is sent to it, from it, or read there."""
        self._down.add(node)
        self._network.cancel(node)
        for fetch in list(self._fetches):
            if node in (fetch.source, fetch.job.placement.prefill):
                self._end_fetch(fetch, self._loop.now_s, 0)


def _take(free_s: dict[str, float], node: str, now_s: float, seconds: float) -> float:
    """Let the device of a node be busy for some time once it is free; when that begins."""
    start_s = max(now_s, free_s.get(node, 0.0))
    free_s[node] = start_s + seconds
    return start_s
