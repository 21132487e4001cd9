"""What every placement and admission policy promises (DESIGN: the seams)."""

import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.conductor import (
    ADMISSION_POLICIES,
    PLACEMENT_POLICIES,
    ClusterView,
    DecodeView,
    KVCacheCentric,
    LengthHistogram,
    LoadBalance,
    Placement,
    PrefillView,
    RecentView,
    Rejection,
    ServedView,
    decide,
    needs_of,
)
from mooncake_lab.core import SLO, Request, blocks_for

POLICIES = [
    policy for make in PLACEMENT_POLICIES.values() if "coupled_instances" not in needs_of(policy := make())
]
POLICIES += [KVCacheCentric(3.0, "arxiv"), LoadBalance("queued_requests"), LoadBalance("assigned_requests")]


class Estimate:
    """Round numbers: a millisecond a computed token, a microsecond a moved one."""

    fetches_by_layer = False

    def prefill_s(self, _request_id, input_tokens, reused_tokens):
        return (input_tokens - reused_tokens) * 1e-3

    def transfer_s(self, tokens, flows):
        return tokens * 1e-6 * (flows + 1)

    def decode_step_s(self, requests, context_tokens):
        return 0.02 + 1e-3 * requests + 1e-8 * context_tokens


REQUESTS = st.builds(
    lambda i, tokens: Request(
        id=i, arrival_s=0.0, input_tokens=tokens, block_keys=tuple(range(blocks_for(tokens, 512)))
    ),
    st.integers(0, 10**6),
    st.integers(1, 20_000),
)


SERVED = st.builds(ServedView, st.integers(0, 99), st.integers(1, 9000), st.floats(0, 1e4))
BOOKS = st.sampled_from([LengthHistogram(), LengthHistogram().with_answer(900, 40).with_answer(2000, 7)])


@st.composite
def cases(draw):
    """A request and a view of it in which no instance holds more blocks than there are."""
    request = draw(REQUESTS)
    blocks = len(request.block_keys)
    prefill = st.builds(
        PrefillView,
        name=st.just(""),
        backlog_s=st.floats(0, 50),
        queued_requests=st.integers(0, 9),
        assigned_requests=st.integers(0, 99),
        matched_blocks=st.integers(0, blocks),
        outgoing_flows=st.integers(0, 3),
    )
    decode = st.builds(
        DecodeView,
        name=st.just(""),
        requests=st.integers(0, 40),
        context_tokens=st.integers(0, 50_000),
        capacity_tokens=st.integers(1, 60_000),
        decoding=st.lists(SERVED, max_size=4).map(tuple),
        coming=st.lists(SERVED, max_size=3).map(tuple),
    )
    prefills = draw(st.lists(prefill, min_size=1, max_size=5))
    decodes = draw(st.lists(decode, min_size=1, max_size=4))
    view = ClusterView(
        draw(st.floats(0, 1e4)),
        tuple(p.replace(name=f"prefill-{i}") for i, p in enumerate(prefills)),
        tuple(_consistent(d, f"decode-{i}") for i, d in enumerate(decodes)),
        draw(BOOKS),
        RecentView(60.0, 4, draw(st.integers(0, 4))),
    )
    return request, view


def _consistent(decode, name):
    """An instance whose counts cover those who are on their way."""
    coming_tokens = sum(served.input_tokens for served in decode.coming)
    return decode.replace(
        name=name,
        requests=decode.requests + len(decode.coming),
        context_tokens=decode.context_tokens + coming_tokens,
    )


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
class TestEveryPlacementPolicy:
    @given(case=cases())
    @settings(max_examples=50)
    def test_places_within_the_view_and_decides_the_same_again(self, policy, case):
        """Instances exist, reuse and fetch add up to what their holders have, and decisions replay (I7)."""
        request, view = case
        arguments = {"placement": policy, "estimate": Estimate(), "slo": SLO()}
        for admission in ADMISSION_POLICIES.values():
            first, second = (decide(request, view, admission=admission(), **arguments) for _ in range(2))
            assert first == second
        placed = policy.place(request, view, Estimate())
        prefill = {p.name: p for p in view.prefill}
        assert placed.prefill in prefill
        assert placed.decode in {d.name for d in view.decode}
        local = min(prefill[placed.prefill].matched_blocks * 512, request.input_tokens - 1)
        assert placed.reused_tokens == local + placed.fetched_tokens < request.input_tokens
        if placed.fetch_from is None:
            assert placed.fetched_tokens == 0
        else:
            assert placed.fetch_from != placed.prefill
            assert placed.reused_tokens <= prefill[placed.fetch_from].matched_blocks * 512
            assert placed.fetched_tokens > 0

    def test_cannot_name_an_output_length(self, policy):
        """No policy's source mentions the future it must not see (I6)."""
        assert "output_tokens" not in inspect.getsource(type(policy))


class TestDecide:
    @given(case=cases())
    def test_slo_admission_rejects_exactly_what_exceeds_a_limit(self, case):
        """The last test of Algorithm 1: reject if and only if an expected latency is over its limit."""
        request, view = case
        slo = SLO(ttft_s=5.0, tbt_s=0.04)
        arguments = {"placement": KVCacheCentric(), "estimate": Estimate(), "slo": slo}
        proposed = decide(request, view, admission=ADMISSION_POLICIES["none"](), **arguments)
        decision = decide(request, view, admission=ADMISSION_POLICIES["slo"](), **arguments)
        if isinstance(proposed, Rejection):  # what fits nowhere is nobody's to admit
            assert proposed.stage == "capacity"
            assert decision == proposed
            return
        within = proposed.expected_ttft_s <= slo.ttft_s and proposed.expected_tbt_s <= slo.tbt_s
        assert isinstance(decision, Placement) == within
        if not within:
            assert "exceeds" in decision.reason
