"""A calibration of servers in virtual time finds their costs again, and predicts them."""

import numpy as np
import pytest
from virtual_server import VirtualServer

from mooncake_lab.calibrate import HeldOut, Observed, ServerSettings, StudyPlan, conclude, observe
from mooncake_lab.calibrate.observations import CalibrationError
from mooncake_lab.workload.transforms import SharedPrefix

REQUESTS = 30
PLAN = StudyPlan(shares=(0.5, 1.1), repetitions=1, most_lanes=8)
SETTINGS = ServerSettings(prefix_caching=False)


def held_out(settings):
    trace = SharedPrefix(
        requests=4 * REQUESTS, requests_per_s=1.0, input_tokens=3000, shared_tokens=0, output_tokens=250
    ).make()
    return HeldOut.of(trace, settings, divide=16, requests=REQUESTS)


def calibrated(server, settings=SETTINGS, plan=PLAN):
    seen = Observed()
    observe(server, settings, held_out(settings), plan, lambda *_: None, seen)
    return conclude(seen, settings, plan)


@pytest.mark.parametrize("elsewhere_s", [0.0, 0.0213])
def test_separate_stages_are_found_again(elsewhere_s):
    """Of a prefill and a decode worker every cost is found, and what a request waits elsewhere; runs are exact."""
    server = VirtualServer(separate=True, elsewhere_s=elsewhere_s)
    settings = ServerSettings(scheduler="disaggregated", max_num_batched_tokens=1, prefix_caching=False)
    done = calibrated(server, settings)
    model = done.fitted.model
    assert model.prefill.per_token_s == pytest.approx(server.token_s, rel=1e-6)
    assert model.prefill.constant_s == pytest.approx(server.prompt_s, rel=1e-6)
    assert model.schedule_s == pytest.approx(elsewhere_s, abs=1e-8)
    assert (model.decode.constant_s, model.decode.per_request_s) == pytest.approx(
        (server.step_s, server.request_s), rel=1e-6
    )
    errors = [row["error"] for rate in done.rates for row in rate["errors"]]
    assert len(errors) == 2 * 10
    assert np.abs(errors).max() < 1e-6


@pytest.mark.parametrize("hidden", [0.0, 0.35, 1.0])
def test_one_worker_for_both_stages_is_found_again(hidden):
    """Its costs are found, and how much of reading the weights an iteration hides behind computing its tokens."""
    server = VirtualServer(hidden=hidden, elsewhere_s=0.01)
    done = calibrated(server)
    model = done.fitted.model
    assert done.fitted.hidden == pytest.approx(hidden)
    assert model.hybrid.per_token_s == pytest.approx(server.token_s, rel=0.02)
    assert model.prefill.constant_s + model.schedule_s == pytest.approx(server.prompt_s + 0.01, rel=0.05)
    assert model.schedule_s == pytest.approx(0.01, rel=0.1)
    errors = [row["error"] for rate in done.rates for row in rate["errors"]]
    assert np.abs(errors).max() < 1e-3


class _Dying:
    """A server that answers so many calls, and then no more."""

    def __init__(self, calls):
        self._server, self._left = VirtualServer(), calls

    def __getattr__(self, name):
        return getattr(self._server, name)

    def replies(self, lanes, note):
        """As the server, while it lives."""
        self._left -= 1
        if self._left < 0:
            raise CalibrationError("the server closed the connection")
        return self._server.replies(lanes, note)


def test_a_server_that_dies_later_keeps_what_was_observed():
    """Its first held-out run is predicted, and the report says why the measuring ended."""
    whole = Observed()
    counted = _Dying(10**9)
    observe(counted, SETTINGS, held_out(SETTINGS), PLAN, lambda *_: None, whole)
    calls = 10**9 - counted._left
    seen = Observed()
    observe(_Dying(calls - 1), SETTINGS, held_out(SETTINGS), PLAN, lambda *_: None, seen)
    assert seen.ended_by == "the server closed the connection"
    assert len(seen.held_out) == len(whole.held_out) - 1 == 1
    assert len(conclude(seen, SETTINGS, PLAN).rates) == 1
    with pytest.raises(CalibrationError, match="closed the connection"):
        observe(_Dying(3), SETTINGS, held_out(SETTINGS), PLAN, lambda *_: None, Observed())
