"""A latency model fitted to a log is the one that made the log."""

import pytest
from drawn import REALISTIC
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.core import Arrived, DecodeStretch, Finished, FirstToken, Placed, Prefilled
from mooncake_lab.perf import PrefillLatency
from mooncake_lab.perf.calibration import model_from_log
from mooncake_lab.simulation import Cluster
from mooncake_lab.workload import SharedPrefix

PREFILL = PrefillLatency(constant_s=0.05, per_token_s=1e-4, per_token_squared_s=1e-8, load_s_per_token=1e-5)
DECODE = REALISTIC.decode


def prefilled(i, start_s, tokens, reused):
    return Prefilled(
        at_s=start_s + PREFILL.seconds(tokens, reused), request_id=i, instance="p", start_s=start_s,
        computed_tokens=tokens - reused, reused_tokens=reused,
    )  # fmt: skip


def decoded(i, first_s, tokens, steps):
    """The first token, a stretch, and the end."""
    step_s, growth_s = DECODE.step_s(1, tokens), DECODE.step_growth_s(1)
    end_s = first_s + steps * step_s + steps * (steps - 1) / 2 * growth_s
    return [
        FirstToken(at_s=first_s, request_id=i),
        DecodeStretch(
            at_s=end_s, instance=f"d{i % 2}", start_s=first_s, steps=steps, first_step_s=step_s,
            step_growth_s=growth_s, request_ids=(i,),
        ),
        Finished(at_s=end_s, request_id=i, output_tokens=steps + 1),
    ]  # fmt: skip


def log_of(pairs, wait_s, between_s, handover_s):
    """Pairs of requests far apart: one finds idle instances, the other is placed while its prompt is computed."""
    for place, (tokens, reused, steps) in enumerate(pairs):
        i, at_s = 2 * place, 1000.0 * place
        for each in (i, i + 1):
            yield Arrived(at_s=at_s, request_id=each, input_tokens=tokens)
            yield Placed(
                at_s=at_s,
                request_id=each,
                prefill_instance="p",
                decode_instance=f"d{each % 2}",
                reused_tokens=reused,
            )
        first = prefilled(i, at_s + wait_s, tokens, reused)
        second = prefilled(i + 1, first.at_s + between_s, tokens, reused)
        for record in (first, second):
            yield record
            yield from decoded(record.request_id, record.at_s + handover_s, tokens, steps)


PAIRS = st.lists(
    st.tuples(st.integers(2000, 9000), st.integers(0, 1999), st.integers(1, 40)),
    min_size=8,
    max_size=12,
    unique_by=lambda row: row[0] // 100,
)
SECONDS = st.floats(0.001, 0.05)


@settings(max_examples=40, deadline=None)
@given(PAIRS, SECONDS, SECONDS, st.floats(0.06, 0.2))
def test_each_time_of_a_log_comes_back_where_it_belongs(pairs, wait_s, between_s, handover_s):
    """Waiting, prefill, the gap to the next prompt, hand-over and steps, from a log that was made of them."""
    found = model_from_log(list(log_of(pairs, wait_s, between_s, handover_s)), REALISTIC)
    assert found.start_s == pytest.approx([wait_s] * len(pairs), abs=1e-9)
    assert found.between_s == pytest.approx([between_s] * len(pairs), abs=1e-9)
    assert found.handover_s == pytest.approx([handover_s] * 2 * len(pairs), abs=1e-9)
    assert found.model.schedule_s == pytest.approx(wait_s, abs=1e-9)
    assert found.model.transfer.latency_s == pytest.approx(handover_s - between_s, abs=1e-9)
    for tokens, reused, _ in pairs:
        expected_s = PREFILL.seconds(tokens, reused)
        assert found.model.prefill.seconds(tokens, reused) == pytest.approx(expected_s + between_s, rel=1e-4)
        assert found.model.decode.step_s(1, tokens) == pytest.approx(DECODE.step_s(1, tokens), rel=1e-4)


def test_a_simulated_log_gives_the_model_back():
    """With prefixes that are shared, and decodes of several requests together."""
    trace = SharedPrefix(
        requests=200, requests_per_s=20.0, input_tokens=900, shared_tokens=320, output_tokens=30, prefixes=8,
        block_size_tokens=16,
    ).make()  # fmt: skip
    mixed = [one for i, one in enumerate(trace.requests()) if i % 2 or one.request.id < 100]
    spec = ClusterSpec.disaggregated(prefill_nodes=2, decode_nodes=1, block_size_tokens=16)
    found = model_from_log(Cluster(spec, REALISTIC).run(mixed), REALISTIC)
    assert found.prefill.max_relative_error < 1e-6
    assert found.decode.max_relative_error < 1e-6
    for name in ("constant_s", "per_request_s", "per_context_token_s"):
        assert getattr(found.model.decode, name) == pytest.approx(getattr(DECODE, name), rel=1e-3)
    seconds = REALISTIC.prefill.seconds(900.0, 320.0)
    assert found.model.prefill.seconds(900.0, 320.0) == pytest.approx(seconds, rel=1e-6)


def test_too_little_is_refused():
    """An empty log fits nothing, and says so."""
    with pytest.raises(ValueError, match="no prefills"):
        model_from_log([], REALISTIC)
