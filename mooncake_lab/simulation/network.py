"""The network in virtual time: flows between nodes, sharing network cards max-min fairly.

No flow gets more than it can use, and what one cannot use the others share. Rates change whenever a flow starts,
ends or is let go, so the time a transfer takes depends on what else is under way.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

from mooncake_lab.simulation.clock import EventLoop

_INSTANT_S: Final = 1e-9
"""What is shorter than this is over: at hours of simulated time a float cannot tell such moments apart."""


@dataclass(slots=True, eq=False)
class _Card:
    """One direction of a node's network cards; it changes as flows come and go."""

    bytes_per_s: float
    rest_bytes_per_s: float
    """What paced flows leave."""
    greedy: int = 0
    """Flows through it that take what they get."""
    paced: int = 0
    """Flows through it that are held to a rate of their own."""
    left_bytes_per_s: float = 0.0
    """What rates that are settled leave, while fair shares are found."""
    users: int = 0
    """Flows through it whose rate is not settled yet."""
    crowded: bool = False
    """Whether something is to be shared; else paced flows have their pace, and at most one other all the rest."""


@dataclass(slots=True, eq=False)
class Flow:
    """A transfer under way; it changes as its rate does."""

    source: str
    destination: str
    remaining_bytes: float
    """Bytes that were left when the rate last changed."""
    most_bytes_per_s: float
    sender: _Card
    receiver: _Card
    arrived: Callable[[], None] | None
    """Called when the last byte has arrived."""
    sent: Callable[[], None] | None = None
    """Called when the last byte is on its way."""
    rate_bytes_per_s: float = 0.0
    since_s: float = 0.0
    ends_s: float = inf
    """When it will be through at this rate."""

    def go(self, bytes_per_s: float, now_s: float) -> None:
        """Move at this rate from now on."""
        self.remaining_bytes -= self.rate_bytes_per_s * (now_s - self.since_s)
        self.since_s, self.rate_bytes_per_s = now_s, bytes_per_s
        self.ends_s = now_s + max(self.remaining_bytes, 0.0) / bytes_per_s if bytes_per_s else inf


class Network:
    """Links between named nodes, each with one full-duplex card of the same rate, or as many as `cards` says.

    A group of nodes has several, and a node with a slower card has a part of one.

    Raises:
        ValueError: when the rate is not positive.
    """

    def __init__(
        self,
        loop: EventLoop,
        bytes_per_s: float,
        latency_s: float = 0.0,
        *,
        cards: Mapping[str, float] | None = None,
    ) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"a network of {bytes_per_s!r} bytes/s; the rate must be positive")
        self._loop = loop
        self._bytes_per_s = float(bytes_per_s)
        self._latency_s = latency_s
        self._cards = cards or {}
        self._paced: dict[Flow, None] = {}
        self._greedy: dict[Flow, None] = {}
        self._sending: dict[str, _Card] = {}
        self._receiving: dict[str, _Card] = {}
        self._crowded = 0  # cards
        self._was_crowded = False
        self._wakes_s = inf

    def transfer(
        self,
        source: str,
        destination: str,
        size_bytes: float,
        arrived: Callable[[], None] | None = None,
        *,
        sent: Callable[[], None] | None = None,
        most_bytes_per_s: float = inf,
    ) -> Flow:
        """Begin a transfer.

        Args:
            source: who sends.
            destination: who receives.
            size_bytes: of all of it.
            arrived: called when the last byte has arrived, a latency after it was sent.
            sent: called when the last byte is on its way.
            most_bytes_per_s: no faster than this, because it is made no faster, until `release` says that the last
                byte is made; it arrives after that. What a crowded card holds up is made up for only then.

        Raises:
            ValueError: when source and destination are the same node, which needs no network.
        """
        if source == destination:
            raise ValueError(f"a transfer from {source} to itself needs no network")
        sender, receiver = self._card(self._sending, source), self._card(self._receiving, destination)
        size = float(size_bytes)
        flow = Flow(source, destination, size, most_bytes_per_s, sender, receiver, arrived, sent)
        if most_bytes_per_s < inf:
            self._count(flow, 0, 1, most_bytes_per_s)
            flow.go(most_bytes_per_s, self._loop.now_s)
            self._paced[flow] = None
            if not (sender.greedy or receiver.greedy or self._crowded or self._was_crowded):
                return flow  # most streams: no other stream is slower for it
        else:
            self._count(flow, 1, 0, 0.0)
            self._greedy[flow] = None
        self._share()
        return flow

    def release(self, flow: Flow) -> None:
        """All that is to be sent is there: from now on a transfer may be as fast as the network lets it."""
        if flow not in self._paced:
            return  # it never was held back, or its node is gone
        del self._paced[flow]
        self._count(flow, 1, -1, -flow.most_bytes_per_s)
        flow.most_bytes_per_s = inf
        self._greedy[flow] = None
        self._share()

    def stop(self, flow: Flow) -> None:
        """End a transfer that is under way, without a report."""
        if flow in self._greedy or flow in self._paced:
            flow.arrived = flow.sent = None
            self._end(flow, 0.0)
            self._share()

    def cancel(self, node: str) -> None:
        """A node is gone: its transfers end now, whatever is left of them. Who waited finds it dead."""
        for flow in [*self._paced, *self._greedy]:
            if node in (flow.source, flow.destination):
                self._end(flow, 0.0)
        self._share()

    def _card(self, cards: dict[str, _Card], node: str) -> _Card:
        if node not in cards:
            bytes_per_s = self._bytes_per_s * self._cards.get(node, 1)
            cards[node] = _Card(bytes_per_s, bytes_per_s)
        return cards[node]

    def _count(self, flow: Flow, greedy: int, paced: int, paced_bytes_per_s: float) -> None:
        """A flow comes, goes or is let go, by negative numbers where it goes: both its cards know."""
        for card in (flow.sender, flow.receiver):
            card.greedy += greedy
            if paced:
                card.paced += paced
                rest = card.rest_bytes_per_s - paced_bytes_per_s
                card.rest_bytes_per_s = rest if card.paced else card.bytes_per_s  # rounding leaves no trace
            crowded = card.greedy > 1 or 2 * card.rest_bytes_per_s < card.bytes_per_s
            self._crowded += crowded - card.crowded
            card.crowded = crowded

    def _end(self, flow: Flow, latency_s: float) -> None:
        if flow.most_bytes_per_s < inf:
            del self._paced[flow]
            self._count(flow, 0, -1, -flow.most_bytes_per_s)
        else:
            del self._greedy[flow]
            self._count(flow, -1, 0, 0.0)
        if flow.sent is not None:
            flow.sent()
        if flow.arrived is not None:
            self._loop.call_later(latency_s, flow.arrived)

    def _share(self) -> None:
        """Give each flow its fair share, and wake up when the first one will be through."""
        now_s = self._loop.now_s
        if self._crowded:
            _share_fairly([*self._paced, *self._greedy], now_s)
        else:
            if self._was_crowded:
                for flow in self._paced:
                    flow.go(flow.most_bytes_per_s, now_s)
            for flow in self._greedy:
                rate, received = flow.sender.rest_bytes_per_s, flow.receiver.rest_bytes_per_s
                rate = min(rate, received)  # half of all moments in a replay come by here
                if rate != flow.rate_bytes_per_s:
                    flow.go(rate, now_s)
        self._was_crowded = self._crowded > 0
        wakes_s = min([flow.ends_s for flow in self._greedy], default=inf)
        if wakes_s != self._wakes_s:
            self._wakes_s = wakes_s
            if wakes_s < inf:
                self._loop.call_later(max(wakes_s - now_s, 0.0), self._finish, wakes_s)

    def _finish(self, wakes_s: float) -> None:
        """The first flows are through, unless another change came before."""
        if wakes_s != self._wakes_s:
            return
        self._wakes_s = inf
        through_s = self._loop.now_s + _INSTANT_S
        for flow in [flow for flow in self._greedy if flow.ends_s <= through_s]:
            self._end(flow, self._latency_s)
        self._share()


def _share_fairly(flows: list[Flow], now_s: float) -> None:
    """Max-min fair rates by progressive filling: who can have no more is settled, the others share the rest."""
    cards = list(dict.fromkeys([card for flow in flows for card in (flow.sender, flow.receiver)]))
    for card in cards:
        card.left_bytes_per_s, card.users = card.bytes_per_s, 0
    for flow in flows:
        flow.sender.users += 1
        flow.receiver.users += 1
    while flows:
        cards = [card for card in cards if card.users]
        shares = [card.left_bytes_per_s / card.users for card in cards]
        level = min(shares)
        settled = [flow for flow in flows if flow.most_bytes_per_s <= level]
        if settled:
            flows = [flow for flow in flows if flow.most_bytes_per_s > level]
        else:
            tightest = cards[shares.index(level)]
            settled = [flow for flow in flows if flow.sender is tightest or flow.receiver is tightest]
            flows = [flow for flow in flows if flow.sender is not tightest and flow.receiver is not tightest]
        for flow in settled:
            rate = min(flow.most_bytes_per_s, level)
            flow.go(rate, now_s)
            for card in (flow.sender, flow.receiver):
                card.left_bytes_per_s = max(card.left_bytes_per_s - rate, 0.0)
                card.users -= 1
