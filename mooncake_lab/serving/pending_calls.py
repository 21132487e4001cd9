"""Calls of the cluster to its workers that have no answer yet: pings, a reset of the caches, a measurement."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Final, final

from mooncake_lab.serving.calibration import measuring_limit_s
from mooncake_lab.serving.launch import WorkerError
from mooncake_lab.serving.messages import Measure, Measured, Ping, ResetPrefixCache
from mooncake_lab.serving.supervisor import Supervisor
from mooncake_lab.serving.timeouts import within

_LOG: Final = logging.getLogger(__name__)

_END_S: Final = 3.0
"""How long a process may take to end after its connection."""


@final
class PendingCalls:
    """Calls to workers that have no answer yet. Mutable.

    Args:
        supervisor: of the workers.
        timeout_s: how long a worker may take to answer, except about its speed.
    """

    def __init__(self, supervisor: Supervisor, timeout_s: float) -> None:
        self._supervisor = supervisor
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)  # 0 are the pings that only have to be answered
        self._confirming: dict[str, int] = {}  # the latest ping of a worker that has to be confirmed
        self._measured: dict[str, asyncio.Future[Measured]] = {}
        self._waiting: dict[int, tuple[set[str], asyncio.Event]] = {}

    def confirm(self, names: Iterable[str]) -> None:
        """Ping workers; one that is down was reported, or will be."""
        for name in names:
            link = self._supervisor.connections.get(name)
            if link is not None:
                self._confirming[name] = next(self._numbers)
                link.send(Ping(self._confirming[name]))

    def forget(self) -> None:
        """A new run asks for no confirmation of the last one."""
        self._confirming.clear()

    async def measure(self, roles: Mapping[str, str], ssd_dir: str | None = None) -> list[Measured]:
        """Let one worker of each role time itself, one after the other while nothing else runs.

        Raises:
            WorkerError: when one ends meanwhile, with the reason, or takes too long.
            ValueError: when none could write to the SSD, and read that again.
        """
        connections, found = self._supervisor.connections, list[Measured]()
        names = {role: name for name, role in reversed(list(roles.items()))}
        for role, name in names.items():
            port = connections[names["decode"]].ready.port if role == "prefill" else None
            answer = self._measured[name] = asyncio.get_running_loop().create_future()
            link, began_s = connections[name], time.monotonic()
            link.send(Measure(port))
            limit_s = measuring_limit_s(link.ready.shape)
            try:
                found.append(await within(answer, limit_s))
            except TimeoutError:
                raise WorkerError(f"{name} did not measure its speed within {limit_s:g} s") from None
            except WorkerError as error:
                await asyncio.to_thread(link.process.wait, _END_S)  # the reason comes last
                raise WorkerError(f"{error}: {link.process.reason()}") from None
            _LOG.info("%s has timed itself in %.1f s", name, time.monotonic() - began_s)
        if ssd_dir is not None and not any(each.ssd for each in found):
            raise ValueError(f"no block could be written to {ssd_dir} and read again; serve without it")
        return found

    async def drain(self, order: type[Ping | ResetPrefixCache] = Ping) -> None:
        """Return when everything that workers have reported so far is handled, and the order is done."""
        connections = self._supervisor.connections
        if connections:
            number, everybody = next(self._numbers), asyncio.Event()
            self._waiting[number] = set(connections), everybody
            for link in connections.values():
                link.send(order(number))
            with contextlib.suppress(TimeoutError):
                await within(everybody.wait(), self._timeout_s)
            self._waiting.pop(number, None)

    def answered(self, name: str, number: int) -> bool:
        """A worker has answered a ping; whether that confirms that it is up."""
        if number not in self._waiting:
            return self._confirming.get(name) == number
        self._not_waiting(name, number)
        return False

    def measured(self, name: str, found: Measured) -> None:
        """A worker has timed itself."""
        future = self._measured.pop(name)
        if not future.done():  # else it took too long
            future.set_result(found)

    def exited(self, name: str) -> None:
        """A worker answers nothing any more."""
        for number in self._waiting:
            self._not_waiting(name, number)
        if name in self._measured:
            future = self._measured.pop(name)
            if not future.done():  # else the caller has stopped waiting
                future.set_exception(WorkerError(f"{name} ended while it was measured"))

    def _not_waiting(self, name: str, number: int) -> None:
        names, everybody = self._waiting[number]
        names.discard(name)
        if not names:
            everybody.set()
