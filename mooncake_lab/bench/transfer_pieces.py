"""What both sides of a transfer agree on: the pieces it is cut into."""

from typing import Final

LEAST_BYTES: Final = 128 * 1024
"""No piece is smaller (FAST'25 §5.4.1: a granularity of at least 128 KB)."""
MOST_PIECES: Final = 64
"""So many pieces may be under way at a time (FAST'25 §5.4.1: a concurrency of 64)."""


def pieces_of(size_bytes: int) -> list[slice]:
    """Equal pieces of a transfer, as many as the paper's setting allows; the last may be longer."""
    count = min(MOST_PIECES, max(1, size_bytes // LEAST_BYTES))
    step = size_bytes // count
    return [slice(i * step, size_bytes if i == count - 1 else (i + 1) * step) for i in range(count)]
