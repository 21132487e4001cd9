"""Keeps the workers of a cluster alive: gives birth to them, listens, notices silence, and replaces them.

Each worker hangs on one socket pair that only the two of them hold. It carries orders and events, it ends when
either side dies, and nobody else can connect to it; no port, file or shared memory is left behind, however a
process ends.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

import msgspec

from mooncake_lab.serving.birth import Nursery
from mooncake_lab.serving.frames import pack, receive_frame
from mooncake_lab.serving.messages import EVENTS, VERSION, Event, Forget, Order, Ping, Pong, Ready, Stop
from mooncake_lab.serving.spec import LiveSpec, WorkerSpec, worker_spec
from mooncake_lab.store.media import MediumError, ProtocolError
from mooncake_lab.store.media.mooncake_wheel import load_wheel

_LOG: Final = logging.getLogger(__name__)
_BIRTH_S: Final = 180.0
_FAREWELL_S: Final = 3.0
_PING_S: Final = 1.0
_LONGEST_STEP_S: Final = 300.0
_LONGEST_REST_S: Final = 10.0


class WorkerError(RuntimeError):
    """A worker, or the process that bears them, could not be started."""


@dataclass(slots=True, kw_only=True, eq=False)
class Link:
    """A worker as the cluster knows it. Mutable: it lives and dies."""

    ready: Ready
    writer: asyncio.StreamWriter
    heard_s: float

    def send(self, *orders: Order) -> None:
        """Say something; a worker that is gone hears nothing, and its end is noticed elsewhere."""
        if not self.writer.is_closing():
            self.writer.write(pack(orders))


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """Who is told what."""

    born: Callable[[str, Link], None]
    heard: Callable[[str, Event], None]
    died: Callable[[str, str], None]


def _check_engine() -> None:
    """Whether workers will find the Transfer Engine, before any is born."""
    try:
        load_wheel()
    except MediumError as error:
        raise WorkerError(str(error)) from error


@final
class Supervisor:
    """The processes of one cluster. Mutable: it owns them. All methods belong to one event loop.

    Args:
        spec: of the cluster.
        callbacks: told of births, events and deaths, in the order in which they come.
        nursery: where workers are born; None makes one for this cluster alone.

    Raises:
        ValueError: when the nursery is for another model.
    """

    def __init__(self, spec: LiveSpec, callbacks: Callbacks, nursery: Nursery | None = None) -> None:
        self._spec = spec
        self._callbacks = callbacks
        self._token = secrets.token_bytes(32)
        self.links: dict[str, Link] = {}
        self._owns_nursery = nursery is None
        self._nursery = nursery or Nursery(spec)
        self._nursery.check(spec)
        self._tasks: list[asyncio.Task[None]] = []
        self._all_live = asyncio.Event()
        self._failed: asyncio.Future[None] | None = None
        self._closing = False
        self._pings = 0

    async def start(self) -> None:
        """Bring all workers to life.

        Raises:
            ValueError: when the model cannot be loaded.
            WorkerError: when the workers do not start.
        """
        self._failed = asyncio.get_running_loop().create_future()
        if self._spec.transfer == "mooncake":
            await asyncio.to_thread(_check_engine)
        await asyncio.to_thread(self._nursery.open)
        self._tasks = [asyncio.create_task(self._tend(name), name=name) for name in self._spec.roles]
        self._tasks.append(asyncio.create_task(self._check_pulses(), name="pulses"))
        waiting = asyncio.create_task(self._all_live.wait())
        done, _ = await asyncio.wait(
            {waiting, self._failed}, timeout=_BIRTH_S, return_when=asyncio.FIRST_COMPLETED
        )
        waiting.cancel()
        if self._failed in done:
            await self._failed
        if not done:
            raise WorkerError(f"{len(self.links)} of {len(self._spec.roles)} workers live after {_BIRTH_S:g} s")

    async def close(self) -> None:
        """Let every worker end, and see that it did."""
        self._closing = True
        pids = [link.ready.pid for link in self.links.values()]
        for link in self.links.values():
            link.send(Stop())
        tending = [task for task in self._tasks if task.get_name() != "pulses"]
        if tending:
            await asyncio.wait(tending, timeout=_FAREWELL_S)
        for pid in pids:
            if _is_alive(pid):
                _kill(pid)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._owns_nursery:
            await asyncio.to_thread(self._nursery.close)
        for pid in pids:
            await _gone(pid)

    def kill(self, name: str) -> None:
        """Kill a worker as the system would: a fault, injected.

        Raises:
            KeyError: when no such worker lives.
        """
        _kill(self.links[name].ready.pid)

    def ask_everybody(self, order: type[Ping | Forget] = Ping) -> int:
        """Send every worker an order that it answers with a pong; the number that the pongs will carry."""
        self._pings += 1
        for link in self.links.values():
            link.send(order(self._pings))
        return self._pings

    async def _tend(self, name: str) -> None:
        """One worker after the other under the same name, until the cluster closes."""
        rest_s = 0.0
        while not self._closing:
            await asyncio.sleep(rest_s)
            began_s = time.monotonic()
            try:
                reason = await self._one_life(name)
            except (OSError, ValueError, WorkerError, TimeoutError) as error:
                reason = str(error) or type(error).__name__
            except Exception as error:  # noqa: BLE001  # our own mistake must not cost the worker
                _LOG.exception("what %s said could not be dealt with", name)
                reason = repr(error)
            if self._closing:
                return
            if not self._all_live.is_set():
                if self._failed is not None and not self._failed.done():
                    self._failed.set_exception(WorkerError(f"{name} did not start: {reason}"))
                return
            lived_s = time.monotonic() - began_s
            rest_s = 0.0 if lived_s > _LONGEST_REST_S else min(max(0.1, 2 * rest_s), _LONGEST_REST_S)
            _LOG.warning("%s died after %.1f s: %s", name, lived_s, reason)

    async def _one_life(self, name: str) -> str:
        """From birth to death; the cause of death."""
        await asyncio.to_thread(self._nursery.open)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            spec: WorkerSpec = worker_spec(self._spec, name, self._token)
            await asyncio.to_thread(self._nursery.bear, spec, theirs)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            ready = await asyncio.wait_for(receive_frame(reader), _BIRTH_S)
            if ready is None:
                raise WorkerError("it ended before it was ready")
            first = EVENTS.decode(ready)
            if not isinstance(first, Ready) or first.version != VERSION:
                raise WorkerError(f"its first words are {first}; this cluster speaks version {VERSION}")
            link = Link(ready=first, writer=writer, heard_s=time.monotonic())
            self.links[name] = link
            self._callbacks.born(name, link)
            if len(self.links) == len(self._spec.roles):
                self._all_live.set()
            return await self._listen(name, link, reader)
        finally:
            writer.close()
            if self.links.pop(name, None) is not None:
                self._callbacks.died(name, "it is gone")

    async def _listen(self, name: str, link: Link, reader: asyncio.StreamReader) -> str:
        try:
            while (body := await receive_frame(reader)) is not None:
                link.heard_s = time.monotonic()
                event = EVENTS.decode(body)
                if isinstance(event, Pong) and event.busy_s > _LONGEST_STEP_S:
                    _kill(link.ready.pid)
                self._callbacks.heard(name, event)
        except (OSError, ProtocolError, msgspec.MsgspecError) as error:
            _kill(link.ready.pid)
            return str(error)
        return "its connection ended"

    async def _check_pulses(self) -> None:
        while True:
            await asyncio.sleep(_PING_S)
            now_s = time.monotonic()
            for name, link in list(self.links.items()):
                if now_s - link.heard_s > self._spec.silence_s:
                    _LOG.warning("%s has said nothing for %.0f s", name, now_s - link.heard_s)
                    _kill(link.ready.pid)
            self.ask_everybody()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def _gone(pid: int) -> None:
    """Return when a process is no more, or after a moment in which it should have been."""
    deadline_s = time.monotonic() + _FAREWELL_S
    while _is_alive(pid) and time.monotonic() < deadline_s:  # noqa: ASYNC110  # the system sends no event
        await asyncio.sleep(0.005)
