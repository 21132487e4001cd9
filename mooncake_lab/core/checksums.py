"""Checksums of the layers of KVCache blocks, and the runs of layers that one step of a transfer takes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import xxhash


def checksums(layers: Sequence[Any], seed: int) -> list[int]:
    """The xxh3_64 of each layer, which is any contiguous memory."""
    digest = cast("Callable[[Any, int], int]", xxhash.xxh3_64_intdigest)
    return [digest(layer, seed) for layer in layers]


def layer_runs(sizes: Sequence[int], max_bytes: int) -> Iterator[slice]:
    """Runs of consecutive layers of at most `max_bytes`; a larger layer is a run of its own."""
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > max_bytes:
            yield slice(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))
