"""Extents: which bytes of a slab are free, first fit, neighbours merged."""

from bisect import bisect_left


class ExtentAllocator:
    """The free runs of a slab of `capacity_bytes`, in multiples of `alignment_bytes`.

    First fit keeps blocks of one size, the usual case, without any waste. Mutable: it is the state of a slab.
    """

    __slots__ = ("_alignment_bytes", "_capacity_bytes", "_free_bytes", "_sizes", "_starts")

    def __init__(self, capacity_bytes: int, alignment_bytes: int = 4096) -> None:
        if alignment_bytes < 1 or capacity_bytes < alignment_bytes:
            raise ValueError(
                f"a slab of {capacity_bytes} bytes aligned to {alignment_bytes};"
                " it needs room for at least one aligned run"
            )
        self._alignment_bytes = alignment_bytes
        self._capacity_bytes = capacity_bytes - capacity_bytes % alignment_bytes
        self._starts = [0]
        self._sizes = {0: self._capacity_bytes}
        self._free_bytes = self._capacity_bytes

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the slab that can be handed out."""
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes handed out."""
        return self._capacity_bytes - self._free_bytes

    def aligned(self, size_bytes: int) -> int:
        """The size rounded up to the alignment."""
        return -(-size_bytes // self._alignment_bytes) * self._alignment_bytes

    def take(self, size_bytes: int) -> int | None:
        """The start of a run of at least that size, now used; `None` when no free run is long enough."""
        size = self.aligned(size_bytes)
        for start in self._starts:
            if self._sizes[start] >= size:
                self.take_at(start, size)
                return start
        return None

    def take_at(self, start: int, size_bytes: int) -> bool:
        """Use this very run; false, and nothing changes, where it is not wholly free."""
        size = self.aligned(size_bytes)
        index = bisect_left(self._starts, start + 1) - 1
        if index < 0 or size < 1 or start % self._alignment_bytes:
            return False
        run = self._starts[index]
        run_end = run + self._sizes[run]
        if start + size > run_end:
            return False
        del self._sizes[run]
        pieces = [(run, start - run), (start + size, run_end - start - size)]
        kept = [(begin, length) for begin, length in pieces if length]
        self._starts[index : index + 1] = [begin for begin, _ in kept]
        self._sizes.update(kept)
        self._free_bytes -= size
        return True

    def give(self, start: int, size_bytes: int) -> None:
        """Free a used run and merge it with its free neighbours.

        Raises:
            ValueError: when part of it is free already, or outside the slab.
        """
        size = self.aligned(size_bytes)
        index = bisect_left(self._starts, start)
        before = self._starts[index - 1] if index else None
        after = self._starts[index] if index < len(self._starts) else None
        ends = start + size
        overlaps = before is not None and before + self._sizes[before] > start
        if overlaps or (after is not None and ends > after) or start < 0 or ends > self._capacity_bytes:
            raise ValueError(f"{size} bytes from {start} are not in use; only used runs can be freed")
        self._free_bytes += size
        if after is not None and after == ends:
            size += self._sizes.pop(after)
            del self._starts[index]
        if before is not None and before + self._sizes[before] == start:
            self._sizes[before] += size
            return
        self._starts.insert(index, start)
        self._sizes[start] = size
