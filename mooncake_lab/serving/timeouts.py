"""Time limits in which only the time counts that this process had.

A process that is stopped, throttled or busy with one callback reads nothing meanwhile. What others send in this
time waits in the buffers of its sockets, and asyncio may run the timers that are due before it reads them. So time
here advances in ticks, each of which counts for at most twice its length, and a limit is only over when what has
arrived by then is read.
"""

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

TICK_S: Final = 0.25
_PASSES: Final = 4
"""Passes of an event loop after which the reader of a stream has what waited in its socket."""
_Result = TypeVar("_Result")


async def read_what_waits() -> None:
    """Return when what had arrived before the call is read and handled."""
    for _ in range(_PASSES):
        await asyncio.sleep(0)


async def tick(seconds: float = TICK_S) -> float:
    """Sleep for a tick, and read what waits; how much of the time counts (s)."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await asyncio.sleep(seconds)
    slept_s = loop.time() - began_s
    await read_what_waits()
    return min(slept_s, 2 * seconds)


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
                left_s -= waiting.result() if waiting.done() else 0.0
            finally:
                waiting.cancel()
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()
