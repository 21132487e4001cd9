"""All the couriers of a worker: one for every destination, as long as it lives."""

from collections.abc import Callable
from typing import final

from mooncake_lab.serving.lane import Lane
from mooncake_lab.serving.messages import Job
from mooncake_lab.serving.messenger import Courier, Identity


@final
class Couriers:
    """One courier for every destination that was written to and lives. Mutable: it owns them."""

    __slots__ = ("_by_port", "_failed", "_lane", "_who")

    def __init__(self, who: Identity, failed: Callable[[Job, str], None], lane: Lane | None = None) -> None:
        self._who = who
        self._failed = failed
        self._lane = lane
        self._by_port: dict[int, Courier] = {}

    def to(self, port: int) -> Courier:
        """The courier for a destination."""
        if port not in self._by_port:
            self._retire()
            self._by_port[port] = Courier(port, self._who, self._failed, self._lane)
        return self._by_port[port]

    def _retire(self) -> None:
        """End those whose connection has ended and that have nothing to carry: their worker may be dead."""
        for port in [port for port, courier in self._by_port.items() if courier.is_stranded]:
            self._by_port.pop(port).close()

    def close(self) -> None:
        """Break every connection, and end what waits for it."""
        self.sever()
        for courier in self._by_port.values():
            courier.close()
        self._by_port.clear()

    def sever(self) -> None:
        """Break every connection."""
        for courier in list(self._by_port.values()):
            courier.sever()
