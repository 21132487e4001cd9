"""Admission: what is counted as load, at which moment and over how many instances; and what is refused then."""

from dataclasses import dataclass, field, replace

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
    WithinSLO,
    full_decode_s,
    length_biased_mean,
    named_admission,
)
from mooncake_lab.conductor.admission import PredictedLoad
from mooncake_lab.conductor.history import share_longer
from mooncake_lab.core import SLO, Request

LIMITS = SLO(ttft_s=10.0, tbt_s=0.5)


class Linear:
    """A step takes a second per request and a millisecond per token of context."""

    def decode_step_s(self, requests, context_tokens):
        return requests + context_tokens / 1000


class PerRequest:
    """A step takes a quarter of a second per request."""

    def decode_step_s(self, requests, _context_tokens):
        return requests / 4


def request(input_tokens=100, arrival_s=100.0, priority=0):
    return Request(
        id=0, arrival_s=arrival_s, input_tokens=input_tokens, block_keys=(0,), block_size_tokens=10**6,
        priority=priority,
    )  # fmt: skip


def placement(ttft_s=5.0, tbt_s=0.1):
    return Placement(
        request_id=0, prefill="p", decode="d0", reused_tokens=0, expected_ttft_s=ttft_s, expected_tbt_s=tbt_s,
        reason="",
    )  # fmt: skip


def decode(name, decoding=(), coming=()):
    """An instance with requests of (input tokens, start)."""
    served = [
        tuple(ServedView(10 * k + i, tokens, at_s) for i, (tokens, at_s) in enumerate(rows))
        for k, rows in enumerate((decoding, coming))
    ]
    rows = (*decoding, *coming)
    return DecodeView(name, len(rows), sum(tokens for tokens, _ in rows), 10**6, *served)


def view(*instances, **more):
    return ClusterView(100.0, (PrefillView("p", 0.0, 0, 0, 0),), instances, **more)


POOL = view(decode("d0", [(200, 90.0)], [(300, 101.0), (400, 110.0)]), decode("d1"))


class TestLoadNow:
    @pytest.mark.parametrize("ttft_s", [4.9, 5.0])
    def test_prefill_is_the_expected_ttft_over_its_limit(self, ttft_s):
        """Five seconds of ten are half, and a load at the threshold is refused."""
        decision = AfterPrefill(0.5).admit(request(), placement(ttft_s), POOL, estimate=Linear(), slo=LIMITS)
        if ttft_s < 5.0:
            assert decision == placement(ttft_s)
        else:
            reason = "prefill load 0.5 reaches 0.5"
            assert decision == Rejection(request_id=0, stage="admission", reason=reason)

    def test_one_instance_counts_the_present_and_the_joining(self):
        """One request of 200 tokens is there; with one of 100 that joins a step takes 2.3 s of 0.5 s."""
        here = POOL.decode[0]
        refused = EarlyRejection(2.3 / 0.5).double_check(request(), here, estimate=Linear(), slo=LIMITS)
        assert refused == Rejection(request_id=0, stage="decode", reason="load of d0 4.6 reaches 4.6")
        above = EarlyRejection(2.3 / 0.5 + 1e-9)
        assert above.double_check(request(), here, estimate=Linear(), slo=LIMITS) is None

    def test_the_pool_is_its_mean_instance(self):
        """One request on two instances is half of one each, and the asking one is whole; the coming may count."""
        for policy, load in (
            (EarlyRejection(), (1 / 2 + 1 + (200 / 2 + 100) / 1000) / 0.5),
            (EarlyRejection(with_coming=True), (3 / 2 + 1 + (900 / 2 + 100) / 1000) / 0.5),
        ):
            assert policy.decode_load(request(), placement(), POOL, Linear(), LIMITS) == (load, "decode")


@dataclass(frozen=True)
class Chances(PredictedLoad):
    """A half of each request that decodes stays, and a quarter of each that comes."""

    asked: list = field(default_factory=list)

    def still_decodes(self, view, estimate):
        del view, estimate

        def chance(served, then_s):
            self.asked.append((served.input_tokens, served.starts_s, then_s))
            return 0.5 if served.request_id < 10 else 0.25

        return chance


class TestLoadPredicted:
    def test_each_request_counts_by_its_chance(self):
        """Over two instances a half of one that decodes and a quarter of each that comes; the request whole."""
        policy = Chances()
        load, name = policy.decode_load(request(), placement(5.0), POOL, Linear(), LIMITS)
        requests, tokens = 0.5 + 0.25, 0.5 * 200 + 0.25 * 300
        assert load == pytest.approx((requests / 2 + 1 + (tokens / 2 + 100) / 1000) / 0.5)
        assert name == "predicted decode"
        assert policy.asked == [(200, 90.0, 105.0), (300, 101.0, 105.0)]

    def test_a_request_that_joins_at_the_moment_counts(self):
        """A request that joins exactly then is there; if none leaves, all of them count whole."""
        policy = Chances()
        policy.decode_load(request(), placement(10.0), POOL, Linear(), LIMITS)
        assert [starts_s for _, starts_s, _ in policy.asked] == [90.0, 101.0, 110.0]
        everything = PredictedLoad().decode_load(request(), placement(10.0), POOL, Linear(), LIMITS)[0]
        assert (
            everything
            == EarlyRejection(with_coming=True).decode_load(request(), placement(), POOL, Linear(), LIMITS)[0]
        )


class TestLearnedLengths:
    BOOK = LengthHistogram()
    for _tokens in (1, 8, 30, 30, 100, 200) * 8:
        BOOK = BOOK.with_answer(200, _tokens)

    @pytest.mark.parametrize("arrival_s", [100.0, 103.0])
    def test_seconds_become_tokens_by_the_mean_step(self, arrival_s):
        """Steps of 0.25 s and 0.75 s are 0.5 s on average: 12 s are 24 tokens, the moment asked about has more."""
        seen = view(
            decode("d0", [(200, 88.0)]), decode("d1", [(200, 100.0)] * 3, [(200, 102.0)]), answer_lengths=self.BOOK
        )
        then_s = arrival_s + 2.0
        expected = share_longer(self.BOOK, 200, beyond=(then_s - 88.0) / 0.5, given=12 / 0.5)
        expected += 3 * share_longer(self.BOOK, 200, beyond=(then_s - 100.0) / 0.5)
        expected += share_longer(self.BOOK, 200, beyond=(then_s - 102.0) / 0.5)
        assert 2 < expected < 5
        limit_s = (expected / 2 + 1) / 4  # the step of the mean instance is then exactly at the limit
        for threshold, admitted in ((1 + 1e-9, True), (1 - 1e-9, False)):
            decision = LengthPredicting(threshold=threshold).admit(
                request(arrival_s=arrival_s), placement(2.0), seen, estimate=PerRequest(),
                slo=SLO(ttft_s=10.0, tbt_s=limit_s),
            )  # fmt: skip
            assert isinstance(decision, Placement) is admitted


class TestDecodeTime:
    def decode_s(self, capacity_tokens, input_tokens=(100,), output_tokens=(100,)):
        return full_decode_s(
            PerRequest(), LIMITS, input_tokens=input_tokens, output_tokens=output_tokens,
            capacity_tokens=capacity_tokens,
        )  # fmt: skip

    def test_a_full_instance_steps_at_its_limit(self):
        """100 tokens of output at 0.5 s each, where memory would allow slower steps."""
        assert self.decode_s(3000.0) == 100 * 0.5

    def test_memory_may_be_full_before(self):
        """225 tokens hold one and a half requests of 150 in mid-answer, whose step takes 0.375 s."""
        assert self.decode_s(225.0) == 100 * 1.5 / 4

    def test_one_request_is_always_there(self):
        """Where not even one fits on average, the step is that of one."""
        assert self.decode_s(10.0) == 100 * 0.25

    def test_long_answers_are_present_for_longer(self):
        """Of answers of 100 and 300 tokens, one that is present has 250 on average; prompts alike."""
        answers, prompts = (100, 300), (40, 80)
        assert length_biased_mean(answers, answers) == 250
        assert length_biased_mean(prompts, answers) == 70
        assert self.decode_s(1e6, prompts, answers) == 250 * 0.5
        assert self.decode_s(1.5 * (70 + 125), prompts, answers) == 250 * 1.5 / 4

    @given(st.lists(st.integers(1, 30), min_size=1, max_size=20))
    def test_the_mean_answer_at_a_random_moment(self, answers):
        """It is the mean over tokens: one found at a random moment is at any token of any answer."""
        found = [answer for answer in answers for _ in range(answer)]
        assert length_biased_mean(answers, answers) == pytest.approx(sum(found) / len(found))

    def test_a_request_leaves_after_its_decode_time(self):
        """With t_d of 8 s, one that began at 90 counts until before 98, from the later of view and arrival."""
        seen = view(decode("d0", [(1, 90.0)]))
        slo = SLO(ttft_s=50.0, tbt_s=0.5)  # full with two, of which the asking one is one
        for view_s, arrival_s, ttft_s, admitted in (
            (90.0, 91.0, 6.9, False), (90.0, 91.0, 7.0, True), (95.0, 91.0, 2.9, False), (95.0, 91.0, 3.0, True),
        ):  # fmt: skip
            decision = PredictiveRejection(decode_s=8.0).admit(
                request(arrival_s=arrival_s), placement(ttft_s), seen.replace(taken_at_s=view_s),
                estimate=PerRequest(), slo=slo,
            )  # fmt: skip
            assert isinstance(decision, Placement) is admitted


@given(st.integers(0, 20), st.integers(1, 20), st.floats(0.1, 2.0), st.sampled_from([None, 0.1, 0.75, 1.5]))
def test_the_adaptive_threshold_falls_by_the_share_refused(refused, received, gain, arrival):
    """On arrival it is the threshold less the gain times the share, and not below a floor that lies lower."""
    refused = min(refused, received)
    policy = AdaptiveThreshold(gain=gain, least=0.25, arrival_threshold=arrival)
    seen = view(decode("d0"), recent=RecentView(60.0, received, refused))
    start = 1.0 if arrival is None else arrival
    assert policy.threshold_in(seen) == pytest.approx(max(min(0.25, start), start - gain * refused / received))
    assert policy.threshold_in(view(decode("d0"))) == start


def test_the_adaptive_threshold_leaves_the_second_check():
    """However many prefills were refused, a request that fits is not refused after its prefill."""
    seen = view(decode("d0"), recent=RecentView(60.0, 10, 10))
    for policy in (AdaptiveThreshold(gain=0.9), AdaptiveThreshold(gain=0.9, arrival_threshold=0.8)):
        assert isinstance(
            policy.admit(request(), placement(7.0), seen, estimate=PerRequest(), slo=LIMITS), Rejection
        )
        assert policy.double_check(request(), seen.decode[0], estimate=PerRequest(), slo=LIMITS) is None


@pytest.mark.parametrize(
    ("ttft_s", "tbt_s", "names"), [(10.0, 0.5, None), (10.1, 0.5, "TTFT"), (10.0, 0.6, "TBT")]
)
def test_algorithm_1_rejects_what_exceeds_a_limit(ttft_s, tbt_s, names):
    """A latency at its limit meets it; the rejection names the limit that is exceeded."""
    decision = WithinSLO().admit(request(), placement(ttft_s, tbt_s), POOL, estimate=Linear(), slo=LIMITS)
    if names is None:
        assert decision == placement(ttft_s, tbt_s)
    else:
        assert isinstance(decision, Rejection)
        assert decision.reason.startswith(f"expected {names}")


@pytest.mark.parametrize(("priority", "threshold"), [(0, 0.25), (1, 0.75), (2, 0.75), (9, 0.75)])
def test_a_class_has_its_threshold_and_higher_ones_the_last(priority, threshold):
    """Just below the threshold of its class a request is admitted, at the threshold it is refused."""
    policy = PriorityClasses(thresholds=(0.25, 0.75))
    for load, admitted in ((threshold - 1e-9, True), (threshold, False)):
        decision = policy.admit(
            request(priority=priority), placement(load * 10), view(decode("d0")), estimate=PerRequest(),
            slo=SLO(ttft_s=10.0, tbt_s=10.0),
        )  # fmt: skip
        assert isinstance(decision, Placement) is admitted


def test_classes_differ_in_both_checks():
    """At a load of 0.75, class 0 is refused and class 1 is not, on arrival and after the prefill."""
    seen = view(decode("d0", [(100, 90.0)] * 2))  # with the request three, of which four fill it
    slo = SLO(ttft_s=10.0, tbt_s=1.0)
    for inner in (EarlyRejection(), EarlyRejection(0.1), EarlyRejection(arrival_threshold=0.1), AfterPrefill()):
        policy = PriorityClasses(inner=inner, thresholds=(0.75, 0.8))
        for priority, refused in ((0, True), (1, False)):
            asking = request(priority=priority)
            arrival = policy.admit(asking, placement(1.0), seen, estimate=PerRequest(), slo=slo)
            after = policy.double_check(asking, seen.decode[0], estimate=PerRequest(), slo=slo)
            assert isinstance(arrival, Rejection) is (refused and not isinstance(inner, AfterPrefill))
            assert (after is not None) is refused


def test_the_knobs_that_chapters_leave_alone():
    """The book states them; whether places are kept is said by name only."""
    assert PredictiveRejection() == PredictiveRejection(1.0, 51.4, arrival_threshold=None)
    assert AdaptiveThreshold() == AdaptiveThreshold(1.0, with_coming=False, gain=1.0, least=0.5)
    assert PriorityClasses().thresholds == (0.8, 1.0)


def test_names_that_are_settings_of_a_policy():
    """The command line's `committed` is early rejection that counts what is on its way."""
    assert ADMISSION_POLICIES["committed"]() == EarlyRejection(with_coming=True) != ADMISSION_POLICIES["early"]()


def test_a_named_policy_has_the_decode_time_it_is_given():
    """Only prediction with one decode time for all requests takes it; the others keep their defaults."""
    assert named_admission("predictive", decode_s=3.0) == PredictiveRejection(decode_s=3.0)
    assert named_admission("early", decode_s=3.0) == EarlyRejection()


ARRIVING = (
    EarlyRejection(),
    EarlyRejection(with_coming=True),
    PredictiveRejection(),
    LengthPredicting(),
    AdaptiveThreshold(),
)
"""Every policy that looks at the decode pool on arrival."""


def pools(most_instances):
    """Up to so many decode instances with up to six requests each, all of which began at 90 s."""
    rows = st.lists(st.tuples(st.integers(1, 900), st.just(90.0)), max_size=6)
    return st.lists(rows, min_size=1, max_size=most_instances)


class TestOneQuestionInBothChecks:
    """On arrival the request counts whole, on the mean instance, as after its prefill on its own."""

    @given(pools(1), st.integers(1, 900), st.floats(0.5, 10.0))
    def test_one_instance_and_no_prefill_refuse_the_same(self, rows, input_tokens, limit_s):
        """With one decode instance, nothing in prefill and no prefill time, both checks refuse the same."""
        seen, slo = view(decode("d0", rows[0])), SLO(ttft_s=10.0, tbt_s=limit_s)
        asking = request(input_tokens)
        for policy in ARRIVING:
            on_arrival = policy.admit(asking, placement(0.0), seen, estimate=Linear(), slo=slo)
            after = policy.double_check(asking, seen.decode[0], estimate=Linear(), slo=slo)
            assert isinstance(on_arrival, Rejection) is (after is not None)

    @pytest.mark.parametrize("policy", ARRIVING, ids=repr)
    @pytest.mark.parametrize("instances", [1, 3, 8])
    def test_a_scarce_pool_is_refused_on_arrival_already(self, policy, instances):
        """Where each instance has nine of the ten requests that fill it, both checks refuse the next."""
        seen = view(*(decode(f"d{i}", [(100, 90.0)] * 9) for i in range(instances)))
        assert policy.double_check(request(), seen.decode[0], estimate=Ten(), slo=WIDE) is not None
        assert not admits(policy, seen)

    @given(pools(4), st.integers(1, 900), st.floats(0.5, 10.0))
    def test_no_arrival_is_refused_that_every_instance_would_take(self, rows, input_tokens, limit_s):
        """The mean instance is no fuller than the fullest, so a request that every instance takes is taken."""
        seen, slo = view(*(decode(f"d{i}", each) for i, each in enumerate(rows))), SLO(10.0, limit_s * (1 + 1e-9))
        asking, just_below = request(input_tokens), SLO(10.0, limit_s)
        policy = EarlyRejection()
        if all(
            policy.double_check(asking, each, estimate=Linear(), slo=just_below) is None for each in seen.decode
        ):
            assert isinstance(policy.admit(asking, placement(0.0), seen, estimate=Linear(), slo=slo), Placement)


@pytest.mark.parametrize("policy", [*ARRIVING, AfterPrefill()], ids=repr)
def test_the_arrival_threshold_is_that_of_arrival_alone(policy):
    """Both loads are compared with it on arrival; after the prefill, the load is compared with the other one."""
    lower = replace(policy, arrival_threshold=0.5)
    idle, half = view(decode("d0")), view(decode("d0", [(100, 90.0)] * 4))
    assert admits(policy, idle, ttft_s=5.0)
    assert not admits(lower, idle, ttft_s=5.0)
    assert admits(policy, half)
    assert admits(lower, half) is isinstance(policy, AfterPrefill)
    for threshold, refused in ((0.5, True), (1.0, False)):
        checked = replace(policy, threshold=threshold, arrival_threshold=0.9)
        assert (checked.double_check(request(), half.decode[0], estimate=Ten(), slo=WIDE) is not None) is refused


WIDE = SLO(ttft_s=10.0, tbt_s=0.1)


class Ten:
    """A decode instance is full with ten requests, whatever their contexts."""

    def decode_step_s(self, requests, _context_tokens):
        return requests * 0.01


def crowd(present=(), coming=(), **more):
    """One decode instance with requests that began, or will begin, at the given times."""
    served = [tuple(ServedView(i, 100, at) for i, at in enumerate(times)) for times in (present, coming)]
    count = len(present) + len(coming)
    decode = DecodeView("d", count, 100 * count, 10**6, *served)
    return ClusterView(100.0, (PrefillView("p", 0.0, 0, 0, 0),), (decode,), **more)


def admits(policy, seen, ttft_s=1.0, asking=None):
    return isinstance(
        policy.admit(asking or request(), placement(ttft_s), seen, estimate=Ten(), slo=WIDE), Placement
    )


class TestWhichMoment:
    def test_early_rejection_looks_at_now(self):
        """Nine are there and one comes: full. Nine that are on their way do not count, unless told to."""
        assert not admits(EarlyRejection(), crowd([90.0] * 9))
        assert admits(EarlyRejection(), crowd([], [101.0] * 9))
        assert not admits(EarlyRejection(with_coming=True), crowd([], [101.0] * 9))

    @given(st.integers(0, 20), st.integers(0, 20), st.floats(0.1, 9.0))
    def test_counting_more_admits_less(self, present, coming, ttft_s):
        """Whoever early rejection refuses, counting the coming refuses too."""
        seen = crowd([95.0] * present, [101.0] * coming)
        if admits(EarlyRejection(with_coming=True), seen, ttft_s):
            assert admits(EarlyRejection(), seen, ttft_s)
