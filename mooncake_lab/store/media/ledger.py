"""Which blocks of a medium are reserved and which are committed: the same books for every medium."""

from collections.abc import Iterator, Sequence

from mooncake_lab.store.media.extents import ExtentAllocator
from mooncake_lab.store.media.medium import (
    AlreadyHeldError,
    MediumFullError,
    NotHeldError,
    Reservation,
    check_block,
)


class Ledger:
    """Reservations by key over an allocator; not locked, its medium does that. Mutable: it is a medium's state."""

    __slots__ = ("_committed", "_extents", "_medium", "_missing", "_sequence")

    def __init__(self, medium: str, extents: ExtentAllocator) -> None:
        self._medium = medium
        self._extents = extents
        self._committed: dict[bytes, Reservation] = {}
        self._missing: dict[bytes, tuple[Reservation, set[int]]] = {}  # and the layers not yet written
        self._sequence = 0

    @property
    def extents(self) -> ExtentAllocator:
        """The allocator below."""
        return self._extents

    def reserve(self, key: bytes, layer_bytes: Sequence[int], position: int, footprint_bytes: int) -> Reservation:
        """Take a run of `footprint_bytes` for the block; for its errors see `Medium.reserve`."""
        check_block(key, layer_bytes)
        if key in self._committed or key in self._missing:
            raise AlreadyHeldError(f"{self._medium} holds block {key.hex()} already; one key names one content")
        offset = self._extents.take(footprint_bytes)
        if offset is None:
            free = self._extents.capacity_bytes - self._extents.used_bytes
            raise MediumFullError(
                f"{self._medium} has no run of {footprint_bytes} bytes for block {key.hex()}; {free} are free"
            )
        self._sequence += 1
        reservation = Reservation(
            key=key,
            layer_bytes=tuple(layer_bytes),
            position=position,
            offset_bytes=offset,
            sequence=self._sequence,
        )
        self._missing[key] = (reservation, set(range(len(layer_bytes))))
        return reservation

    def adopt(self, reservation: Reservation, footprint_bytes: int) -> bool:
        """Hold a block that was found on the device; false where its bytes belong to another one."""
        if reservation.key in self._committed:
            return False
        if not self._extents.take_at(reservation.offset_bytes, footprint_bytes):
            return False
        self._committed[reservation.key] = reservation
        self._sequence = max(self._sequence, reservation.sequence)
        return True

    def writable(self, reservation: Reservation) -> None:
        """Refuse what is not reserved, or is committed.

        Raises:
            NotHeldError: when it is so.
        """
        if self._missing.get(reservation.key, (None,))[0] != reservation:
            raise NotHeldError(f"{self._medium} has no open reservation for block {reservation.key.hex()}")

    def wrote(self, reservation: Reservation, first_layer: int, layers: int) -> None:
        """Note layers that were written; a reservation freed meanwhile is nobody's business any more."""
        held = self._missing.get(reservation.key)
        if held and held[0] == reservation:
            held[1].difference_update(range(first_layer, first_layer + layers))

    def complete(self, reservations: Sequence[Reservation]) -> None:
        """Refuse reservations with unwritten layers.

        Raises:
            NotHeldError: when one is not reserved.
            ValueError: when a layer is missing, or one reservation comes twice.
        """
        seen = set[Reservation]()
        for reservation in reservations:
            self.writable(reservation)
            if reservation in seen:
                raise ValueError(f"block {reservation.key.hex()} comes twice in one commit; once is allowed")
            seen.add(reservation)
            missing = self._missing[reservation.key][1]
            if missing:
                raise ValueError(
                    f"block {reservation.key.hex()} lacks layers {sorted(missing)[:8]}; all have to be written"
                )

    def commit(self, reservations: Sequence[Reservation]) -> None:
        """Hold reservations that `complete` accepted."""
        for reservation in reservations:
            self._committed[reservation.key] = self._missing.pop(reservation.key)[0]

    def readable(self, reservation: Reservation) -> None:
        """Refuse what is not committed.

        Raises:
            NotHeldError: when it is so.
        """
        if self._committed.get(reservation.key) != reservation:
            raise NotHeldError(f"{self._medium} does not hold block {reservation.key.hex()}")

    def is_committed(self, reservation: Reservation) -> bool:
        """Whether it is committed, and not freed."""
        return self._committed.get(reservation.key) == reservation

    def forget(self, reservation: Reservation) -> None:
        """Stop holding it; its bytes stay taken until they are given back to the allocator.

        Raises:
            NotHeldError: when it is neither reserved nor held.
        """
        if self.is_committed(reservation):
            del self._committed[reservation.key]
            return
        self.writable(reservation)
        del self._missing[reservation.key]

    def committed(self) -> Iterator[Reservation]:
        """The committed blocks, oldest first."""
        return iter(sorted(self._committed.values(), key=lambda block: block.sequence))

    def open(self) -> list[Reservation]:
        """The reservations that are not committed."""
        return [reservation for reservation, _ in self._missing.values()]
