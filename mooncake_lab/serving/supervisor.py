"""Starts the workers of a cluster, receives their messages, and replaces those that are silent or gone.

Each worker has one socket pair with its cluster. It carries orders and reports, it ends when either side ends, and
no other process can connect to it; no port, file or shared memory is left behind, however a process ends.
"""

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

import msgspec

from mooncake_lab.cluster import SHARED_STORE, ClusterSpec
from mooncake_lab.net.frames import ProtocolError
from mooncake_lab.net.mooncake_wheel import MooncakeError, load_wheel
from mooncake_lab.serving import messages
from mooncake_lab.serving.launch import LaunchedWorker, Launcher, WorkerError, pause_before_restart_s
from mooncake_lab.serving.launch.local import WorkerProcesses
from mooncake_lab.serving.launch.shared_store import SharedStoreServer
from mooncake_lab.serving.spec import LiveOptions, worker_spec
from mooncake_lab.serving.ssd_space import check_ssd
from mooncake_lab.serving.timeouts import tick, within
from mooncake_lab.store.backends import StorageError

_LOG: Final = logging.getLogger(__name__)
_STOP_S: Final = 3.0
_SLOWEST_SSD_BYTES_PER_S: Final = 50e6
"""A slow network disk; an SSD writes ten times as fast."""
_MOST_SAVING_S: Final = 120.0
"""A worker that hangs while it saves answers pings and is waited for as long."""
_PING_S: Final = 1.0
_LONGEST_STEP_S: Final = 300.0


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerConnection:
    """A worker as the cluster knows it. Mutable: it is heard from, and ends."""

    ready: messages.Ready
    process: LaunchedWorker
    writer: asyncio.StreamWriter
    heard_s: float

    def send(self, *orders: messages.Order) -> None:
        """Send orders; to a worker that is gone nothing is sent, and its end is noticed elsewhere."""
        if not self.writer.is_closing():
            self.writer.write(messages.pack(orders))


@final
class Supervisor:
    """The processes of one cluster. Mutable: it owns them. All methods belong to one event loop.

    Args:
        spec: of the cluster.
        options: likewise.
        launcher: where workers come from; None starts processes for this cluster alone.
        worker_up: called when a worker is ready.
        heard: called with each message of a worker, in the order in which they come.
        worker_exit: called when a worker is gone.
        shared_store_gone: called when the shared store is.
        time_passes: called about once a second, with the time that this process had since the last call (s).
    """

    ready: messages.Ready
    """What the latest worker to come up said of itself."""

    def __init__(
        self,
        spec: ClusterSpec,
        options: LiveOptions,
        launcher: Launcher | None = None,
        *,
        worker_up: Callable[[str, WorkerConnection], None],
        heard: Callable[[str, messages.WorkerMessage], None],
        worker_exit: Callable[[str], None],
        shared_store_gone: Callable[[], None],
        time_passes: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._options = options
        self._spec = spec
        self._roles = spec.roles
        self._worker_up, self._heard = worker_up, heard
        self._worker_exit, self._shared_store_gone, self._time_passes = worker_exit, shared_store_gone, time_passes
        self._token = secrets.token_bytes(32)
        self.connections: dict[str, WorkerConnection] = {}
        self.shared_store = SharedStoreServer(options, self._token, self._shared_store_changed)
        self._owns_launcher = launcher is None
        self._launcher = launcher or WorkerProcesses(options)
        self._tasks: list[asyncio.Task[None]] = []
        self._all_ready: asyncio.Future[None] | None = None
        self._closing = False

    async def start(self) -> None:
        """Start all workers, at the same time, and return when they are ready.

        Raises:
            WorkerError: when a worker does not start, with the reason.
        """
        options, roles, began_s = self._options, self._roles, time.monotonic()
        self._all_ready = asyncio.get_running_loop().create_future()
        if "mooncake" in {options.transfer, options.shared_store}:
            try:
                await asyncio.to_thread(load_wheel)
            except MooncakeError as error:
                raise WorkerError(str(error)) from error
        try:
            check_ssd(self._spec, options)
        except (StorageError, OSError, ValueError) as error:
            raise WorkerError(f"the SSD cannot be used: {error}") from error
        who = ", ".join(roles)
        _LOG.info("starting %s: each loads %s with %d threads", who, options.model, options.threads)
        self._tasks = [asyncio.create_task(self._keep_running(name), name=name) for name in roles]
        self._tasks.append(asyncio.create_task(self._check_pulses(), name="pulses"))
        await self._all_ready
        await self.shared_store.start(self.ready.shape.kv_bytes_per_token)
        _LOG.info("%d workers are ready after %.1f s", len(roles), time.monotonic() - began_s)

    def keep_spares(self) -> None:
        """From now on prepare processes in the background that replace workers."""
        self._launcher.keep_spares()

    async def close(self) -> None:
        """Stop every worker, and see that it did stop."""
        self._closing = True
        told = dict(self.connections)
        for worker in told.values():
            worker.send(messages.Shutdown())
        running = [task for task in self._tasks if task.get_name() != "pulses"]
        if running:
            await asyncio.wait(running, timeout=_STOP_S)
            await self._wait_for_ssd([task for task in running if task.get_name() in told])
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.shared_store.close()
        if self._owns_launcher:
            await asyncio.to_thread(self._launcher.close)
            return
        for worker in told.values():
            if not await asyncio.to_thread(worker.process.wait, _STOP_S):
                worker.process.kill()

    async def _wait_for_ssd(self, running: list[asyncio.Task[None]]) -> None:
        """Let prefill workers save on their SSDs what their DRAM holds; what is not saved in time is lost."""
        saving = [task for task in running if not task.done() and self._roles[task.get_name()] == "prefill"]
        if self._options.ssd_dir is None or not saving:
            return
        names = ", ".join(task.get_name() for task in saving)
        tokens = worker_spec(self._spec, self._options, saving[0].get_name(), self._token).cache_tokens
        limit_s = tokens * self.ready.shape.kv_bytes_per_token / _SLOWEST_SSD_BYTES_PER_S
        limit_s = min(limit_s, _MOST_SAVING_S)
        _LOG.info("waiting up to %.0f s for %s to save KVCache on the SSD", limit_s, names)
        _, late = await asyncio.wait(saving, timeout=limit_s)
        for task in late:
            lost = "what it has not saved on the SSD is lost"
            _LOG.warning("%s is killed after %.0f s more: %s", task.get_name(), limit_s, lost)

    def kill(self, name: str) -> None:
        """Kill a worker with SIGKILL: a fault, injected.

        Raises:
            KeyError: when no such worker runs, nor a shared store of ours by this name.
        """
        if name == SHARED_STORE and self.shared_store.pid is not None:
            self.shared_store.kill()
        else:
            self.connections[name].process.kill()

    def _shared_store_changed(self, address: str | None) -> None:
        """Prefill workers use the shared store that is up now."""
        for name, worker in self.connections.items():
            if self._roles[name] == "prefill":
                worker.send(messages.UseSharedStore(address))
        if address is None:
            self._shared_store_gone()

    async def _keep_running(self, name: str) -> None:
        """One process after the other for a worker of this name, until the cluster closes."""
        pause_s, all_ready = 0.0, self._all_ready
        assert all_ready is not None  # noqa: S101  # the cluster has begun to start
        while not self._closing:
            await asyncio.sleep(pause_s)
            began_s = time.monotonic()
            try:
                reason = await self._run(name)
            except (OSError, ValueError, WorkerError, TimeoutError) as error:
                reason = str(error) or type(error).__name__
            except Exception as error:  # noqa: BLE001  # our own mistake must not cost the worker
                _LOG.exception("a message of %s could not be handled", name)
                reason = repr(error)
            if self._closing:
                return
            if not all_ready.done():
                all_ready.set_exception(WorkerError(f"{name} did not start: {reason}"))
            if all_ready.cancelled() or all_ready.exception() is not None:
                return
            ran_s = time.monotonic() - began_s
            pause_s = pause_before_restart_s(pause_s, ran_s)
            _LOG.warning("%s is gone after %.1f s: %s", name, ran_s, reason)

    async def _run(self, name: str) -> str:
        """One process of a worker, from its start to its end; why it ended."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                spec = worker_spec(self._spec, self._options, name, self._token)
                process = await asyncio.to_thread(self._launcher.launch, spec, theirs)
            except BaseException:
                ours.close()
                raise
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            ready = await self._first_message(reader, process)
            worker = WorkerConnection(ready=ready, process=process, writer=writer, heard_s=time.monotonic())
            self.connections[name], self.ready = worker, ready
            if self._roles[name] == "prefill" and self.shared_store.address is not None:
                worker.send(messages.UseSharedStore(self.shared_store.address))
            self._worker_up(name, worker)
            if len(self.connections) == len(self._roles) and self._all_ready and not self._all_ready.done():
                self._all_ready.set_result(None)
            problem = await self._listen(name, worker, reader)
        except BaseException:
            process.kill()
            raise
        finally:
            writer.close()
            if self.connections.pop(name, None) is not None:
                self._worker_exit(name)
        if problem:
            process.kill()
            return problem
        await asyncio.to_thread(process.wait, _STOP_S)
        return process.reason()

    async def _first_message(self, reader: asyncio.StreamReader, process: LaunchedWorker) -> messages.Ready:
        """A worker begins with its version, name and address.

        Raises:
            WorkerError: when it begins with something else, ends before that, or takes too long.
        """
        limit_s = self._options.start_timeout_s
        try:
            body = await within(messages.receive_frame(reader), limit_s)
        except TimeoutError:
            raise WorkerError(f"it was not ready within {limit_s:g} s: {process.reason()}") from None
        if body is None:
            await asyncio.to_thread(process.wait, _STOP_S)
            raise WorkerError(process.reason())
        first = messages.WORKER_MESSAGES.decode(body)
        if not isinstance(first, messages.Ready) or first.version != messages.VERSION:
            raise WorkerError(f"its first message is {first}; this cluster speaks version {messages.VERSION}")
        return first

    async def _listen(self, name: str, worker: WorkerConnection, reader: asyncio.StreamReader) -> str:
        """Pass on messages until the connection ends; what is wrong with the worker, empty if it just ended."""
        try:
            while (body := await messages.receive_frame(reader)) is not None:
                worker.heard_s = time.monotonic()
                message = messages.WORKER_MESSAGES.decode(body)
                if isinstance(message, messages.Pong) and message.busy_s > _LONGEST_STEP_S:
                    return f"one iteration took more than {_LONGEST_STEP_S:g} s"
                self._heard(name, message)
        except ConnectionResetError:  # killed in the middle of a frame
            return ""
        except (OSError, ProtocolError, msgspec.MsgspecError) as error:
            return str(error)
        return ""

    async def _check_pulses(self) -> None:
        """Ping every worker now and then, and kill one that has been silent for too long.

        While this process itself did not run (it was stopped, or the machine is overloaded), it sent no pings and
        read nothing: that time does not count as silence.
        """
        while True:
            began_s = time.monotonic()
            await tick(_PING_S)
            now_s = time.monotonic()
            for name, worker in list(self.connections.items()):
                worker.heard_s = min(now_s, worker.heard_s + now_s - began_s - _PING_S)
                if now_s - worker.heard_s > self._options.heartbeat_timeout_s:
                    _LOG.warning("%s has sent nothing for %.0f s", name, now_s - worker.heard_s)
                    worker.process.kill()
                worker.send(messages.Ping(0))
            self._time_passes(_PING_S)
