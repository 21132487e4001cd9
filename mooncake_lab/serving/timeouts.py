"""Time limits in which only the time counts that this process had.

A process that is stopped, throttled or busy with one callback reads nothing meanwhile. What others send in this
time waits in the buffers of its sockets, and asyncio may run the timers that are due before it reads them. So time
here advances in ticks. A tick counts for its own length, however late its timer runs. A limit is over only when
all is read that has arrived by then.
"""

import asyncio
from collections.abc import Awaitable, Container
from typing import Final, TypeVar, final

TICK_S: Final = 0.25
_PASSES: Final = 4
"""Passes of an event loop after which the reader of a stream has what waited in its socket."""
_Result = TypeVar("_Result")


async def read_what_waits() -> None:
    """Return when what had arrived before the call is read and handled."""
    for _ in range(_PASSES):
        await asyncio.sleep(0)


async def tick(seconds: float = TICK_S) -> None:
    """Sleep for a tick, and read what waits."""
    await asyncio.sleep(seconds)
    await read_what_waits()


async def within(work: Awaitable[_Result], limit_s: float) -> _Result:
    """What the work gives, if it is done in time.

    Raises:
        TimeoutError: when it is not; it is cancelled then.
    """
    task, left_s = asyncio.ensure_future(work), limit_s
    try:
        while left_s > 0 and not task.done():
            seconds = min(TICK_S, left_s)
            waiting = asyncio.ensure_future(tick(seconds))
            try:
                await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
                left_s -= seconds if waiting.done() else 0.0
            finally:
                waiting.cancel()
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()


@final
class Timers:
    """Times that have yet to pass for requests, by their ids. Mutable."""

    def __init__(self) -> None:
        self._left_s: dict[int, float] = {}

    def set(self, request_id: int, seconds: float) -> None:
        """Begin the time of a request, instead of one that has begun before."""
        self._left_s[request_id] = seconds

    def passed(self, seconds: float, requests: Container[int]) -> list[int]:
        """The requests, of those that are left, whose times are over after these seconds."""
        left_s = {id_: left_s - seconds for id_, left_s in self._left_s.items() if id_ in requests}
        self._left_s = {id_: each_s for id_, each_s in left_s.items() if each_s > 0}
        return [id_ for id_, each_s in left_s.items() if each_s <= 0]
