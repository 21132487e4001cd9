"""Mooncake Store beside its own bare interface: what checksums, allocation and layers cost."""

import contextlib
import subprocess
import sys
from collections.abc import Generator
from typing import final

from mooncake_lab.bench.store_floors import Blocks, Pass
from mooncake_lab.core import MIB
from mooncake_lab.store.backends import MooncakeClient, StorageError


def segment_bytes(working_set_bytes: int) -> int:
    """What a client lends so that ours and the bare one's blocks fit beside each other."""
    return 2 * working_set_bytes + working_set_bytes // 2 + 64 * MIB


@final
class BareObjects:
    """The same blocks as plain objects, written and read in one call each: `put_from` and `get_into`.

    The layers of a block lie one behind the other in memory, which is the best case of that interface. Mutable: it
    knows which objects there are.
    """

    def __init__(self, client: MooncakeClient) -> None:
        self._client = client
        self._names: list[str] = []

    def passes(self, source: Blocks, target: Blocks) -> tuple[Pass, Pass]:
        """Write every block, read every block."""
        return lambda: self._write(source), lambda: self._read(target)

    def clear(self) -> None:
        """Remove every block."""
        self._client.api.batch_remove(self._names, force=True)
        self._names.clear()

    def _write(self, source: Blocks) -> None:
        for number, layers in enumerate(source):
            name = f"bare/{number}"
            size = sum(layer.nbytes for layer in layers)
            _check(self._client.api.put_from(name, layers[0].ctypes.data, size))
            self._names.append(name)

    def _read(self, target: Blocks) -> None:
        for name, layers in zip(self._names, target, strict=True):
            size = sum(layer.nbytes for layer in layers)
            _check(self._client.api.get_into(name, layers[0].ctypes.data, size))


def _check(code: int) -> None:
    if code < 0:
        raise StorageError(f"Mooncake's bare interface fails: code {code}")


@contextlib.contextmanager
def provider(master: str, lent_bytes: int) -> Generator[None]:
    """Another process of this machine that lends a Mooncake Store its memory."""
    command = [sys.executable, "-m", "mooncake_lab.bench.store_mooncake", master, str(lent_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603  # our own
        assert process.stdin is not None  # noqa: S101  # both were asked for
        assert process.stdout is not None  # noqa: S101  # likewise
        process.stdout.readline()
        try:
            yield
        finally:
            process.stdin.close()


def main(master: str, lent_bytes: int) -> None:
    """Lend memory until stdin closes."""
    with MooncakeClient(master, lent_bytes):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
