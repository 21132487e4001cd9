"""The trace of a workload: the released file if it is found, else its twin; or a file given by its path."""

from pathlib import Path

from mooncake_lab.workload.locate import find_trace
from mooncake_lab.workload.reader import read_trace
from mooncake_lab.workload.releases import RELEASES, release_of
from mooncake_lab.workload.trace import Trace


def load(name: str, *, seed: int = 0) -> Trace:
    """The released trace if the search order finds it, else the twin; `origin` and `source` say which.

    Args:
        name: a workload name.
        seed: of the twin; the released trace does not depend on it.

    Raises:
        ValueError: when the workload is unknown, or a file of its name is not the released one.
        OSError: when the file cannot be read.
    """
    release = release_of(name)
    path = find_trace(name)
    if path is None:
        from mooncake_lab.workload.twin import make_twin  # here, because twins are drawn with numpy

        return make_twin(name, seed=seed)
    release.check(path)
    return read_trace(path).replaced(name=name, origin="released", source=f"released {release.label} trace")


def load_or_read(name: str, *, seed: int = 0) -> Trace:
    """`load` for the name of a workload; for the path of any other trace, that file.

    Raises:
        ValueError: when it is neither, or the file is not a trace.
        OSError: when the file cannot be read.
    """
    check_workload(name)
    return load(name, seed=seed) if name in RELEASES else read_trace(Path(name))


def check_workload(name: str) -> None:
    """Check that `load_or_read` has something to read.

    Raises:
        ValueError: when the name is neither that of a workload nor the path of a file.
    """
    if name not in RELEASES and not Path(name).is_file():
        raise ValueError(f"{name!r} is neither a file nor a workload: {', '.join(RELEASES)}")
