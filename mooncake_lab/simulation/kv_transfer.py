"""KVCache on the network in virtual time: prefixes between prefill nodes, and prompts from prefill to decode."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf

from mooncake_lab.cluster import Attempt, Event, FetchStarted, KVArrived, KVSent, PrefixFetched, TierRead
from mooncake_lab.conductor import Placement
from mooncake_lab.core import Request
from mooncake_lab.perf import LatencyModel
from mooncake_lab.simulation.event_loop import EventLoop
from mooncake_lab.simulation.network import Flow, Network
from mooncake_lab.simulation.pool import PrefixPool


@dataclass(slots=True, eq=False)
class PrefillJob:
    """An attempt on its way through prefill. Mutable: it is followed by those who carry it out."""

    attempt: Attempt
    request: Request
    placement: Placement
    fetching: int = 0
    """From how many nodes prefix blocks are on their way."""
    most_blocks: int | None = None
    """Leading blocks that it may reuse; None is all that its node holds."""
    fetched: Callable[[], None] | None = None
    """Called when they are there, or will never be."""
    stream: Flow | None = None
    """Its KVCache on the way to the decode node."""
    cancelled: bool = False

    def end_fetching(self) -> None:
        """What of the prefix comes from one node is there, or will never be."""
        self.fetching -= 1
        if not self.fetching and self.fetched is not None:
            self.fetched()


class KVTransfer:
    """Moves KVCache between nodes (arXiv §5.2, FAST'25 §4.2 and Fig. 14), and reports what arrived.

    Args:
        loop: the virtual time.
        model: how long reading takes, and how large a token is.
        network: what KVCache travels by.
        pool: where prefixes are, and will be.
        streams_layers: whether the KVCache of a prompt leaves layer by layer while it is computed.
        report: told what arrived.
    """

    def __init__(
        self,
        loop: EventLoop,
        model: LatencyModel,
        network: Network,
        pool: PrefixPool,
        *,
        streams_layers: bool,
        report: Callable[[Event], None],
    ) -> None:
        self._loop = loop
        self._model = model
        self._network = network
        self._pool = pool
        self._streams_layers = streams_layers
        self._report = report
        self._token_bytes = model.shape.kv_bytes_per_token
        self._computed_share = 1 - 1 / model.shape.layers  # of a prompt's KVCache, when its last layer is computed
        self._reading: list[PrefillJob] = []  # whose prefixes are read from SSD at their holders, to be sent on
        self._ssd_free_s: dict[str, float] = {}
        self._down: set[str] = set()

    def fetch(self, job: PrefillJob) -> None:
        """Copy the blocks of a prefix from their holder.

        What lies on its holder's SSD is read into its DRAM first, after what is read there for others, and is sent
        when all of it has been read. The copy stays, which is how hot blocks spread (FAST'25 §4.2).
        """
        request, placement = job.request, job.placement
        source, blocks = str(placement.fetch_from), -(-placement.reused_tokens // request.block_size_tokens)
        if source in self._down:
            return
        job.fetching = 1
        on_ssd = self._pool.on_ssd
        below = on_ssd(source, request, blocks) - on_ssd(source, request, _local_blocks(job))
        if not below:
            self._send_prefix(job)
            return
        tokens = min(below * request.block_size_tokens, placement.fetched_tokens)
        start_s = max(self._loop.now_s, self._ssd_free_s.get(source, 0.0))
        self._ssd_free_s[source] = start_s + self._model.ssd_load_s(tokens)
        self._reading.append(job)
        self._loop.call_later(self._ssd_free_s[source] - self._loop.now_s, self._prefix_read, job, start_s, tokens)

    def gather(self, job: PrefillJob) -> None:
        """Copy the blocks of a prefix that lie on other nodes of a shared store; the copies do not stay."""
        request, worker, now_s = job.request, job.placement.prefill, self._loop.now_s
        job.most_blocks = self._pool.matched(worker, request)
        for owner, blocks in self._pool.elsewhere(worker, request).items():
            job.fetching += 1
            self._report(FetchStarted(at_s=now_s, attempt=job.attempt, worker=worker, source=owner))
            size = min(blocks * request.block_size_tokens, request.input_tokens - 1) * self._token_bytes
            arrived = partial(self._gathered, job, owner, now_s, size)
            self._network.transfer(owner, worker, size, arrived, sent=self._when_sent(job, owner))

    def _gathered(self, job: PrefillJob, owner: str, start_s: float, size_bytes: int) -> None:
        is_lost = owner in self._down or job.placement.prefill in self._down
        self._prefix_fetched(job, owner, start_s, 0 if is_lost else size_bytes)

    def _prefix_read(self, job: PrefillJob, start_s: float, tokens: int) -> None:
        if job not in self._reading:
            return  # one of the two instances failed
        self._reading.remove(job)
        if job.cancelled:
            self._prefix_fetched(job, str(job.placement.fetch_from), start_s, 0)
            return
        request, source = job.request, str(job.placement.fetch_from)
        self._pool.use(source, request, -(-job.placement.reused_tokens // request.block_size_tokens))
        self._report(
            TierRead(
                at_s=self._loop.now_s,
                attempt=job.attempt,
                worker=source,
                start_s=start_s,
                bytes=tokens * self._token_bytes,
            )
        )
        self._send_prefix(job)

    def _send_prefix(self, job: PrefillJob) -> None:
        placement, source = job.placement, str(job.placement.fetch_from)
        self._network.transfer(
            source,
            placement.prefill,
            placement.fetched_tokens * self._token_bytes,
            partial(self._prefix_arrived, job, self._loop.now_s),
            sent=self._when_sent(job, source),
        )

    def _prefix_arrived(self, job: PrefillJob, start_s: float) -> None:
        placement, size = job.placement, 0
        if placement.fetch_from not in self._down and placement.prefill not in self._down:
            size = placement.fetched_tokens * self._token_bytes
            blocks = -(-placement.reused_tokens // job.request.block_size_tokens)
            self._pool.keep(placement.prefill, job.request, blocks, first=_local_blocks(job))
        self._prefix_fetched(job, str(placement.fetch_from), start_s, size)

    def _prefix_fetched(self, job: PrefillJob, source: str, start_s: float, size_bytes: int) -> None:
        self._report(
            PrefixFetched(
                at_s=self._loop.now_s,
                attempt=job.attempt,
                source=source,
                worker=job.placement.prefill,
                start_s=start_s,
                bytes=size_bytes,
            )
        )
        job.end_fetching()

    def stream(self, job: PrefillJob, seconds: float) -> None:
        """A prompt begins: each layer's KVCache leaves while the next layer is computed (arXiv §5.2).

        It leaves no faster than layers are computed: when the prompt is, the last one is still to be sent.
        """
        if self._streams_layers:
            computed_bytes = job.request.input_tokens * self._token_bytes * self._computed_share
            self._send_prompt(job, computed_bytes / seconds if seconds else inf)

    def finish(self, job: PrefillJob) -> None:
        """A prompt is computed: what is left of its KVCache leaves now.

        The record of its move begins now, whatever has left before: it shows what computation did not hide.
        """
        stream = job.stream or self._send_prompt(job)
        stream.arrived = partial(self._kv_arrived, job, self._loop.now_s)
        self._network.release(stream)

    def _send_prompt(self, job: PrefillJob, most_bytes_per_s: float = inf) -> Flow:
        size, placed = job.request.input_tokens * self._token_bytes, job.placement
        job.stream = self._network.transfer(
            placed.prefill,
            placed.decode,
            size,
            sent=self._when_sent(job, placed.prefill),
            most_bytes_per_s=most_bytes_per_s,
        )
        return job.stream

    def _when_sent(self, job: PrefillJob, source: str) -> Callable[[], None] | None:
        """Reports that the last byte has left, where that is not when it arrives."""
        if not self._model.transfer.latency_s:
            return None
        return lambda: self._report(KVSent(at_s=self._loop.now_s, attempt=job.attempt, worker=source))

    def _kv_arrived(self, job: PrefillJob, start_s: float) -> None:
        if not job.cancelled:
            size = job.request.input_tokens * self._token_bytes
            self._report(KVArrived(at_s=self._loop.now_s, attempt=job.attempt, start_s=start_s, bytes=size))

    def cancel(self, node: str) -> None:
        """A node is down: nothing more is sent to it, from it, or read there."""
        self._down.add(node)
        self._network.cancel(node)
        for job in list(self._reading):
            if node in (job.placement.fetch_from, job.placement.prefill):
                self._reading.remove(job)
                job.end_fetching()


def _local_blocks(job: PrefillJob) -> int:
    """How many leading blocks the node that fetches held itself when it was chosen."""
    return (job.placement.reused_tokens - job.placement.fetched_tokens) // job.request.block_size_tokens
