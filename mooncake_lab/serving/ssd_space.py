"""How large the SSD folders of a cluster are, and whether they can be used."""

import ctypes
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mooncake_lab.cluster import ClusterSpec, PrefillPool
from mooncake_lab.engine import check_model
from mooncake_lab.engine.config import NUMBER_BYTES
from mooncake_lab.serving.spec import LiveOptions
from mooncake_lab.store.backends import StorageFullError
from mooncake_lab.store.backends.ssd import missing_bytes
from mooncake_lab.store.backends.ssd_slab import extent_bytes

KEY_BYTES: Final = 32
"""Size of the key of a block."""


def ssd_bytes(tokens: int, block_tokens: int, block_bytes: Sequence[int]) -> int:
    """The size of a slab for these tokens, in blocks of this size in each layer."""
    return max(1, tokens // block_tokens) * extent_bytes(bytes(KEY_BYTES), tuple(block_bytes))


def check_ssd(spec: ClusterSpec, options: LiveOptions) -> None:
    """Refuse SSD folders that another process uses, or that do not fit on their disk, before any model is loaded.

    Raises:
        StorageError: when another process has one open, or too few bytes are free.
        OSError: when one cannot be made, or the model has no readable configuration.
        ValueError: likewise.
    """
    if options.ssd_dir is None:
        return
    folder, config = Path(options.ssd_dir), check_model(options.model)
    pool, block = spec.pools[0], spec.block_size_tokens
    assert isinstance(pool, PrefillPool)  # noqa: S101  # `check_live` has refused an SSD for others
    layer_bytes = 2 * block * config.kv_width * NUMBER_BYTES[options.dtype or _usual_dtype(options.device)]
    wanted = ssd_bytes(pool.ssd_tokens, block, [layer_bytes] * config.layers)
    names = [name for name, role in spec.roles.items() if role == "prefill"]
    missing = sum(missing_bytes(folder / name, wanted) for name in names)
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise StorageFullError(
            f"{folder} needs {missing} more bytes for the ssd_tokens {pool.ssd_tokens} of {len(names)} prefill"
            f" workers, and {free} are free there"
        )


def _usual_dtype(device: str) -> str:
    """The type of numbers that workers take on a device unless they are told one (see `engine.load_model`)."""
    if device == "cpu" or (device == "auto" and not _has_gpu_driver()):
        return "float32"
    if device == "auto":
        import torch  # takes seconds to import

        return "bfloat16" if torch.cuda.is_available() else "float32"
    return "bfloat16"


def _has_gpu_driver() -> bool:
    """Whether the library is there without which torch finds no GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
