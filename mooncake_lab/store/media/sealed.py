"""Blocks in a slab: layers written and read while their checksums are taken, a sealed header in front of them."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import accumulate
from typing import Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from mooncake_lab.store.media.beside import beside, shared
from mooncake_lab.store.media.medium import DamagedBlockError, Reservation
from mooncake_lab.store.media.record import Record, checksums, header_pages, layer_offset, padded, record_of, runs
from mooncake_lab.store.media.slab import Slab

_HELPERS: Final = 4
_ALONE_BYTES: Final = 512 * 1024
"""Up to here, a helper thread takes longer to wake up than it saves."""
_RUN_BYTES: Final = 512 * 1024
"""Layers that are read at once, before their checksums are taken."""
_ALONE_PIECES: Final = 4
"""So many runs are read by the caller alone, for the same reason."""
_Piece: TypeAlias = tuple[Sequence[npt.NDArray[np.uint8]], int, int]
"""Layers to fill, the number of the first one, and where they begin in the slab."""


@final
class SealedBlocks:
    """The blocks of one model in a slab; which of them count, its medium knows.

    The processor takes checksums while the device works: a helper thread does one part of a block, the caller the
    other. Mutable: it owns threads.
    """

    __slots__ = ("_helpers", "_seed", "_slab")

    def __init__(self, slab: Slab, seed: int) -> None:
        self._slab = slab
        self._seed = seed
        self._helpers = ThreadPoolExecutor(_HELPERS, thread_name_prefix="ssd")

    def write_whole(self, reservation: Reservation, arrays: Sequence[npt.NDArray[np.uint8]]) -> list[int]:
        """Write a block with its header; the checksum of each layer.

        A helper takes checksums, then writes the header and the first layers in one piece; the others are written
        meanwhile. A header whose layers are not all there yet is worth nothing: recovery compares every layer.

        Raises:
            OSError: when the device refuses.
        """
        if reservation.size_bytes <= _ALONE_BYTES:
            return self._write_headed(reservation, arrays, len(arrays))
        cut = len(arrays) // 4
        sums, _ = beside(
            self._helpers,
            lambda: self._write_headed(reservation, arrays, cut),
            lambda: self._slab.write(layer_offset(reservation, cut), arrays[cut:]),
        )
        return sums

    def write_layers(
        self, reservation: Reservation, arrays: Sequence[npt.NDArray[np.uint8]], first_layer: int
    ) -> list[int]:
        """Write layers without a header; the checksum of each.

        Raises:
            OSError: when the device refuses.
        """
        start = layer_offset(reservation, first_layer)
        if sum([array.nbytes for array in arrays]) <= _ALONE_BYTES:
            self._slab.write(start, arrays)
            return checksums(arrays, self._seed)
        sums, _ = beside(
            self._helpers, lambda: checksums(arrays, self._seed), lambda: self._slab.write(start, arrays)
        )
        return sums

    def read(
        self,
        reservation: Reservation,
        arrays: Sequence[npt.NDArray[np.uint8]],
        first_layer: int,
        sums: Sequence[int],
    ) -> None:
        """Fill layers together with a helper, and compare them with the checksums of the whole block.

        Raises:
            OSError: when the device refuses.
            DamagedBlockError: when the bytes are not those that were written.
        """
        start = layer_offset(reservation, first_layer)
        stop = first_layer + len(arrays)
        sizes = reservation.layer_bytes[first_layer:stop]
        pieces = [(arrays[run], first_layer + run.start, start + offset) for run, offset in _runs(sizes)]
        if len(pieces) > _ALONE_PIECES:
            shared(self._helpers, [partial(self._read, reservation, [piece], sums) for piece in pieces])
        else:
            self._read(reservation, pieces, sums)

    def write_header(self, record: Record) -> None:
        """Write the header of a block whose layers came one by one.

        Raises:
            OSError: when the device refuses.
        """
        self._slab.write(record.offset_bytes, [header_pages(record, self._seed)])

    def close(self) -> None:
        """Let the threads go."""
        self._helpers.shutdown()

    def _write_headed(
        self, reservation: Reservation, arrays: Sequence[npt.NDArray[np.uint8]], layers: int
    ) -> list[int]:
        """The checksums of a whole block, once its header and its first layers are written."""
        sums = checksums(arrays, self._seed)
        header = header_pages(record_of(reservation, sums), self._seed)
        self._slab.write(reservation.offset_bytes, [header, *arrays[:layers]])
        return sums

    def _read(self, reservation: Reservation, pieces: Sequence[_Piece], sums: Sequence[int]) -> None:
        """Read pieces, and take the checksums of each while it is in the processor's cache."""
        with self._slab.reading() as fill:
            for arrays, first_layer, start in pieces:
                fill(start, arrays)
                for layer, found in enumerate(checksums(arrays, self._seed), first_layer):
                    if found != sums[layer]:
                        raise DamagedBlockError(
                            f"layer {layer} of block {reservation.key.hex()} in {self._slab.path}"
                            " is not what was written"
                        )


@lru_cache
def _runs(sizes: tuple[int, ...]) -> tuple[tuple[slice, int], ...]:
    """Layers of these sizes in runs that are read at once, and where each run begins behind the first."""
    begins = list(accumulate(map(padded, sizes), initial=0))
    return tuple((run, begins[run.start]) for run in runs(sizes, _RUN_BYTES))
