"""The classroom's check of admission policies: ours pass, broken ones are told what they broke."""

from dataclasses import dataclass

import pytest

from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.conductor import ADMISSION_POLICIES, AdmitAll, AfterPrefill, EarlyRejection, Rejection
from mooncake_lab.course.admission import (
    ADMISSION_LAWS,
    calm,
    calm_goodput,
    calm_rejected_share,
    check_admission,
    crowd,
    goodput,
)
from mooncake_lab.course.grading.scheduling_assignments import DecideOnce


@pytest.fixture(scope="module")
def model():
    """The paper's node."""
    return paper_node_latency()


@pytest.mark.parametrize("name", ADMISSION_POLICIES)
def test_ours_keep_every_law(name):
    """Each named policy keeps the contract."""
    policy = ADMISSION_POLICIES[name]()
    for law in ADMISSION_LAWS.values():
        law(policy)


def test_refusing_somebody_serves_more_than_refusing_nobody(model):
    """In a crowd, goodput is for those who say no."""
    assert goodput(EarlyRejection(), model, seed=1) > goodput(AdmitAll(), model, seed=1)


def test_a_crowd_is_its_seed():
    """The same seed gives the same requests in order of arrival, another seed others."""
    assert crowd(3) == crowd(3) != crowd(4)
    times = [traced.request.arrival_s for traced in crowd(3)]
    assert times == sorted(times)


def test_a_calm_stretch_is_served_whole(model):
    """Every policy of the ladder serves all of it in time, so that only blind rejection costs there."""
    times = [traced.request.arrival_s for traced in calm(3)]
    assert times == sorted(times)
    for policy in (DecideOnce(AfterPrefill()), AfterPrefill(), EarlyRejection()):
        assert calm_rejected_share(policy, model, seed=3) == 0.0
        assert calm_goodput(policy, model, seed=3) == 1.0


@dataclass
class Forgetful:
    """Remembers how many it has seen, refuses without reason, and the wrong request."""

    seen: int = 0

    def admit(self, request, proposed, view, *, estimate, slo):
        del request, view, estimate, slo
        self.seen += 1
        return proposed if self.seen % 2 else Rejection(request_id=-1, stage="admission", reason="")

    def double_check(self, request, decode, *, estimate, slo):
        del decode, estimate, slo
        return Rejection(request_id=request.id, stage="admission", reason="no")


def test_a_broken_policy_is_a_finding(model):
    """All that is wrong is said, and nothing raised."""
    report = check_admission(Forgetful(), model, seed=1)
    assert not report.passed
    assert set(report.broken) == set(ADMISSION_LAWS) - {"serves an idle cluster"}
    assert "FAILED" in str(report)


def test_one_that_raises_has_no_goodput(model):
    """A crash is a finding too."""
    report = check_admission(object(), model, seed=1)
    assert report.goodput is None
    assert report.calm_rejected_share is None
    assert "AttributeError" in report.broken["answers about this request"]
