"""A prefix that one prefill node copies from another, from its holder's SSD where it lies there."""

from collections.abc import Callable
from dataclasses import dataclass

import simpy

from mooncake_lab.conductor import Placement
from mooncake_lab.core import Moved, Record, Request
from mooncake_lab.perf import LatencyModel
from mooncake_lab.simulation.journeys import Journeys
from mooncake_lab.simulation.network import Network
from mooncake_lab.simulation.pool import PrefixPool


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """Blocks that rise at their holder, to be sent on."""

    came: simpy.Event
    source: str
    destination: str


class Fetcher:
    """Copies prefix blocks between prefill nodes; they stay, which is how hot blocks spread (FAST'25 §4.2).

    Args:
        env: the simulation.
        model: how long reading takes, and how large a token is.
        network: what they travel by.
        pool: where they are, and will be.
        journeys: told of each copy.
        alive: whether a prefill instance lives.
        log: gets a record of each copy, and of what its holder had to read from SSD for it.
    """

    def __init__(
        self,
        env: simpy.Environment,
        model: LatencyModel,
        network: Network,
        pool: PrefixPool,
        journeys: Journeys,
        *,
        alive: Callable[[str], bool],
        log: Callable[[Record], None],
    ) -> None:
        self._env = env
        self._model = model
        self._network = network
        self._pool = pool
        self._journeys = journeys
        self._alive = alive
        self._log = log
        self._reading: list[_Reading] = []
        self._ssd_free_s: dict[str, float] = {}

    def fetch(self, request: Request, placement: Placement) -> simpy.Event:
        """An event that happens when the blocks are there, or will never be.

        What lies on its holder's SSD rises into its DRAM first, after whatever else is read there for others, and
        is sent when all of it has.
        """
        source, blocks = str(placement.fetch_from), -(-placement.reused_tokens // request.block_size_tokens)
        local, came = self._local(request, placement), self._env.event()
        if not self._alive(source):
            return came.succeed()
        below = self._pool.on_ssd(source, request, blocks) - self._pool.on_ssd(source, request, local)
        if not below:
            return self._send(request, placement)
        tokens = min(below * request.block_size_tokens, placement.fetched_tokens)
        start_s = max(self._env.now, self._ssd_free_s.get(source, 0.0))
        self._ssd_free_s[source] = start_s + self._model.ssd_load_s(tokens)
        reading = _Reading(came, source, placement.prefill)
        self._reading.append(reading)

        def read(_: simpy.Event) -> None:
            if came.triggered:
                return  # one of the two died
            self._reading.remove(reading)
            if not self._journeys.is_current(request.id, placement):
                came.succeed()  # nobody waits: where it was to decode has died
                return
            self._pool.use(source, request, blocks)
            self.rose(request, source, start_s, tokens)
            sent = self._send(request, placement)
            assert sent.callbacks is not None  # noqa: S101  # nothing arrives at the moment it is sent
            sent.callbacks.append(there)

        def there(_: simpy.Event) -> None:
            came.succeed()

        self._env.timeout(self._ssd_free_s[source] - self._env.now).callbacks.append(read)
        return came

    def cancel(self, node: str) -> None:
        """A node is gone: nothing more is read there, or for it. Who waited finds it dead."""
        for reading in [one for one in self._reading if node in {one.source, one.destination}]:
            self._reading.remove(reading)
            reading.came.succeed()

    def rose(self, request: Request, node: str, start_s: float, tokens: int) -> None:
        """Record that a node has read so many tokens of a prompt from its SSD, since `start_s`."""
        self._moved(request, f"{node}/ssd", f"{node}/dram", start_s, tokens)

    @staticmethod
    def _local(request: Request, placement: Placement) -> int:
        """How many leading blocks the fetching node held itself when it was chosen."""
        return (placement.reused_tokens - placement.fetched_tokens) // request.block_size_tokens

    def _send(self, request: Request, placement: Placement) -> simpy.Event:
        source = str(placement.fetch_from)
        size = placement.fetched_tokens * self._model.shape.kv_bytes_per_token
        sent = self._network.transfer(source, placement.prefill, size)
        start_s = self._env.now

        def arrived(_: simpy.Event) -> None:
            if not (self._alive(source) and self._alive(placement.prefill)):
                return  # the bytes died with their sender, or with who was to keep them
            blocks = -(-placement.reused_tokens // request.block_size_tokens)
            self._pool.keep(placement.prefill, request, blocks, first=self._local(request, placement))
            self._journeys.copied(request.id, placement)
            self._moved(request, source, placement.prefill, start_s, placement.fetched_tokens)

        assert sent.callbacks is not None  # noqa: S101  # as above
        sent.callbacks.append(arrived)
        return sent

    def _moved(self, request: Request, source: str, destination: str, start_s: float, tokens: int) -> None:
        self._log(
            Moved(
                at_s=self._env.now,
                request_id=request.id,
                source=source,
                destination=destination,
                start_s=start_s,
                bytes=tokens * self._model.shape.kv_bytes_per_token,
            )
        )
