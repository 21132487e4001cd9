"""Storage backends for the bytes of KVCache: DRAM, SSD, a remote node, Mooncake Store; one contract for all."""

from mooncake_lab.core.extras import naming_extra

with naming_extra("stats"):
    from mooncake_lab.store.backends.base import (
        BlockExistsError,
        BlockNotFoundError,
        Buffer,
        DamagedBlockError,
        FolderInUseError,
        Reservation,
        StorageBackend,
        StorageError,
        StorageFullError,
        SuspectBlockError,
    )
    from mooncake_lab.store.backends.dram import DramBackend
    from mooncake_lab.store.backends.mooncake import MooncakeClient, MooncakeStore
    from mooncake_lab.store.backends.remote import RemoteBackend
    from mooncake_lab.store.backends.remote_server import BlockServer
    from mooncake_lab.store.backends.ssd import SsdBackend

__all__ = [
    "BlockExistsError",
    "BlockNotFoundError",
    "BlockServer",
    "Buffer",
    "DamagedBlockError",
    "DramBackend",
    "FolderInUseError",
    "MooncakeClient",
    "MooncakeStore",
    "RemoteBackend",
    "Reservation",
    "SsdBackend",
    "StorageBackend",
    "StorageError",
    "StorageFullError",
    "SuspectBlockError",
]
