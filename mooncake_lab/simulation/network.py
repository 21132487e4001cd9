"""The network in virtual time: flows between nodes, sharing each network card fairly.

A flow's rate is the smaller of its fair shares at the sender's and the receiver's card. Rates change
whenever a flow starts or ends, so the time a transfer takes depends on what else is under way.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import simpy

_INSTANT_S: Final = 1e-9
"""What is shorter than this is over: at hours of simulated time a float cannot tell such moments apart."""


class _Arrival(simpy.Event):
    """Happens a latency after its last byte was sent: a `Timeout` whose time is known later than itself."""

    def sent(self, latency_s: float) -> None:
        """The last byte is on its way."""
        self._ok, self._value = True, None
        self.env.schedule(self, delay=latency_s)


@dataclass(slots=True, eq=False)
class _Flow:
    """A transfer under way; it changes as time passes."""

    source: str
    destination: str
    remaining_bytes: float
    done: _Arrival
    source_cards: int
    destination_cards: int
    rate_bytes_per_s: float = field(default=0.0)


class Network:
    """Links between named nodes, each with one full-duplex card of the same rate, or a group with several.

    Raises:
        ValueError: when the rate is not positive.
    """

    def __init__(
        self,
        env: simpy.Environment,
        bytes_per_s: float,
        latency_s: float = 0.0,
        *,
        cards: Mapping[str, int] | None = None,
    ) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"a network of {bytes_per_s!r} bytes/s; the rate must be positive")
        self._env = env
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._cards = cards or {}
        self._flows: list[_Flow] = []
        self._sending: dict[str, int] = {}
        self._receiving: dict[str, int] = {}
        self._advanced_s = 0.0
        self._generation = 0

    def flows_from(self, node: str) -> int:
        """How many transfers a node is sending now."""
        return self._sending.get(node, 0)

    def transfer(self, source: str, destination: str, size_bytes: float) -> simpy.Event:
        """An event that happens when the last byte has arrived.

        Raises:
            ValueError: when source and destination are the same node, which needs no network.
        """
        if source == destination:
            raise ValueError(f"a transfer from {source} to itself needs no network")
        done = _Arrival(self._env)
        self._advance()
        cards = self._cards.get(source, 1), self._cards.get(destination, 1)
        self._flows.append(_Flow(source, destination, float(size_bytes), done, *cards))
        self._sending[source] = self._sending.get(source, 0) + 1
        self._receiving[destination] = self._receiving.get(destination, 0) + 1
        self._share()
        return done

    def cancel(self, node: str) -> None:
        """A node is gone: its transfers end now, whatever is left of them. Who waited finds it dead."""
        self._advance()
        for flow in [flow for flow in self._flows if node in {flow.source, flow.destination}]:
            self._flows.remove(flow)
            self._sending[flow.source] -= 1
            self._receiving[flow.destination] -= 1
            flow.done.sent(0.0)
        self._share()

    def _advance(self) -> None:
        """Let the flows have moved what they could since the last change."""
        elapsed_s = self._env.now - self._advanced_s
        self._advanced_s = self._env.now
        for flow in self._flows:
            flow.remaining_bytes -= flow.rate_bytes_per_s * elapsed_s

    def _share(self) -> None:
        """Give each flow its fair share, and wake up when the first one will be through."""
        self._generation += 1
        if not self._flows:
            return
        sending, receiving = self._sending, self._receiving
        next_s = float("inf")
        for flow in self._flows:
            flow.rate_bytes_per_s = self._bytes_per_s / max(
                sending[flow.source] / flow.source_cards, receiving[flow.destination] / flow.destination_cards
            )
            next_s = min(next_s, flow.remaining_bytes / flow.rate_bytes_per_s)
        generation = self._generation
        timer = self._env.timeout(max(next_s, 0.0))
        _then(timer, lambda: self._finish(generation))

    def _finish(self, generation: int) -> None:
        """The first flows are through, unless another change came before."""
        if generation != self._generation:
            return
        self._advance()
        through = [flow for flow in self._flows if flow.remaining_bytes <= flow.rate_bytes_per_s * _INSTANT_S]
        self._flows = [flow for flow in self._flows if flow not in through]
        for flow in through:
            self._sending[flow.source] -= 1
            self._receiving[flow.destination] -= 1
            flow.done.sent(self._latency_s)
        self._share()


def _then(event: simpy.Event, act: Callable[[], object]) -> None:
    def callback(_event: simpy.Event) -> None:
        act()

    event.callbacks.append(callback)
