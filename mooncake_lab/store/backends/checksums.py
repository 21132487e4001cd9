"""Checksums of layers, and how to take them on a helper thread while the device works."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from typing import cast

import xxhash

from mooncake_lab.store.backends.base import Buffer, Bytes, flat


def checksums(layers: Sequence[Bytes], seed: int) -> list[int]:
    """The xxh3_64 of each layer."""
    digest = cast("Callable[[Bytes, int], int]", xxhash.xxh3_64_intdigest)  # any buffer does
    return [digest(layer, seed) for layer in layers]


def checksum(data: Buffer, seed: int) -> int:
    """The xxh3_64 of any contiguous memory."""
    return checksums([flat(data)], seed)[0]


def checksum_seed(key: bytes) -> int:
    """The seed of a block's checksums, so that the bytes of another block never have them."""
    return int.from_bytes(key[-8:], "little")


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


def run_all(helpers: Executor, tasks: Iterable[Callable[[], None]]) -> None:
    """Run each task once, here or on a helper thread; after one that raised, no other begins.

    No task runs any more when this returns or raises, so that no thread touches buffers that were given back. If
    no helper has begun when the caller finds nothing left to do, it does not wait for one.
    """
    left = deque(tasks)
    helped = Future[None]()

    def work() -> None:
        while True:
            try:
                task = left.popleft()
            except IndexError:
                return
            try:
                task()
            except BaseException:
                left.clear()
                raise

    def help_out() -> None:
        if helped.set_running_or_notify_cancel():
            try:
                helped.set_result(work())
            except BaseException as error:  # noqa: BLE001  # the caller raises it
                helped.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the helpers were shut down
        helpers.submit(help_out)
    try:
        work()
        if not helped.cancel():
            helped.result()
    finally:
        while not (helped.cancel() or helped.done()):  # an interrupt must not leave a helper at the buffers
            with contextlib.suppress(KeyboardInterrupt):
                wait([helped])
