"""Mooncake's own Transfer Engine over TCP, from the wheel (extra `mooncake`)."""

from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake_lab.store.media.medium import MediumError
from mooncake_lab.store.media.mooncake_wheel import load_wheel


def open_engine(area: npt.NDArray[np.uint8]) -> Any:
    """A Transfer Engine of this process that may read and write an area; peers meet without a directory.

    Raises:
        MediumError: when the wheel cannot be loaded, or the engine does not start.
    """
    load_wheel()  # says what is missing, and keeps its log quiet
    from mooncake.engine import TransferEngine  # pyright: ignore[reportMissingTypeStubs]

    engine: Any = TransferEngine()
    for doing, code in (
        ("start", engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")),
        ("register memory", engine.register_memory(area.ctypes.data, area.nbytes)),
    ):
        if code:
            raise MediumError(f"Mooncake's Transfer Engine cannot {doing}: code {code}")
    return engine
