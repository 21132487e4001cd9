"""The store of KVCache that all prefill workers share: a process beside the workers, or one that runs elsewhere.

The process is our block server, or Mooncake's master with a provider of memory. It ends with its cluster, however
that ends, and is started again when it is gone: what it held is lost, and the workers compute it again.
"""

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from mooncake_lab.serving.launch import WorkerError, pause_before_restart_s
from mooncake_lab.serving.launch.shared_store_process import ERROR
from mooncake_lab.serving.spec import LiveOptions
from mooncake_lab.serving.timeouts import within

_LOG: Final = logging.getLogger(__name__)
_PROGRAM: Final = Path(__file__).with_name("shared_store_process.py")
_DIAL_S: Final = 5.0
_START_S: Final = 60.0
_STOP_S: Final = 3.0


@final
class SharedStoreServer:
    """The shared store of one cluster. Mutable: it may own a process. All methods belong to one event loop.

    Args:
        options: of the cluster.
        token: the secret of a block server.
        changed: told the address when the store is up, and None when it is gone.
    """

    def __init__(self, options: LiveOptions, token: bytes, changed: Callable[[str | None], None]) -> None:
        self._options = options
        self._token = token
        self._changed = changed
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self.address: str | None = None
        """HOST:PORT of the store; None while it is down."""

    async def start(self, bytes_per_token: int) -> None:
        """Return when the store is up; at once where the cluster has none.

        Raises:
            WorkerError: when it cannot be started, with the reason.
        """
        if self._options.shared_store is None:
            return
        if self._options.shared_store_address is not None:
            await _check_answers(self._options.shared_store_address)
            self._set(self._options.shared_store_address)
            return
        capacity_bytes = self._options.shared_store_tokens * bytes_per_token
        process = await self._launch(capacity_bytes)
        _LOG.info("the shared store of %d tokens is at %s", self._options.shared_store_tokens, self.address)
        self._task = asyncio.create_task(self._keep_running(process, capacity_bytes), name="shared-store")

    def kill(self) -> None:
        """Kill its process with SIGKILL: a fault, injected."""
        if self._process is not None:
            self._process.kill()

    @property
    def pid(self) -> int | None:
        """The id of its process; None where none of ours runs."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def close(self) -> None:
        """End its process, which ends by itself when its standard input does."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    async def _keep_running(self, process: asyncio.subprocess.Process | None, capacity_bytes: int) -> None:
        """Start the next process when one ends."""
        pause_s = 0.0
        while True:
            began_s = time.monotonic()
            if process is not None:
                status = await process.wait()
                self._set(None)
                _LOG.warning(
                    "the shared store is gone, with what it held: its process ended with status %d", status
                )
            pause_s = pause_before_restart_s(pause_s, time.monotonic() - began_s)
            await asyncio.sleep(pause_s)
            try:
                process = await self._launch(capacity_bytes)
            except (WorkerError, OSError) as error:
                process = None
                _LOG.warning("the shared store does not start: %s", error)

    async def _launch(self, capacity_bytes: int) -> asyncio.subprocess.Process:
        """Start a process, and wait until it is up.

        Raises:
            WorkerError: when it reports an error, ends or takes too long.
        """
        pipe = asyncio.subprocess.PIPE
        command = [
            sys.executable,
            str(_PROGRAM),
            str(os.getpid()),
            str(self._options.shared_store),
            str(capacity_bytes),
        ]
        process = self._process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, start_new_session=True
        )  # a Ctrl-C in the terminal is for the cluster, which ends its store last
        assert process.stdin is not None  # noqa: S101  # both were asked for
        assert process.stdout is not None  # noqa: S101  # likewise
        process.stdin.write(f"{self._token.hex()}\n".encode())
        line = b""
        with contextlib.suppress(TimeoutError):
            line = await within(process.stdout.readline(), _START_S)
        said = line.decode().strip()
        if not said or said.startswith(ERROR):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            status = await process.wait()
            raise WorkerError(
                f"the shared store: {said.removeprefix(ERROR) or f'its process ended with status {status}'}"
            )
        self._set(said)
        return process

    def _set(self, address: str | None) -> None:
        self.address = address
        self._changed(address)


async def _check_answers(address: str) -> None:
    """Fail where nothing listens at the address of a shared store.

    Raises:
        WorkerError: with the address and the reason.
    """
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), _DIAL_S)
    except (OSError, OverflowError, TimeoutError) as error:
        raise WorkerError(
            f"no shared store answers at {address}: {error or 'timed out'}; start it first"
        ) from None
    writer.close()
