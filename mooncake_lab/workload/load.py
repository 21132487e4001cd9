"""The trace of a workload, whatever this machine has: the released file, or its twin."""

from dataclasses import replace

from mooncake_lab.workload.locate import find_trace
from mooncake_lab.workload.reader import read_trace
from mooncake_lab.workload.releases import release_of
from mooncake_lab.workload.trace import Trace
from mooncake_lab.workload.twin import make_twin


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
        return make_twin(name, seed=seed)
    release.check(path)
    return replace(read_trace(path), name=name, origin="released", source=f"released {release.label} trace")
