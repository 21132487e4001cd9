"""Loans: a medium as several clients use it at once; no block is freed while its bytes move."""

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, final

import numpy as np

from mooncake_lab.store.media import messages, wire
from mooncake_lab.store.media.dram import DramMedium
from mooncake_lab.store.media.medium import DamagedBlockError, Medium, NotHeldError, Reservation

_MOST_INT_BYTES: Final = 9  # of msgpack


@final
class Loans:
    """The blocks of one medium by name, and which of them are being read or written. Mutable: it keeps books."""

    __slots__ = ("_arena", "_books", "_busy", "_held", "_medium", "_patience_s", "_sums")

    def __init__(self, medium: Medium, patience_s: float) -> None:
        self._medium = medium
        self._arena = medium if isinstance(medium, DramMedium) else None
        self._patience_s = patience_s
        self._held = {name_of(block): block for block in medium.blocks()}
        self._sums: dict[messages.Name, dict[int, int]] = {}  # as their writers sent them
        self._busy: Counter[messages.Name] = Counter()
        self._books = threading.Condition()

    @contextmanager
    def borrow(self, name: messages.Name) -> Generator[Reservation]:
        """The reservation, which is not freed meanwhile.

        Raises:
            NotHeldError: when there is none of this name.
        """
        with self._books:
            held = self._held.get(name)
            if held is None:
                raise NotHeldError(
                    f"{self._medium.name} has no block {name.key.hex()} of sequence {name.sequence}"
                )
            self._busy[name] += 1
        try:
            yield held
        finally:
            with self._books:
                self._busy[name] -= 1
                self._books.notify_all()

    def reserve(self, key: bytes, layer_bytes: tuple[int, ...], position: int) -> Reservation:
        """Reserve in the medium; for its errors see `Medium.reserve`."""
        with self._books:
            reservation = self._medium.reserve(key, layer_bytes, position=position)
            self._held[name_of(reservation)] = reservation
            return reservation

    def free(self, names: Sequence[messages.Name]) -> None:
        """Free once nobody reads or writes them.

        Raises:
            NotHeldError: when there is none of one of these names, or it comes twice; nothing is freed then.
            TimeoutError: when one stays in use.
        """
        with self._books:
            idle = self._books.wait_for(lambda: not any(self._busy[name] for name in names), self._patience_s)
            counted = Counter(names)
            missing = [name for name in counted if name not in self._held or counted[name] > 1]
            if missing:
                raise NotHeldError(f"{self._medium.name} has no block {missing[0].key.hex()}, or not twice")
            if not idle:
                raise TimeoutError(f"{len(names)} blocks are still being read or written")
            for name in names:  # one after the other: what the medium will not free is still held
                self._medium.free(self._held[name])
                del self._held[name], self._busy[name]
                self._sums.pop(name, None)

    def commit(self, names: Sequence[messages.Name]) -> None:
        """Commit in the medium; for its errors see `Medium.commit`."""
        with ExitStack() as stack:
            self._medium.commit(*[stack.enter_context(self.borrow(name)) for name in names])

    def places(self, asked: messages.Write, held: Reservation, payload_bytes: int) -> list[wire.Bytes]:
        """Where layers that come in are to be put: the medium itself where it is memory.

        Raises:
            NotHeldError: when the block is committed already.
            ValueError: when the layers have not so many bytes.
        """
        sizes = _sizes(asked, held)
        if wire.layers_bytes(sizes) != payload_bytes:
            raise ValueError(f"{payload_bytes} bytes are not {asked.layers} layers from {asked.first_layer} on")
        if self._arena is not None:
            return self._arena.open_layers(held, asked.first_layer, asked.layers)
        return [np.empty(size, np.uint8) for size in sizes]

    def keep(
        self,
        asked: messages.Write,
        held: Reservation,
        places: Sequence[wire.Bytes],
        sums: tuple[Sequence[int], Sequence[int]],
    ) -> None:
        """Keep layers that came in, with their checksums as they came and as they were sent.

        Raises:
            DamagedBlockError: when they are not what was sent.
        """
        came, told = sums
        if came != told:
            raise DamagedBlockError(f"layers from {asked.first_layer} on of block {held.key.hex()} came damaged")
        if self._arena is not None:
            self._arena.filled(held, first_layer=asked.first_layer, layers=len(places))
        else:
            self._medium.write(held, places, first_layer=asked.first_layer)
        with self._books:
            self._sums.setdefault(asked.name, {}).update(enumerate(told, asked.first_layer))

    def layers(
        self, asked: messages.Read, held: Reservation, most_bytes: int
    ) -> tuple[list[wire.Bytes], tuple[int, ...] | None]:
        """The layers that are asked for, and their checksums as their writer sent them, where all are known.

        Raises:
            ValueError: when there are no such layers, or they have more than `most_bytes`.

        For the other errors see `Medium.read_into`.
        """
        sizes = _sizes(asked, held)
        if sum(sizes) > most_bytes:
            raise ValueError(f"{len(sizes)} layers of {sum(sizes)} bytes in one answer; allowed are {most_bytes}")
        if self._arena is not None:
            found = self._arena.layers(held, asked.first_layer, asked.layers)
        else:
            found = [np.empty(size, np.uint8) for size in sizes]
            self._medium.read_into(held, found, first_layer=asked.first_layer)
        known = self._sums.get(asked.name, {})
        sums = [
            known[layer] for layer in range(asked.first_layer, asked.first_layer + asked.layers) if layer in known
        ]
        return found, tuple(sums) if len(sums) == len(found) else None

    def listing(self, space: bytes) -> list[Reservation]:
        """The committed blocks of a model's key space, oldest first."""
        return [block for block in self._medium.blocks() if block.key.startswith(space)]

    def room(self) -> messages.Room:
        """How large and how full the medium is."""
        return messages.Room(self._medium.capacity_bytes, self._medium.used_bytes)


def page(listing: Sequence[Reservation], after: int, prefix_bytes: int) -> messages.Page:
    """Some blocks of a listing, those after a sequence number: as many as one body may hold."""
    start = bisect_right(listing, after, key=lambda block: block.sequence)
    shown: list[messages.Reserved] = []
    size = 0
    for block in listing[start : start + messages.PAGE_BLOCKS]:
        size += len(block.key) + _MOST_INT_BYTES * (len(block.layer_bytes) + 5)
        if shown and size > wire.MOST_BODY_BYTES // 2:
            break
        shown.append(told(block, prefix_bytes))
    return messages.Page(tuple(shown), more=start + len(shown) < len(listing))


def key_space(fingerprint: bytes) -> bytes:
    """What stands before every key of a model: none begins like another, whatever the keys are."""
    return bytes([len(fingerprint)]) + fingerprint


def wire_seed(key: bytes) -> int:
    """The seed of checksums on the wire: one block's bytes never pass for another's."""
    return int.from_bytes(key[-8:], "little")


def name_of(block: Reservation) -> messages.Name:
    """What both sides call a reservation."""
    return messages.Name(block.key, block.sequence)


def told(block: Reservation, prefix_bytes: int) -> messages.Reserved:
    """A reservation as the client sees it: without its model's key space before the key."""
    return messages.Reserved(
        key=block.key[prefix_bytes:],
        layer_bytes=block.layer_bytes,
        position=block.position,
        offset_bytes=block.offset_bytes,
        sequence=block.sequence,
    )


def _sizes(asked: messages.Write | messages.Read, held: Reservation) -> tuple[int, ...]:
    stop = asked.first_layer + asked.layers
    if not 0 <= asked.first_layer < stop <= len(held.layer_bytes):
        raise ValueError(f"{asked.layers} layers from {asked.first_layer} on; there are {len(held.layer_bytes)}")
    return held.layer_bytes[asked.first_layer : stop]
