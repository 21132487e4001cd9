"""For measuring layer-wise prefill: an engine for whole prompts, and media that are removed afterwards."""

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from mooncake_lab.engine.loop import EngineSettings
from mooncake_lab.engine.model import LlamaModel
from mooncake_lab.engine.roles import PrefillEngine
from mooncake_lab.store.backends import DramBackend, RemoteBackend, SsdBackend, StorageBackend

Lent = tuple[StorageBackend, Callable[[], None]]
"""A medium, and what makes its next read as slow as a first one."""


@contextlib.contextmanager
def _dram(_folder: Path, room_bytes: int) -> Generator[Lent]:
    medium = DramBackend(room_bytes)
    try:
        yield medium, lambda: None
    finally:
        medium.close()


@contextlib.contextmanager
def _ssd(folder: Path, room_bytes: int) -> Generator[Lent]:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        medium = SsdBackend(Path(scratch), room_bytes, fingerprint=b"layerwise")
        try:
            yield medium, lambda: forget_pages(Path(scratch) / b"layerwise".hex() / "slab")
        finally:
            medium.close()


@contextlib.contextmanager
def _tcp(_folder: Path, room_bytes: int) -> Generator[Lent]:
    """Another process of this machine lends its memory."""
    token = secrets.token_bytes(32)
    with arena_peer(room_bytes, token) as port:
        medium = RemoteBackend(("127.0.0.1", port), token, fingerprint=b"layerwise", name="tcp")
        try:
            yield medium, lambda: None
        finally:
            medium.close()


LAYERWISE_MEDIA: Final[Mapping[str, Callable[[Path, int], contextlib.AbstractContextManager[Lent]]]] = (
    MappingProxyType({"dram": _dram, "ssd": _ssd, "tcp": _tcp})
)
"""Backends by name: made in a folder with a capacity. SSD is read cold: the page cache drops it first."""


def prefill_engine(model: LlamaModel, longest: int) -> PrefillEngine:
    """An engine that takes prompts of up to `longest` tokens whole, and has space to keep some."""
    room = EngineSettings(cache_blocks=4 * -(-longest // 16), max_batch_tokens=longest, keep_log=False)
    return PrefillEngine(model, room)


def forget_pages(path: Path) -> None:
    """Ask the page cache to drop a file; what is not yet on the device stays."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def peer_process(command: Sequence[str], told: str = "") -> Generator[str]:
    """A Python process that is told a line and serves until its stdin closes; the line that it prints first."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, *command], stdin=pipe, stdout=pipe, text=True) as peer:  # noqa: S603  # our own
        assert peer.stdin is not None  # noqa: S101  # both were asked for
        assert peer.stdout is not None  # noqa: S101  # likewise
        peer.stdin.write(told + "\n")
        peer.stdin.flush()
        try:
            yield peer.stdout.readline()
        finally:
            peer.stdin.close()


@contextlib.contextmanager
def arena_peer(arena_bytes: int, token: bytes) -> Generator[int]:
    """A process that lends an arena; its port."""
    with peer_process(["-m", "mooncake_lab.bench.media_peer", str(arena_bytes)], token.hex()) as port:
        yield int(port)
