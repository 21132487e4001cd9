"""How large the SSD folders of a cluster are, and whether they can be used."""

import shutil
from pathlib import Path
from typing import Final

from mooncake_lab.cluster import ClusterSpec, PrefillPool
from mooncake_lab.engine.kv_layout import KVLayout
from mooncake_lab.engine.loading import layout_of
from mooncake_lab.serving.spec import LiveOptions
from mooncake_lab.store.backends import StorageFullError
from mooncake_lab.store.backends.ssd import missing_bytes
from mooncake_lab.store.backends.ssd_slab import extent_bytes

KEY_BYTES: Final = 32
"""Of the key of a block."""


def ssd_bytes(tokens: int, layout: KVLayout) -> int:
    """The size of a slab for so many tokens."""
    return max(1, tokens // layout.block_tokens) * extent_bytes(bytes(KEY_BYTES), layout.block_bytes)


def check_ssd(spec: ClusterSpec, options: LiveOptions) -> None:
    """Refuse SSD folders that another process uses, or that do not fit on their disk, before any model is loaded.

    Raises:
        StorageError: when another process has one open, or too few bytes are free.
        OSError: when one cannot be made, or the model has no readable configuration.
        ValueError: likewise.
    """
    if options.ssd_dir is None:
        return
    folder = Path(options.ssd_dir)
    layout = layout_of(options.model, options.device, options.dtype, block_tokens=spec.block_size_tokens)
    pool = spec.pools[0]
    assert isinstance(pool, PrefillPool)  # noqa: S101  # `check_live` has refused an SSD for others
    wanted = ssd_bytes(pool.ssd_tokens, layout)
    names = [name for name, role in spec.roles.items() if role == "prefill"]
    missing = sum(missing_bytes(folder / name, wanted) for name in names)
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise StorageFullError(
            f"{folder} needs {missing} more bytes for the ssd_tokens {pool.ssd_tokens} of {len(names)} prefill"
            f" workers, and {free} are free there"
        )
