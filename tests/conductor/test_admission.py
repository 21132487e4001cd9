"""Admission policies: what each asks, about which moment, and what the decode instance says in the end."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.conductor import (
    ADMISSION_POLICIES,
    AdaptiveThreshold,
    AfterPrefill,
    ClusterView,
    DecodeView,
    EarlyRejection,
    LengthHistogram,
    LengthPredicting,
    Placement,
    PredictiveRejection,
    PrefillView,
    PriorityClasses,
    RecentView,
    Rejection,
    ServedView,
)
from mooncake_lab.core import SLO, Request

LIMITS = SLO(ttft_s=10.0, tbt_s=0.1)


class Ten:
    """A decode instance is full with ten requests, whatever their contexts."""

    def decode_step_s(self, requests, _context_tokens):
        return requests * 0.01


def request(number=0, priority=0, arrival_s=100.0):
    return Request(id=number, arrival_s=arrival_s, input_tokens=100, block_keys=(number,), priority=priority)


def placement(ttft_s=1.0):
    return Placement(
        request_id=0,
        prefill="p",
        decode="d",
        reused_tokens=0,
        expected_ttft_s=ttft_s,
        expected_tbt_s=0.05,
        reason="",
    )


def view(present=(), coming=(), **more):
    """One decode instance with requests that began, or will begin, at the given times."""
    served = [tuple(ServedView(i, 100, at) for i, at in enumerate(times)) for times in (present, coming)]
    count = len(present) + len(coming)
    decode = DecodeView("d", count, 100 * count, 10**6, *served)
    return ClusterView(100.0, (PrefillView("p", 0.0, 0, 0, 0),), (decode,), **more)


def admits(policy, seen, ttft_s=1.0, asking=None):
    return isinstance(
        policy.admit(asking or request(), placement(ttft_s), seen, estimate=Ten(), slo=LIMITS), Placement
    )


def late(policy, present):
    return policy.double_check(request(), view([90.0] * present).decode[0], estimate=Ten(), slo=LIMITS)


@pytest.mark.parametrize(
    "name", ["after_prefill", "early", "committed", "predictive", "length_predicting", "adaptive"]
)
class TestWhoeverKnowsLoad:
    def test_refuses_when_prefill_is_full(self, name):
        """A predicted TTFT at its limit is a load of one."""
        policy = ADMISSION_POLICIES[name]()
        assert admits(policy, view(), ttft_s=9.9)
        assert not admits(policy, view(), ttft_s=10.0)

    def test_checks_twice(self, name):
        """The decode instance refuses whom it has no place for, at the stage called decode."""
        policy = ADMISSION_POLICIES[name]()
        assert late(policy, 8) is None
        refused = late(policy, 9)
        assert isinstance(refused, Rejection)
        assert refused.stage == "decode"


class TestWhichMoment:
    def test_the_baseline_does_not_ask_decode_on_arrival(self):
        """However full decode is, the baseline prefills."""
        assert admits(AfterPrefill(), view([90.0] * 30))

    def test_early_rejection_looks_at_now(self):
        """Nine are there and one comes: full. Nine that are on their way do not count, unless told to."""
        assert not admits(EarlyRejection(), view([90.0] * 9))
        assert admits(EarlyRejection(), view([], [101.0] * 9))
        assert not admits(EarlyRejection(with_coming=True), view([], [101.0] * 9))

    def test_prediction_looks_at_the_end_of_prefill(self):
        """Those whose t_d is over by then have left, those expected before then are there, later ones are not."""
        policy = PredictiveRejection(decode_s=8.0)
        assert not admits(policy, view([95.0] * 9), ttft_s=2.0)
        assert admits(policy, view([95.0] * 9), ttft_s=3.0)
        assert not admits(policy, view([], [101.0] * 9), ttft_s=2.0)
        assert admits(policy, view([], [103.0] * 9), ttft_s=2.0)

    def test_reserving_keeps_the_place_of_later_ones(self):
        """With it, who was placed before counts also when he joins after."""
        policy = PredictiveRejection(decode_s=8.0, reserving=True)
        assert not admits(policy, view([], [103.0] * 9), ttft_s=2.0)

    def test_prediction_prefers_the_slow_prompt(self):
        """With decode full now, a long prefill is admitted and a short one is not: a bias."""
        policy = PredictiveRejection(decode_s=10.0)
        full = view([99.0] * 9)
        assert not admits(policy, full, ttft_s=1.0)
        assert admits(policy, full, ttft_s=9.5)

    def test_an_old_view_does_not_shift_the_moment(self):
        """The moment counts from the request's arrival, which is known however old the view is."""
        policy = PredictiveRejection(decode_s=8.0)
        assert admits(policy, view([100.0] * 9), ttft_s=2.0, asking=request(arrival_s=106.0))

    @given(st.integers(0, 20), st.integers(0, 20), st.floats(0.1, 9.0))
    def test_counting_more_admits_less(self, present, coming, ttft_s):
        """Whoever early rejection refuses, counting the coming refuses too."""
        seen = view([95.0] * present, [101.0] * coming)
        if admits(EarlyRejection(with_coming=True), seen, ttft_s):
            assert admits(EarlyRejection(), seen, ttft_s)


class TestLearnedLengths:
    def test_with_nothing_learned_nobody_leaves(self):
        """An empty book is careful: all that decode now are expected to stay."""
        assert not admits(LengthPredicting(), view([1.0] * 9), ttft_s=5.0)

    def test_short_answers_are_expected_to_leave(self):
        """When all answers had twenty tokens, nine that began long ago make room."""
        book = LengthHistogram()
        for _ in range(20):
            book = book.with_answer(100, 20)
        assert admits(LengthPredicting(), view([99.9] * 9, lengths=book), ttft_s=5.0)


def test_priority_keeps_room_for_the_urgent():
    """Between the two thresholds only the higher class is admitted, and finite classes are what is allowed."""
    policy = PriorityClasses(thresholds=(0.5, 1.0))
    seen = view([90.0] * 6)
    assert not admits(policy, seen)
    assert admits(policy, seen, asking=request(priority=1))
    assert admits(policy, seen, asking=request(priority=7))
    with pytest.raises(ValueError, match="rising with priority"):
        PriorityClasses(thresholds=(1.0, 0.5))


@given(st.integers(0, 50), st.integers(1, 50))
def test_the_adaptive_threshold_falls_with_waste_and_stops(refused, received):
    """It lies between its floor and the threshold, and more waste never raises it."""
    policy = AdaptiveThreshold()
    refused = min(refused, received)
    here, more = (
        policy.threshold_in(view(recent=RecentView(60.0, received, r)))
        for r in (refused, min(received, refused + 1))
    )
    assert policy.least <= more <= here <= policy.threshold


def test_every_named_policy_is_frozen():
    """Policies hold knobs, not state."""
    for make in ADMISSION_POLICIES.values():
        policy = make()
        for field in dataclasses.fields(policy):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(policy, field.name, 0)
