"""The released traces, for tests that want reality; where a machine has none, those tests are skipped."""

import pytest

from mooncake_lab.workload import Trace, find_trace, load


@pytest.fixture(scope="session", params=["conversation", "synthetic"])
def released(request) -> Trace:
    """A released trace."""
    if find_trace(request.param) is None:
        pytest.skip(f"the released {request.param} trace is not on this machine; `make traces` fetches it")
    return load(request.param)
