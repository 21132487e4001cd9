"""KVCache on the network in virtual time: prefixes between prefill nodes, and prompts from prefill to decode."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf

import simpy

from mooncake_lab.cluster import Attempt, Event, KVArrived, KVSent, PrefixFetched, TierRead
from mooncake_lab.conductor import Placement
from mooncake_lab.core import Request
from mooncake_lab.perf import LatencyModel
from mooncake_lab.simulation.network import Arrival, Network
from mooncake_lab.simulation.pool import PrefixPool


@dataclass(slots=True, eq=False)
class PrefillJob:
    """An attempt on its way through prefill. Mutable: it is followed by those who carry it out."""

    attempt: Attempt
    request: Request
    placement: Placement
    fetched: simpy.Event | None = None
    """Happens when the prefix blocks that come from elsewhere are here."""
    stream: Arrival | None = None
    """Happens when its KVCache is at the decode node."""
    cancelled: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether all that it waits for is here."""
        return self.fetched is None or self.fetched.processed


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """Blocks that are read from SSD at their holder, to be sent on."""

    came: simpy.Event
    job: PrefillJob


class KVTransfer:
    """Moves KVCache between nodes (arXiv §5.2, FAST'25 §4.2 and Fig. 14), and reports what arrived.

    Args:
        env: the simulation.
        model: how long reading takes, and how large a token is.
        network: what KVCache travels by.
        pool: where prefixes are, and will be.
        streams_layers: whether the KVCache of a prompt leaves layer by layer while it is computed.
        report: told what arrived.
    """

    def __init__(
        self,
        env: simpy.Environment,
        model: LatencyModel,
        network: Network,
        pool: PrefixPool,
        *,
        streams_layers: bool,
        report: Callable[[Event], None],
    ) -> None:
        self._env = env
        self._model = model
        self._network = network
        self._pool = pool
        self._streams_layers = streams_layers
        self._report = report
        self._token_bytes = model.shape.kv_bytes_per_token
        self._computed_share = 1 - 1 / model.shape.layers  # of a prompt's KVCache, when its last layer is computed
        self._reading: list[_Reading] = []
        self._ssd_free_s: dict[str, float] = {}
        self._down: set[str] = set()

    # callbacks rather than processes: a process is two events more, and every request passes here

    def fetch(self, job: PrefillJob) -> simpy.Event:
        """An event that happens when the blocks of a prefix are there, or will never be.

        What lies on its holder's SSD is read into its DRAM first, after what is read there for others, and is sent
        when all of it has been read. The copy stays, which is how hot blocks spread (FAST'25 §4.2).
        """
        request, placement, came = job.request, job.placement, self._env.event()
        source, blocks = str(placement.fetch_from), -(-placement.reused_tokens // request.block_size_tokens)
        if source in self._down:
            return came.succeed()
        on_ssd = self._pool.on_ssd
        below = on_ssd(source, request, blocks) - on_ssd(source, request, _local_blocks(job))
        if not below:
            return self._send_prefix(job)
        tokens = min(below * request.block_size_tokens, placement.fetched_tokens)
        start_s = max(self._env.now, self._ssd_free_s.get(source, 0.0))
        self._ssd_free_s[source] = start_s + self._model.ssd_load_s(tokens)
        reading = _Reading(came, job)
        self._reading.append(reading)

        def read(_: simpy.Event) -> None:
            if came.triggered:
                return  # one of the two instances failed
            self._reading.remove(reading)
            if job.cancelled:
                self._prefix_fetched(job, start_s, 0)
                came.succeed()
                return
            self._pool.use(source, request, blocks)
            size = tokens * self._token_bytes
            self._report(
                TierRead(at_s=self._env.now, attempt=job.attempt, worker=source, start_s=start_s, bytes=size)
            )
            sent = self._send_prefix(job)
            assert sent.callbacks is not None  # noqa: S101  # nothing arrives at the moment it is sent
            sent.callbacks.append(there)

        def there(_: simpy.Event) -> None:
            came.succeed()

        self._env.timeout(self._ssd_free_s[source] - self._env.now).callbacks.append(read)
        return came

    def _send_prefix(self, job: PrefillJob) -> simpy.Event:
        placement, start_s = job.placement, self._env.now
        source, size = str(placement.fetch_from), placement.fetched_tokens * self._token_bytes
        sent = self._network.transfer(source, placement.prefill, size)
        self._report_sent(sent, job, source)

        def arrived(_: simpy.Event) -> None:
            if source in self._down or placement.prefill in self._down:
                self._prefix_fetched(job, start_s, 0)
                return
            blocks = -(-placement.reused_tokens // job.request.block_size_tokens)
            self._pool.keep(placement.prefill, job.request, blocks, first=_local_blocks(job))
            self._prefix_fetched(job, start_s, size)

        assert sent.callbacks is not None  # noqa: S101  # as above
        sent.callbacks.append(arrived)
        return sent

    def _prefix_fetched(self, job: PrefillJob, start_s: float, size_bytes: int) -> None:
        self._report(
            PrefixFetched(
                at_s=self._env.now,
                attempt=job.attempt,
                source=str(job.placement.fetch_from),
                worker=job.placement.prefill,
                start_s=start_s,
                bytes=size_bytes,
            )
        )

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
        if job.stream is None:
            self._send_prompt(job)
        else:
            self._network.release(job.stream)
        assert job.stream is not None and job.stream.callbacks is not None  # noqa: S101, PT018  # it is under way
        job.stream.callbacks.append(partial(self._kv_arrived, job, self._env.now))

    def _send_prompt(self, job: PrefillJob, most_bytes_per_s: float = inf) -> None:
        size = job.request.input_tokens * self._token_bytes
        placed = job.placement
        job.stream = self._network.transfer(placed.prefill, placed.decode, size, most_bytes_per_s=most_bytes_per_s)
        self._report_sent(job.stream, job, placed.prefill)

    def _report_sent(self, transfer: Arrival, job: PrefillJob, source: str) -> None:
        """Let it be reported when the last byte has left, where that is not when it arrives."""
        if self._model.transfer.latency_s:
            transfer.on_sent = lambda: self._report(KVSent(at_s=self._env.now, attempt=job.attempt, worker=source))

    def _kv_arrived(self, job: PrefillJob, start_s: float, _: simpy.Event) -> None:
        if not job.cancelled:
            size = job.request.input_tokens * self._token_bytes
            self._report(KVArrived(at_s=self._env.now, attempt=job.attempt, start_s=start_s, bytes=size))

    def cancel(self, node: str) -> None:
        """A node is down: nothing more is sent to it, from it, or read there."""
        self._down.add(node)
        self._network.cancel(node)
        for reading in list(self._reading):
            if node in {reading.job.placement.fetch_from, reading.job.placement.prefill}:
                self._reading.remove(reading)
                reading.came.succeed()


def _local_blocks(job: PrefillJob) -> int:
    """How many leading blocks the node that fetches held itself when it was chosen."""
    return (job.placement.reused_tokens - job.placement.fetched_tokens) // job.request.block_size_tokens
