"""Which network cards a transfer uses: the topology matrix and path selection of FAST'25 Fig. 4.

A server writes down, for each place its memory lies in (a CPU socket, a GPU), which cards are near and which
are merely reachable. A transfer is cut into slices; each slice takes a near card at both ends. A failed card is
avoided, and where no near one works, any reachable one will do. Pure: who moves bytes asks, and reports failures.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mooncake_lab.core import keyed_uniform

SLICE_BYTES: Final = 16 * 1024
"""What the paper's Transfer Engine cuts a transfer into."""


class NoPathError(ValueError):
    """No working card reaches a place of memory."""


@dataclass(frozen=True, slots=True)
class Cards:
    """The network cards that one place of memory can use."""

    preferred: tuple[str, ...]
    """Near: on the same socket, or behind the same PCIe switch."""
    secondary: tuple[str, ...] = ()
    """Reachable over the link between sockets."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The topology matrix of one server; each server broadcasts its own.

    Raises:
        ValueError: when it has no place, or a place has no card, or one twice.
    """

    places: Mapping[str, Cards]
    """By place of memory, such as `cpu:0` or `cuda:3`."""

    def __post_init__(self) -> None:
        if not self.places:
            raise ValueError("a topology of 0 places of memory; at least 1 is needed")
        for place, cards in self.places.items():
            names = cards.preferred + cards.secondary
            if not names or len(set(names)) < len(names):
                raise ValueError(f"place {place!r} has the cards {names!r}; one or more are needed, each once")

    def cards(self, place: str, failed: Collection[str] = ()) -> tuple[str, ...]:
        """The cards to choose from for a place: the near ones that work, else the others that work.

        Raises:
            ValueError: when there is no such place.
            NoPathError: when no card of it works.
        """
        if place not in self.places:
            raise ValueError(f"no place of memory {place!r}; there are {', '.join(self.places)}")
        row = self.places[place]
        for names in (row.preferred, row.secondary):
            working = tuple(name for name in names if name not in failed)
            if working:
                return working
        raise NoPathError(f"none of the cards {', '.join(row.preferred + row.secondary)} of {place!r} works")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One piece of a transfer and the cards it takes."""

    offset_bytes: int
    size_bytes: int
    local_card: str
    remote_card: str


def plan_transfer(
    size_bytes: int,
    source: tuple[Topology, str],
    destination: tuple[Topology, str],
    *,
    failed: Collection[str] = (),
    slice_bytes: int = SLICE_BYTES,
    seed: int = 0,
) -> tuple[Slice, ...]:
    """Cut a transfer into slices and give each a path; slices spread evenly over all cards that may be used.

    Args:
        size_bytes: of the transfer.
        source: the sender's topology and where its bytes lie.
        destination: the receiver's topology and where its bytes shall lie.
        failed: cards known not to work, at either end.
        slice_bytes: of every slice but the last.
        seed: where the rotation over cards begins, so that transfers do not all begin at the first card.

    Raises:
        ValueError: when a size is not positive, or there is no such place.
        NoPathError: when no card of an end works.
    """
    if size_bytes < 1 or slice_bytes < 1:
        raise ValueError(f"{size_bytes} bytes in slices of {slice_bytes}; both must be positive")
    near, far = source[0].cards(source[1], failed), destination[0].cards(destination[1], failed)
    first = int(keyed_uniform(seed, "path") * len(near) * len(far))
    return tuple(
        Slice(
            offset_bytes=offset,
            size_bytes=min(slice_bytes, size_bytes - offset),
            local_card=near[(first + turn) % len(near)],
            remote_card=far[(first + turn) % len(far)],
        )
        for turn, offset in enumerate(range(0, size_bytes, slice_bytes))
    )


def bytes_by_card(slices: Sequence[Slice]) -> dict[str, int]:
    """How many bytes each local card sends; the one with most decides when a transfer is through."""
    sent: dict[str, int] = {}
    for piece in slices:
        sent[piece.local_card] = sent.get(piece.local_card, 0) + piece.size_bytes
    return sent
