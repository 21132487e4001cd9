"""Mooncake's own wheel (extra `mooncake`): loaded where it can be, a sentence where it cannot, and kept quiet."""

import ctypes
import importlib
import os
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mooncake_lab.store.media.medium import MediumError

_INSTALL: Final = "apt-get install -y libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1 libcurl4"
_NOTHING: Final = 4
"""Above glog's gravest level, FATAL = 3."""


def load_wheel() -> Any:
    """The module `mooncake.store`. It logs nothing, unless MC_LOG_LEVEL asks for more than ERROR.

    Raises:
        MediumError: when the wheel or a system library of its is missing, saying how to install it.
    """
    level = os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    was_loaded = "mooncake.store" in sys.modules
    try:
        module = importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise MediumError(
            "Mooncake Store needs its wheel, which has Linux builds for Python 3.11 and 3.12:"
            " pip install 'mooncake-lab[mooncake]'"
        ) from error
    except ImportError as error:
        raise MediumError(
            f"Mooncake's wheel finds a system library missing ({error}); on Debian or Ubuntu: {_INSTALL}"
        ) from error
    if level == "ERROR" and not was_loaded:
        _silence(_package())
    return module


def master_binary() -> Path:
    """The `mooncake_master` of the wheel."""
    return _package() / "mooncake_master"


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


def _package() -> Path:
    """The folder of the wheel's package; loading it alone needs no system library."""
    return Path(str(importlib.import_module("mooncake").__file__)).parent


def _silence(package: Path) -> None:
    """Let the wheel's glog write neither to stderr nor to files; Mooncake has no setting that does it."""
    for path in package.parent.glob("mooncake_transfer_engine*.libs/libglog*"):
        glog = ctypes.CDLL(str(path))
        glog["_ZN6google17InitGoogleLoggingEPKc"](b"mooncake")
        for level in range(_NOTHING):
            glog["_ZN6google17SetLogDestinationEiPKc"](level, b"")
        ctypes.c_int32.in_dll(glog, "_ZN3fLI21FLAGS_stderrthresholdE").value = _NOTHING
