"""What every test shares: hypothesis judges results, never the clock of a busy machine."""

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session", params=["conversation", "synthetic"])
def released(request):
    """A released trace; where a machine has none, tests that want it are skipped."""
    from mooncake_lab.workload import find_trace, load

    if find_trace(request.param) is None:
        pytest.skip(f"the released {request.param} trace is not on this machine; `make traces` fetches it")
    return load(request.param)
