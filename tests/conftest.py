"""What every test shares: what is skipped on this machine, and hypothesis without a clock and without chance.

Each run draws the same examples, so that a change that passed here passes elsewhere. New ones are drawn by
`pytest --hypothesis-profile=explore`.
"""

import missing_here
import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("explore"), derandomize=True)
settings.load_profile("same")


def pytest_report_header() -> list[str]:
    """Say at the start what is skipped on this machine, and why."""
    return missing_here.summary()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a released trace or Mooncake's wheel where this machine has none."""
    reasons = [missing_here.traces(*mark.args) for mark in item.iter_markers("traces")]
    if item.get_closest_marker("wheel") is not None:
        reasons.append(missing_here.wheel())
    if why := "; ".join(filter(None, reasons)):
        pytest.skip(why)


@pytest.fixture(scope="session", params=missing_here.RELEASED)
def released(request):
    """A released trace; where a machine has none, tests that want it are skipped."""
    from mooncake_lab.workload import load

    return load(request.param)
