"""For measuring layer-wise prefill: an engine for whole prompts, and media that are removed afterwards."""

import contextlib
import secrets
import tempfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from mooncake_lab.bench.store import arena_peer
from mooncake_lab.bench.store_floors import forget_pages
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
    with arena_peer(room_bytes, token) as (port, _):
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
